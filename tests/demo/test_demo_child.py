"""What a process of the demo says of its own failure: the cause, before those who fail by it can speak."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from pdlink_engines.reference.demo.spec import DemoSpec
from tests import processes

CHILD = """
import contextlib, sys
from pdlink.errors import TransferFailed
from pdlink_engines.reference.demo.child import ParentPipe, run_child

@contextlib.contextmanager
def node(pipe):
    try:
        yield
    finally:
        pipe.report("closed")
        if sys.argv[2] == "fails as well":
            raise ValueError("it does not close")

def body(pipe):
    with node(pipe), pipe.telling():
        raise {"ours": TransferFailed("no page came"), "a bug": KeyError("kv")}[sys.argv[1]]

run_child(body)
"""


@pytest.mark.parametrize("closing", ["closes", "fails as well"])
@pytest.mark.parametrize(
    ("what", "kind", "text", "code"),
    [("ours", "TransferFailed", "no page came", 2), ("a bug", "", "KeyError: 'kv'", 1)],
)
def test_the_cause_is_told_once_and_before_anything_is_closed(
    tmp_path: Path, what: str, kind: str, text: str, code: int, closing: str
) -> None:
    sizes = {"cp": 1, "new_tokens": 1, "page_size": 16, "chunk_tokens": 16, "pool_pages": 1}
    spec = DemoSpec(model="glm-dsa-tiny", prompts=("a",), backend="ipc", run_dir=tmp_path, **sizes)
    command = [sys.executable, "-c", CHILD, what, closing]
    with processes.started(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write(spec.model_dump_json() + "\n")
        child.stdin.flush()  # and open until the end: a child whose parent has gone ends
        events = [json.loads(line) for line in child.stdout]
        ended = child.wait(processes.PATIENCE_S)
    assert events == [{"event": "error", "kind": kind, "text": text}, {"event": "closed"}]
    assert ended == (code if closing == "closes" else 1)
