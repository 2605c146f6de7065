"""`pdlink bench control`: real processes, rows for every caller, bytes checked, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from pdlink.cli.bench_control import summarise
from pdlink.cli.main import main
from tests import processes


def test_every_caller_and_size_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--cp", "1", "--cp", "2", "--layers", "3"]
    assert main(["bench", "control", "--samples", "4", *sizes, "--way", "in-process", "--json"]) == 0
    value = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["way"], row["caller"], row["cp"]) for row in value["rows"]] == [
        ("in-process", caller, cp) for cp in (1, 2) for caller in ("wait", "poll-loop", "busy")
    ]
    for row in value["rows"]:
        assert row["samples"] == 4
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert value["num_layers"] == 3


@pytest.mark.slow
def test_both_ways_have_a_row_for_every_caller(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "control", "--samples", "4", "--cp", "1", "--layers", "3", "--json"]) == 0
    value = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["way"], row["caller"]) for row in value["rows"]] == [
        (way, caller) for way in ("in-process", "sidecar") for caller in ("wait", "poll-loop", "busy")
    ]


def test_bytes_that_are_not_what_was_published_fail_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdlink.testing.pattern import PatternPool

    find = PatternPool.find_wrong

    def find_after_damage(self, transfer_id, pages, start=None):
        self.view("latent", 0)[pages["kv"][0], 5] ^= 1
        return find(self, transfer_id, pages, start)

    monkeypatch.setattr(PatternPool, "find_wrong", find_after_damage)
    assert main(["bench", "control", "--samples", "1", "--cp", "1", "--caller", "wait", "--way", "in-process"]) == 1
    captured = capsys.readouterr()
    assert "'latent' layer 0" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_in_the_middle_leaves_no_process(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "pdlink", "bench", "control", "--samples", "100000", "--cp", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.started(command, text=True, **pipes) as child:
        for line in child.stderr:
            if "caller wait" in line:
                break
        family = psutil.Process(child.pid).children(recursive=True)
        assert len(family) == 3
        os.kill(child.pid, number)
        out, err = child.communicate(timeout=processes.PATIENCE_S)
        assert child.returncode == code
        assert "Traceback" not in err
        assert out == ""
        assert psutil.wait_procs(family, timeout=processes.PATIENCE_S)[1] == []
    if number is signal.SIGKILL:
        # A killed process cannot remove its segments; the next one that makes some does.
        assert main(["bench", "control", "--samples", "1", "--cp", "1", "--caller", "wait", "--way", "in-process"]) == 0


def test_percentiles_are_figures_that_were_measured() -> None:
    taken = [float(number) for number in range(200, 0, -1)]
    assert summarise(taken) == {"p50_ms": 100.0, "p99_ms": 198.0, "mean_ms": 100.5, "max_ms": 200.0}
    assert summarise([3.0]) == {"p50_ms": 3.0, "p99_ms": 3.0, "mean_ms": 3.0, "max_ms": 3.0}


@pytest.mark.parametrize("options", [("--samples", "0"), ("--cp", "0"), ("--caller", "sleep"), ("--way", "out")])
def test_bad_options_are_refused_in_one_line(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    assert main(["bench", "control", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert repr(options[1]) in captured.err
