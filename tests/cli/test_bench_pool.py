"""`pdlink bench read` and `bench loop`: what rows say, what is refused before anything starts, and small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdlink.cli import pool_fault
from pdlink.cli.exits import WrongRun
from pdlink.cli.main import main
from pdlink.cli.pool_case import PoolCase, make_rows
from pdlink.errors import InvalidInput

READERS = ("whole-pool", "peer")
CASE = PoolCase(False, READERS, 2, 2, 64, 256, 0, 0, 4)


def test_a_case_survives_the_command_line() -> None:
    assert PoolCase.from_json(CASE.to_json()) == CASE


def test_ratios_are_taken_round_by_round() -> None:
    taken = {"whole-pool": [10.0, 20.0, 40.0, 10.0], "peer": [1.0, 4.0, 2.0, 1.0]}
    base, peer = make_rows(CASE, taken, {"whole-pool": 900, "peer": 90})
    assert (base["ratio"], base["ms"], base["bytes_moved"]) == (1.0, 15.0, 900)
    assert (peer["ms"], peer["min_ms"], peer["bytes_moved"], peer["baseline"]) == (1.5, 1.0, 90, "whole-pool")
    # The ratios of the rounds are 0.1, 0.2, 0.05 and 0.1.
    assert peer["ratio"] == pytest.approx(0.1)
    assert (peer["ratio_low"], peer["ratio_high"]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_without_a_baseline_there_is_no_ratio() -> None:
    case = PoolCase(True, ("peer",), 2, 2, 64, 256, 0, 0, 1)
    (row,) = make_rows(case, {"peer": [1.0]}, {"peer": 90})
    assert row["ratio"] is None
    assert row["baseline"] == "none"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "tpu"}, "give cpu or cuda"),
        ({"readers": ["peer", "copy"]}, "--reader copy is measured on GPUs only"),
        ({"readers": ["sglang"]}, "--reader sglang is measured on GPUs only"),
        ({"loop": True, "device": "cuda", "readers": ["copy"]}, "no forward"),
        ({"ranks": 1}, "at least 2"),
        ({"live_tokens": 250, "chunk_tokens": 7}, "give --pool-tokens of at least 257"),
        ({"pool_tokens": 100}, "a multiple of 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    facts = json.loads(CASE.to_json()) | changes
    with pytest.raises(InvalidInput, match=words):
        PoolCase.from_json(json.dumps(facts))


def test_rows_say_what_a_pool_would_pick_and_how_fast_a_read_was() -> None:
    taken = {"whole-pool": [2.0], "peer": [1.0]}
    rows = make_rows(CASE, taken, {"whole-pool": 8_000_000, "peer": 1_000_000}, "peer, because")
    assert [row["gb_s"] for row in rows] == [4.0, 1.0]
    assert {row["picked"] for row in rows} == {"peer, because"}
    loop = PoolCase(True, ("none",), 2, 2, 64, 256, 0, 0, 1)
    assert make_rows(loop, {"none": [1.0]}, {"none": 0})[0]["gb_s"] is None


def test_the_width_of_products_follows_the_device() -> None:
    assert CASE.product_width == 512
    assert PoolCase(False, READERS, 2, 2, 64, 256, 0, 0, 4, "cuda").product_width == 6144
    assert PoolCase(False, READERS, 2, 2, 64, 256, 0, 0, 4, "cuda", width=64).product_width == 64


def test_without_a_gpu_nothing_is_started(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "read", "--device", "cuda", "--live-tokens", "64", "--pool-tokens", "128"]) != 0
    assert "torch finds none here" in capsys.readouterr().err


def test_the_command_refuses_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "read", "--live-tokens", "4096", "--pool-tokens", "64"]) != 0
    assert "--pool-tokens of at least 4096" in capsys.readouterr().err
    assert main(["bench", "loop", "--plot", str(tmp_path / "x.pdf")]) != 0
    assert "no .png file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("bench", ["read", "loop"])
def test_every_reader_has_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path, bench: str) -> None:
    sizes = ["--live-tokens", "100", "--pool-tokens", "512", "--layers", "3", "--rounds", "2", "--ranks", "3"]
    readers = [f"--reader={one}" for one in ("none", "whole-pool", "broadcast", "peer")]
    if bench == "loop":
        sizes += ["--chunk-tokens", "30", "--products", "1", "--ahead"]
    plot = tmp_path / "pool.png"
    assert main(["bench", bench, *sizes, *readers, "--json", "--plot", str(plot)]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["reader"] for row in rows] == ["none", "whole-pool", "broadcast", "peer"]
    moved = {row["reader"]: row["bytes_moved"] for row in rows}
    assert moved["none"] == 0
    assert moved["whole-pool"] == 512 * 788
    # Live pages and trailers; live rows alone.
    assert 128 * 788 < moved["broadcast"] < 128 * 788 + 512
    assert moved["peer"] == 100 * 788
    assert all("share one host" in row["picked"] for row in rows)
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_ranks_wait_the_longer_for_each_other_the_more_they_are() -> None:
    few, many = (PoolCase(False, READERS, ranks, 2, 64, 256, 0, 0, 1) for ranks in (2, 8))
    assert many.wait_s - few.wait_s == 60.0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_eight_ranks_split_layers_unevenly(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "8", "--layers", "10", "--live-tokens", "100", "--pool-tokens", "256", "--rounds", "1"]
    loop = ["--chunk-tokens", "30", "--products", "1", "--width", "32", "--ahead"]
    assert main(["bench", "loop", *sizes, *loop, "--json"]) == 0
    rows = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
    moved = {row["reader"]: row["bytes_moved"] for row in rows}
    assert (moved["none"], moved["whole-pool"], moved["peer"]) == (0, 256 * 788, 100 * 788)
    assert 128 * 788 < moved["broadcast"] < 128 * 788 + 512
    assert {row["ranks"] for row in rows} == {8}


TOLD = "PeerGone: the begin in forward 3: shard rank 1 (global rank 1) has ended"


def fault_row(reader: str, *fates: pool_fault.Fate) -> dict[str, Any]:
    case = PoolCase(True, (reader,), len(fates) + 1, 4, 64, 256, 0, 0, 1, timeout_s=5.0)
    return pool_fault.make_row(case, 1, fates)


def test_a_row_of_a_killed_rank_tells_what_became_of_the_others() -> None:
    raised = pool_fault.Fate(0, pool_fault.RAISED, 0.25, TOLD, 1, 0.5)
    row = fault_row("peer", raised, pool_fault.Fate(2, pool_fault.RAISED, 1.0, TOLD, 2, 0.125))
    assert (row["slowest_s"], row["timeout_s"], row["killed_rank"]) == (1.0, 5.0, 1)
    assert pool_fault.as_text(row) == ["peer", "3", "1", "2 raised", "2 of 2", "1.00", "1-2", "0.50"]
    pool_fault.check([row])


@pytest.mark.parametrize(
    "fate",
    [
        pool_fault.Fate(0, pool_fault.WENT_ON, 0.25, "", 4, 0.5),
        pool_fault.Fate(0, pool_fault.SILENT, 60.0),
        pool_fault.Fate(0, pool_fault.RAISED, 0.25, TOLD, 1, None),
        pool_fault.Fate(0, pool_fault.RAISED, 0.25, "IntegrityError: lost the shard group (global ranks 1, 2)", 1, 0.5),
    ],
)
def test_a_reader_of_pdlink_that_does_not_name_the_killed_rank_is_wrong(fate: pool_fault.Fate) -> None:
    with pytest.raises(WrongRun, match="names rank 1, and close"):
        pool_fault.check([fault_row("broadcast", fate)])
    pool_fault.check([fault_row("whole-pool", fate)])


def test_a_rank_that_there_is_not_cannot_be_killed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "loop", "--ranks", "2", "--kill-rank", "2"]) == 2
    assert "--kill-rank 2: there are ranks 0 to 1" in capsys.readouterr().err
    assert main(["bench", "loop", "--kill-rank", "1", "--plot", str(tmp_path / "x.png")]) == 2
    assert "--kill-rank takes none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_that_outlive_one_name_it_and_close(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "3", "--layers", "5", "--live-tokens", "100", "--pool-tokens", "256", "--chunk-tokens", "30"]
    rest = ["--products", "1", "--width", "32", "--ahead", "--reader", "broadcast", "--reader", "peer"]
    assert main(["bench", "loop", *sizes, *rest, "--kill-rank", "0", "--timeout-s", "20", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
    assert [row["reader"] for row in rows] == ["broadcast", "peer"]
    for row in rows:
        assert [(one["rank"], one["outcome"], one["names_rank"]) for one in row["others"]] == [
            (1, "raised", True),
            (2, "raised", True),
        ]
