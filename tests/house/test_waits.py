"""Every wait in pdlink has a timeout, or stands in the list below with the reason why it ends all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.tree import Module, modules

TIMEOUT_AT = {"wait": 0, "join": 0, "result": 0, "wait_for": 1}
"""Which argument of a call is its timeout."""
IDLE = "a thread without work: what ends it wakes it"
DEVICE = "the end of a copy that was launched, which the device brings or fails"
COLLECTIVE = "the timeout of the process group"
STATE = "no wait: it raises while there is no result"

ENDS_ANYWAY = {
    ("pdlink.threads", "self._thread.join(timeout_s)"): "callers give a timeout",
    ("pdlink.decode.puller", "self._jobs.get()"): IDLE,
    ("pdlink.prefill.packer", "self._queue.get()"): IDLE,
    ("pdlink.prefill.ready_watch", "self._changed.wait_for(lambda: self._closed or self._waiters)"): IDLE,
    ("pdlink.prefill.packer", "copying.wait()"): DEVICE,
    ("pdlink.decode.staged_pull", "copying.wait()"): DEVICE,
    ("pdlink.decode.staged_pull", "asked.copying.wait()"): DEVICE,
    ("pdlink.backends.cuda_copy", "mark.wait()"): DEVICE,
    ("pdlink.backends.cuda_copy", "table.mark.wait()"): DEVICE,
    ("pdlink.backends.cuda_copy", "self.start(batch).wait()"): DEVICE,
    ("pdlink.backends.ipc", "self.copying.wait()"): DEVICE,
    ("pdlink.backends.cuda_stream", "self._stream.wait_for(self._event)"): DEVICE,
    ("pdlink.backends.cuda_copy", "self._lock.wait_for(lambda: bool(self._tables))"): "a table that is lent comes back",
    ("pdlink.memory.communicator", "work.wait()"): COLLECTIVE,
    ("pdlink.decode.receiver", "self.result()"): STATE,
    ("pdlink.cli.control_rig", "receiver.result()"): STATE,
    ("pdlink.backends.mooncake_engine", "self._reading.pop(posted).result()"): "asked when the read is over",
    ("pdlink.sidecar.stream", "self.ended.wait()"): "the end of a process, which is forced, or complained of",
    ("pdlink.sidecar.wire", "receiver.result()"): STATE,
    ("pdlink.bootstrap.server", "event.wait()"): "inside a wait_for of asyncio, which has a timeout",
    ("pdlink.bootstrap.service", "wake.wait()"): "a watch lasts as long as its caller and the service do",
    ("pdlink.bootstrap.keeper", "lane.join()"): "which has a timeout itself",
}


def untimed(module: Module) -> Iterator[str]:
    """Calls that wait without a timeout, as source text."""
    for node in ast.walk(module.parse()):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, ast.unparse(node.func.value)
        named = {word.arg for word in node.keywords}
        if name == "get" and owner.endswith(("queue", "_jobs")):
            is_timed = "timeout" in named
        elif name == "acquire":
            is_timed = bool(named & {"timeout", "blocking"}) or bool(node.args)
        elif name in TIMEOUT_AT:
            is_timed = len(node.args) > TIMEOUT_AT[name] or any(one and one.startswith("timeout") for one in named)
        else:
            continue
        if not is_timed:
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "self._done.wait()",
        "thread.join()",
        "changed.wait_for(lambda: ready)",
        "self._queue.get()",
        "self._queue.get(block=True)",
        "lock.acquire()",
        "future.result()",
    ],
)
def test_a_wait_without_a_timeout_is_found(source: str) -> None:
    assert list(untimed(Module("pdlink.sample", source))) == [source]


@pytest.mark.parametrize(
    "source",
    [
        "self._done.wait(2.0)",
        "thread.join(timeout_s)",
        "process.wait(timeout=END_S)",
        "changed.wait_for(lambda: ready, LOOK_S)",
        "self._queue.get(timeout=1.0)",
        "self._queue.get_nowait()",
        "lock.acquire(blocking=False)",
        "', '.join(names)",
        "known.get(name)",
    ],
)
def test_what_waits_for_a_bounded_time_is_left_alone(source: str) -> None:
    assert list(untimed(Module("pdlink.sample", source))) == []


def test_every_wait_has_a_timeout_or_a_reason() -> None:
    found = [(one.name, call) for one in modules() if one.name.startswith("pdlink.") for call in untimed(one)]
    assert len(modules()) > 20
    assert [one for one in found if one not in ENDS_ANYWAY and not one[0].startswith("pdlink.testing")] == []


def test_every_reason_is_of_a_wait_that_is_there() -> None:
    texts = {one.name: ast.unparse(one.parse()) for one in modules()}
    assert [(name, call) for name, call in ENDS_ANYWAY if call not in texts[name]] == []
