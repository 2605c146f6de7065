"""Threads of transports that die say so at once: to who waits for them, and to the node that serves with them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from pdlink.backends.base import Peer
from pdlink.backends.mooncake_link import NETWORK, Opening
from pdlink.errors import BackendError, PartDead
from pdlink.threads import Death
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.backends.needs import nixl_missing
from tests.link.direct import SOURCE, TARGET
from tests.link.rig import PAGE_SIZE, Site, assert_all, make_layout, wait_until

WAIT_S = 60.0


class Killed(BaseException):
    """No `Exception`: no boundary but a thread's own catches it."""


def kill(*arguments: object) -> Any:
    raise Killed("for the test")


class DeadlyEngine:
    """A mooncake engine whose first read ends the thread that asks."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go
        self.num_closed = 0

    def read_byte(self, session: str, address: int) -> int:
        assert self.go.wait(WAIT_S)
        return kill()

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "given up"])
def test_a_first_read_that_dies_is_told_to_who_waits_and_ends_its_engine(waits: bool) -> None:
    go, told = threading.Event(), []
    engine = DeadlyEngine(go)
    peer = Peer("pre/r0", 1, b"")
    opening = Opening(peer, "127.0.0.1:1", 4096, engine, NETWORK, told.append)  # type: ignore[arg-type]
    if waits:
        go.set()
        with pytest.raises(BackendError, match="thread pdlink-mooncake-pre/r0 of backend mooncake died"):
            opening.link(WAIT_S)
    else:
        with pytest.raises(BackendError, match="did not answer"):
            opening.link(0.0)
        go.set()
    assert opening._thread.join(WAIT_S)
    assert opening.is_over
    assert engine.num_closed == 1
    (death,) = told
    assert isinstance(death, Death)
    assert isinstance(death.error, Killed)


@pytest.mark.skipif(bool(nixl_missing()), reason=nixl_missing())
@pytest.mark.backend("nixl-tcp")
def test_a_serving_thread_that_dies_fails_what_it_serves_and_refuses_more(caplog, monkeypatch) -> None:
    with contextlib.ExitStack() as stack:
        check_serving(stack, caplog, monkeypatch)


def check_serving(stack, caplog, monkeypatch) -> None:
    site = Site(stack, backends="nixl", liveness_timeout_s=60.0, subscribe_timeout_s=60.0)
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 1), site.decode(layout)
    node, worker = owners[0].node, owners[0].worker
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    sender = owners[0].open("t", {"kv": SOURCE})
    wait_until(lambda: receiver.poll() is ReceiverState.SUBSCRIBED)
    assert node.health().ok
    monkeypatch.setattr(node.backends["nixl"]._server.agent, "call", kill)
    assert_all([sender], SenderState.ABORTED)
    wait_until(lambda: receiver.poll().is_final)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.INTERNAL
    report = node.health()
    (why,) = report.reasons
    assert report.parts["backend nixl"] == why
    assert why in str(receiver.failure)
    assert [one.message for one in caplog.records if one.levelname == "CRITICAL"] == [why]
    with pytest.raises(PartDead, match="pdlink-nixl-serve of backend nixl died"):
        worker.open("next")
    wait_until(lambda: site.bootstrap.num_workers == 0)
    monkeypatch.undo()
    for one in (decode.node, node):
        one.close()
        one.close()
