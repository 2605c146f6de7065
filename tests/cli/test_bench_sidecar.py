"""`pdlink bench sidecar`: real processes on the host, bytes checked, and what cannot be measured is said."""

from __future__ import annotations

import json
import sys

import pytest

from pdlink.cli import mps
from pdlink.errors import BackendUnavailable
from tests import processes


def run(*options: str) -> dict[str, object]:
    command = [sys.executable, "-m", "pdlink", "bench", "sidecar", "--json", *options]
    answer: dict[str, object] = json.loads(processes.run(command, check=True, timeout_s=400).stdout)
    return answer


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_steps_are_timed_alone_and_while_requests_go_staged_in_process_and_by_a_sidecar() -> None:
    told = run("--seconds", "0.5", "--layers", "1", "--pages", "4", "--products", "2")
    assert (told["device"], told["num_layers"], told["num_pages"]) == ("cpu", 1, 4)
    rows = {row["where"]: row for row in told["rows"]}
    assert rows.pop("sidecar-mps") == {"where": "sidecar-mps", "left_out": "MPS is for GPUs"}
    assert list(rows) == ["in-process", "sidecar"]
    for row in rows.values():
        for steps in (row["alone"], row["with_requests"]):
            assert steps["num_steps"] > 0
            assert 0 < steps["p50_ms"] <= steps["p99_ms"] <= steps["max_ms"]
        assert row["num_requests"] > 0
        assert row["ways"] == ["staged"]
        assert row["link_bytes"] == 0


def test_a_daemon_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert mps.why_not() == "nvidia-cuda-mps-control is not installed here"
    with pytest.raises(BackendUnavailable, match="is not installed here"), mps.running():
        pytest.fail("it runs")
