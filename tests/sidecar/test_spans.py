"""Spans of a link that is in a sidecar: made there, in the engine's trace, and exported as the environment says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdlink.errors import PdlinkError
from pdlink.sidecar import connect
from tests import processes
from tests.processes import PATIENCE_S
from tests.sidecar.rig import PAGE_SIZE, REPO, Rig, folder_for_sockets

pytestmark = [pytest.mark.backend("ipc"), pytest.mark.slow]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("exporter", ["console", "nosuch"])
def test_spans_of_a_sidecar_go_where_the_environment_says(tmp_path: Path, exporter: str) -> None:
    env = {**os.environ, "PDLINK_TRACING": "1", "OTEL_TRACES_EXPORTER": exporter}
    said = tmp_path / "said"
    with folder_for_sockets() as folder, contextlib.ExitStack() as stack:
        rig = Rig(stack, Path(folder))
        path = Path(folder) / "s"
        command = [sys.executable, "-m", "pdlink", "sidecar", "--socket", str(path), "--backends", "ipc"]
        streams = {"stdout": subprocess.PIPE, "stderr": stack.enter_context(said.open("w")), "text": True}
        sidecar = stack.enter_context(processes.started(command, cwd=REPO, env=env, **streams))
        assert sidecar.stdout.readline()
        if exporter == "nosuch":
            with pytest.raises(PdlinkError, match=r"exporter 'nosuch' .*installed: .*console"):
                connect(path)
            return
        rig.prefill(rig.node()).open("t", [4]).publish([4], last=True)
        with connect(path) as node:
            decode = rig.decode(node)
            told = ("t", rig.instance, {"kv": [1]}, PAGE_SIZE)
            decode.worker.receive(*told, trace_parent=f"00-{TRACE}-{SPAN}-01").wait(PATIENCE_S)
        sidecar.send_signal(signal.SIGTERM)
        assert sidecar.wait(PATIENCE_S) == 0
    shown = said.read_text()
    for name in ("pdlink.receive", "resolve", "merge", "pull"):
        assert f'"name": "{name}"' in shown
    assert f'"trace_id": "0x{TRACE}"' in shown
    assert f'"parent_id": "0x{SPAN}"' in shown
    assert '"service.name": "pdlink-sidecar"' in shown
