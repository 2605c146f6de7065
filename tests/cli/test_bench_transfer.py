"""`pdlink bench transfer`: real processes and libraries, rows beside a baseline, bytes checked, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdlink.cli.main import main
from pdlink.cli.transfer_case import Case
from pdlink.cli.transfer_gpus import Gpus
from pdlink.cli.transfer_many import Group, Taken, make_row
from pdlink.errors import BackendUnavailable
from tests import processes
from tests.backends.needs import needs_mooncake

SMALL = ("--page-bytes", "4096", "--num-pages", "8", "--layers", "2")
NBYTES = 4096 * 8 * 2
FIGURES = ("gbps", "raw_gbps", "raw_large_range_gbps", "p50_ms", "p99_ms", "request_ms", "of_raw", "of_raw_large_range")
PHASES = ("prep_ms", "post_ms", "pack_ms", "wire_ms", "unpack_ms")


def run_rows(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert main(["bench", "transfer", *SMALL, *options, "--json"]) == 0, capsys.readouterr().err
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return rows


def check_row(row: dict[str, Any], rounds: int = 7) -> None:
    assert row["nbytes"] == NBYTES
    assert (row["page_bytes"], row["num_pages"], row["num_layers"], row["device"]) == (4096, 8, 2, "host")
    assert all(row[name] > 0 for name in FIGURES), row
    assert all(row[name] >= 0 for name in PHASES), row
    assert row["p50_ms"] <= row["p99_ms"] <= row["request_ms"] * 1000
    for name, rate in (
        ("rounds", "gbps"),
        ("raw_rounds", "raw_gbps"),
        ("raw_per_layer_rounds", "raw_per_layer_gbps"),
        ("raw_large_range_rounds", "raw_large_range_gbps"),
    ):
        taken = row[f"{name}_ms"]
        assert len(taken) == rounds
        # The rate is that of the median round, not of the best one.
        assert row[rate] == pytest.approx(NBYTES / sorted(taken)[rounds // 2] / 1e6)
    assert sum(row[name] for name in PHASES) <= sum(row["rounds_ms"])
    for name in ("raw", "raw_per_layer", "raw_large_range"):
        assert row[f"of_{name}"] == pytest.approx(row["gbps"] / row[f"{name}_gbps"])
    assert (row["raw_one_post_gbps"] is not None) == (row["backend"] == "nixl")
    assert row["num_cells"] == 16


def test_ipc_is_measured_both_ways_that_pages_lie(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.jsonl", tmp_path / "rates.png"
    rows = run_rows(capsys, "--backend", "ipc", "--rows", str(file), "--plot", str(picture))
    assert [(row["transport"], row["way"], row["scattered"]) for row in rows] == [
        ("shm", "mapped", True),
        ("shm", "mapped", False),
    ]
    for row in rows:
        check_row(row)
    # Pages without gaps are one range a layer.
    assert [row["num_descriptors"] for row in rows] == [16, 2]
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def run_many(capsys: pytest.CaptureFixture[str], owners: int, readers: int, *options: str) -> dict[str, Any]:
    sizes = ("--page-bytes", "4096", "--num-pages", "8", "--layers", "6", "--scattered")
    many = ("--owners", str(owners), "--readers", str(readers))
    assert main(["bench", "transfer", *sizes, *many, *options, "--json"]) == 0, capsys.readouterr().err
    row: dict[str, Any]
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["owners"], row["readers"], row["layers_by_owner"]) == (owners, readers, [2, 2, 1, 1])
    assert row["nbytes"] == 4096 * 8 * 6 * readers
    assert len(row["rounds_ms"]) == 7
    assert row["gbps"] == pytest.approx(row["nbytes"] / sorted(row["rounds_ms"])[3] / 1e6)
    # What all readers had together took no less time than what each had.
    assert len(row["reader_gbps"]) == readers
    assert all(one > 0 for one in row["reader_gbps"])
    if "--no-raw" in options:
        assert (row["raw_gbps"], row["links_gbps"]) == (None, None)
    else:
        assert row["of_raw"] == pytest.approx(row["gbps"] / row["raw_gbps"])
        assert row["of_links"] == pytest.approx(row["gbps"] / row["links_gbps"])
    return row


def test_one_reader_pulls_from_four_owners_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    row = run_many(capsys, 4, 1, "--backend", "ipc", "--no-raw")
    assert row["reader_gbps"] == [row["gbps"]]


NIXL = ("--backend", "nixl", "--transport", "tcp", "--way", "direct")
MOONCAKE = ("--backend", "mooncake", "--way", "direct")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_owners_stand_beside_the_library_on_as_many_links(capsys: pytest.CaptureFixture[str]) -> None:
    run_many(capsys, 4, 1, *NIXL)


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_mooncake
def test_four_readers_pull_from_four_owners_over_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    run_many(capsys, 4, 4, *MOONCAKE, "--no-raw")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--owners", "4", "--layers", "3"), "--owners 4 cannot split 3 layers"),
        (("--owners", "2", "--goals"), "--goals is for one owner and one reader"),
        (("--no-raw",), "--no-raw is for --owners or --readers of more than 1"),
    ],
)
def test_several_owners_or_readers_are_refused_where_they_make_no_sense(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert main(["bench", "transfer", "--backend", "ipc", *options]) == 2
    assert words in capsys.readouterr().err


def test_owners_have_a_gpu_each_and_readers_those_after_them() -> None:
    cases = [Case("ipc", "nvlink", "mapped", 4096, 8, 8, True, "cuda")]
    assert Group(4, 1).devices(Gpus(8, "nvlink")) == ([0, 1, 2, 3], [4])
    assert Group(4, 4).devices(Gpus(8, "nvlink")) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert Group(4, 4).devices(Gpus(4, "nvlink")) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert Group(4, 2).devices(None) == ([-1] * 4, [-1] * 2)
    Group(4, 4).check(cases, Gpus(4, "nvlink"))
    with pytest.raises(BackendUnavailable, match="need at least 4 GPUs, and torch finds 2"):
        Group(4, 1).check(cases, Gpus(2, "nvlink"))


def test_a_merged_rate_is_from_the_first_begin_to_the_last_end() -> None:
    case = Case("ipc", "shm", "mapped", 1000 * 8, 1, 2, True)
    taken = Taken(
        pulls=[{(0, 0): (1.0, 2.0), (1, 0): (1.5, 2.5), (0, 1): (2.0, 3.0), (1, 1): (2.0, 5.0)}],
        requests_s=[[4.0, 3.0]],
        raw=[{(0, 0): (0.0, 1.0), (1, 0): (0.0, 2.0), (0, 1): (0.0, 1.0), (1, 1): (0.0, 1.0)}],
        alone_s=[{(0, 0): 1.0, (1, 0): 1.0, (0, 1): 1.0, (1, 1): 2.0}],
    )
    row = make_row(case, Group(2, 2), taken)
    assert row["nbytes"] == 32_000
    assert row["gbps"] == pytest.approx(8e-6)
    assert row["reader_gbps"] == [pytest.approx(16_000 / 1.5 / 1e9), pytest.approx(16_000 / 3 / 1e9)]
    assert row["raw_gbps"] == pytest.approx(16e-6)
    assert row["links_gbps"] == pytest.approx((8 * 3 + 4) * 1e-6)
    assert row["request_ms"] == 4000.0


@pytest.mark.slow
def test_nixl_is_measured_over_the_transport_and_in_the_ways_that_were_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = run_rows(
        capsys, "--backend", "nixl", "--transport", "tcp", "--way", "direct", "--way", "staged", "--scattered"
    )
    assert [(row["transport"], row["way"], row["scattered"]) for row in rows] == [
        ("tcp", "direct", True),
        ("tcp", "staged", True),
    ]
    for row in rows:
        check_row(row)
    assert [row["num_descriptors"] for row in rows] == [16, 1]  # staged: all of it fits one slot
    assert rows[0]["pack_ms"] == rows[0]["unpack_ms"] == 0
    assert rows[1]["unpack_ms"] > 0  # the owner may have packed before anybody waited for it
    assert rows[0]["head_ms"] == rows[0]["tail_ms"] == 0 < min(rows[1]["head_ms"], rows[1]["tail_ms"])


@pytest.mark.slow
def test_nixl_over_cma_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--backend", "nixl", "--transport", "cma", "--way", "direct", "--contiguous", "--rounds", "9")
    (row,) = run_rows(capsys, *options)
    check_row(row, rounds=9)
    assert (row["transport"], row["num_descriptors"]) == ("cma", 2)


@pytest.mark.slow
@needs_mooncake
def test_mooncake_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run_rows(capsys, "--backend", "mooncake", "--way", "direct", "--scattered")
    check_row(row)
    assert (row["backend"], row["transport"], row["num_descriptors"]) == ("mooncake", "tcp", 16)


@pytest.mark.parametrize(("side", "words"), [("pdlink", "pdlink said success"), ("raw", "raw memmove")])
def test_bytes_that_are_not_the_owners_fail_the_run(capsys: pytest.CaptureFixture[str], side: str, words: str) -> None:
    assert main(["bench", "transfer", *SMALL, "--backend", "ipc", "--scattered", "--inject", side, "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "layer 0, page" in captured.err or "bytes 0.." in captured.err


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", *SMALL, "--backend", "ipc", "--scattered"]) == 0
    out = capsys.readouterr().out
    assert "of raw" in out
    assert "mapped" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "rdma"), "'rdma'"),
        (("--rounds", "6"), "'6'"),
        (("--num-pages", "0"), "'0'"),
        (("--page-bytes", "4095"), "4095"),
        (("--backend", "ipc", "--way", "direct"), "--way direct"),
        (("--backend", "nixl", "--way", "mapped"), "--way mapped"),
        (("--backend", "mooncake", "--transport", "cma"), "--transport cma"),
        (("--backend", "ipc", "--transport", "shm", "--transport", "tcp"), "--transport tcp"),
        (("--backend", "ipc", "--backend", "mooncake", "--transport", "shm"), "backend mooncake"),
        (("--goals", "--num-pages", "8"), "--goals"),
        (("--goals", "--contiguous"), "--goals"),
        (("--plot", "rates.jpg"), "rates.jpg"),
        (("--plot", "/nowhere/at-all/rates.png"), "/nowhere/at-all"),
        (("--rows", "/nowhere/at-all/rows.jsonl"), "--rows /nowhere/at-all"),
        (("--device", "cuda"), "GPU"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["bench", "transfer", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("transfer", "PDLINK_STAGING_SLOT", "4"),
        ("transfer", "PDLINK_WAY", "foo"),
        ("transfer", "PDLINK_STAGING_SLOTS", "0"),
        ("control", "PDLINK_STAGING_SLOT", "4"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["bench", command]) == 2
    assert name in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "transfer", "--plot", str(tmp_path / "rates.png")]) == 2
    assert "pdlink[bench]" in capsys.readouterr().err


def test_a_backend_that_does_not_work_here_is_an_error_when_it_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_FORCE_HCA", "1")  # and mooncake would not use tcp
    assert main(["bench", "transfer", *SMALL, "--backend", "mooncake", "--way", "direct"]) == 2
    assert "MC_FORCE_HCA" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough), (signal.SIGKILL, -9)]
)
def test_a_signal_in_the_middle_leaves_no_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = [*SMALL, "--backend", "ipc", "--rows", str(rows), "--layers", "3", "--rounds", "7"]
    options += [one for pages in range(9, 200) for one in ("--num-pages", str(pages))]
    command = [sys.executable, "-m", "pdlink", "bench", "transfer", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.started(command, text=True, **pipes) as child:
        seen = [line for line, _ in zip(child.stderr, range(3), strict=False)]
        assert all("ipc over shm" in line for line in seen)
        family = psutil.Process(child.pid).children(recursive=True)
        assert len(family) == 3
        os.kill(child.pid, number)
        out, err = child.communicate(timeout=processes.PATIENCE_S)
        assert child.returncode == code
        assert "Traceback" not in err
        assert out == ""
        assert psutil.wait_procs(family, timeout=processes.PATIENCE_S)[1] == []
    # What was measured before stays.
    assert len(rows.read_text().splitlines()) >= 2
    if number is signal.SIGKILL:
        # A killed process cannot remove its segments; the next one that makes some does.
        assert main(["bench", "transfer", *SMALL, "--backend", "ipc", "--scattered", "--json"]) == 0
