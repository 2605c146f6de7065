"""`pdlink bench digest`: every kind in every place, requests with and without, and medians of what they should be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdlink.cli.bench_digest import COPIED, ON_DEVICE, ON_HOST, as_text, in_turns, make_rows, time_digests
from pdlink.cli.digest_rig import Took
from pdlink.cli.main import main
from pdlink.cli.transfer_bytes import Shape

NBYTES = 8_000_000


def test_a_row_is_the_median_of_its_rounds_and_added_is_that_of_the_differences_in_each() -> None:
    off = [Took(0.001, 0.004), Took(0.001, 0.009), Took(0.001, 0.005)]
    mix = [Took(0.003, 0.010), Took(0.004, 0.010), Took(0.002, 0.005)]
    rows = make_rows(NBYTES, {(ON_DEVICE, "mix64"): [0.004, 0.001, 0.002]}, {"off": off, "mix64": mix})
    digest, plain, mixed = rows
    assert (digest["measured"], digest["digests"]) == ("digests on the device", "mix64")
    assert digest["ms"] == pytest.approx(2.0)
    assert digest["gbps"] == pytest.approx(4.0)
    assert plain["ms"] == pytest.approx(6.0)
    assert "added_ms" not in plain
    assert mixed["ms"] == pytest.approx(13.0)
    assert mixed["publish_ms"] == pytest.approx(3.0)
    # 8, 4 and 1 ms more than the request of the same round: not the difference of the medians, which is 7.
    assert mixed["added_ms"] == pytest.approx(4.0)
    assert as_text(mixed) == ("request over ipc", "mix64", "0.62", "13.00", "3.00", "4.00")
    assert as_text(digest)[4:] == ("", "")


def test_calls_take_turns_and_the_first_round_is_not_counted() -> None:
    called: list[str] = []
    turns = {("here", name): lambda name=name: called.append(name) for name in ("a", "b")}
    taken = in_turns(turns, 3)
    assert called == ["a", "b"] * 4
    assert [len(one) for one in taken.values()] == [3, 3]


def test_digests_of_host_memory_are_timed_for_each_kind() -> None:
    taken = time_digests(Shape(4096, 4, 2, True), -1, 7)
    assert list(taken) == [(ON_HOST, "xxh3-64"), (ON_HOST, "mix64")]
    assert all(len(one) == 7 and min(one) > 0 for one in taken.values())


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_digests_of_device_memory_are_timed_where_they_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--page-bytes", "41984", "--num-pages", "16", "--layers", "2")
    assert main(["bench", "digest", "--device", "cuda", *size, "--json"]) == 0, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {(row["measured"], row["digests"]) for row in rows[:2]} == {
        (f"digests {COPIED}", "xxh3-64"),
        (f"digests {ON_DEVICE}", "mix64"),
    }
    assert [row["digests"] for row in rows[2:]] == ["off", "xxh3-64", "mix64"]


@pytest.mark.slow
def test_it_reports_each_kind_and_what_it_adds_to_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--page-bytes", "4096", "--num-pages", "8", "--layers", "2")
    assert main(["bench", "digest", *size, "--json"]) == 0, capsys.readouterr().err
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["device"], told["nbytes"]) == ("host", 4096 * 8 * 2)
    rows = told["rows"]
    assert [(row["measured"], row["digests"]) for row in rows] == [
        ("digests on the host", "xxh3-64"),
        ("digests on the host", "mix64"),
        ("request over ipc", "off"),
        ("request over ipc", "xxh3-64"),
        ("request over ipc", "mix64"),
    ]
    for row in rows:
        assert row["gbps"] == pytest.approx(told["nbytes"] / row["ms"] / 1e6)
    for row in rows[2:]:
        assert row["ms"] == pytest.approx(sorted(row["rounds_ms"])[3])
        assert 0 < row["publish_ms"] < row["ms"]
    assert ["added_ms" in row for row in rows] == [False, False, False, True, True]


def test_a_page_that_the_check_cannot_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "digest", "--page-bytes", "100"]) == 2
    assert "--page-bytes 100 is no multiple of 64" in capsys.readouterr().err


def test_a_machine_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "digest", "--device", "cuda"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
