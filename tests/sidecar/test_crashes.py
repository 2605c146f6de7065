"""The death of an engine, or of a sidecar: nothing of it is left, it is told of, and the others serve on."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlink.decode.links import PrefillInstance
from pdlink.errors import TransferFailed
from pdlink.transfer.states import ReceiverState, SenderState
from tests.processes import PATIENCE_S, wait_until
from tests.sidecar.crowd import Engine, Sidecar, wait_gone
from tests.sidecar.rig import PAGE_SIZE, Rig, folder_for_sockets, is_gone, kill, serve_at_last, serving

pytestmark = pytest.mark.backend("ipc")

SOURCE, TARGET = [4, 0, 9], [1, 12, 7]
TOKENS = len(TARGET) * PAGE_SIZE


@pytest.fixture
def rig() -> Iterator[Rig]:
    with folder_for_sockets() as folder, contextlib.ExitStack() as stack:
        yield Rig(stack, Path(folder))


def test_an_engines_death_ends_its_own_requests_and_no_others_of_its_sidecar(rig: Rig, tmp_path: Path) -> None:
    path, forked_ends = rig.sidecar("a.sock"), tmp_path / "forked-ends"
    victim = Engine(rig, path, "prefill", forked_ends)
    other = rig.prefill(rig.connect(path), "other")
    decode = rig.decode(rig.node())
    victim.wait_ready()

    doomed = decode.worker.receive("doomed", rig.instance, {"kv": TARGET}, TOKENS)
    victim.ask("open", "doomed", SOURCE)
    victim.ask("publish", "doomed", SOURCE[:1])
    sender = other.open("spared", SOURCE)
    instance = PrefillInstance("other", rig.instance.bootstraps)
    spared = decode.worker.receive("spared", instance, {"kv": [2, 3, 5]}, TOKENS)
    sender.publish(SOURCE[:1])
    assert wait_until(lambda: doomed.poll() is spared.poll() is ReceiverState.PULLING)

    victim.kill()
    with pytest.raises(TransferFailed, match=rf"the engine \(process {victim.child.pid}\) has ended"):
        doomed.wait(PATIENCE_S)
    assert wait_until(lambda: is_gone(victim.serving_pid))  # while what the engine had forked holds its sockets open
    sender.publish(SOURCE[1:], last=True)
    spared.wait(PATIENCE_S)
    assert decode.pool.find_wrong("spared", {"kv": [2, 3, 5]}) is None

    forked_ends.touch()
    wait_gone(victim, sweep=True)  # the fork had its memory, too


@pytest.mark.slow
def test_prefill_is_told_of_a_decode_engines_death_and_has_its_pages_back(rig: Rig) -> None:
    path = rig.sidecar("a.sock")
    victim = Engine(rig, path, "decode")
    prefill = rig.prefill(rig.node())
    victim.wait_ready()
    victim.ask("receive", "doomed", TARGET)
    sender = prefill.open("doomed", SOURCE)
    sender.publish(SOURCE[:1])
    assert wait_until(lambda: victim.ask("poll", "doomed")["state"] == "pulling")
    victim.kill()
    assert wait_until(lambda: sender.poll() is SenderState.ABORTED)
    with pytest.raises(TransferFailed, match="has ended"):
        sender.raise_failure()
    wait_gone(victim)


def test_a_killed_sidecar_takes_its_processes_along_and_its_engines_find_the_next_one(rig: Rig) -> None:
    sidecar = Sidecar(rig, rig.folder / "a.sock").start()
    node = rig.connect(sidecar.path)
    decode, prefill = rig.decode(node), rig.prefill(rig.node())
    sender = prefill.open("doomed", SOURCE)
    receiver = decode.worker.receive("doomed", rig.instance, {"kv": TARGET}, TOKENS)
    sender.publish(SOURCE[:1])
    assert wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    pid = serving(node)
    sidecar.kill()
    with pytest.raises(TransferFailed, match="the sidecar is ending"):
        receiver.wait(PATIENCE_S)
    assert wait_until(lambda: is_gone(pid) and sender.poll().is_final)
    sidecar.start()
    assert wait_until(lambda: node.health().ok)
    serve_at_last(rig, prefill, decode, "next", SOURCE, TARGET)
    node.close()
    sidecar.stop()
    assert sidecar.has_left_nothing()


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_process_that_stands_still_is_ended_before_anybody_hears_that_its_requests_have_failed(rig: Rig) -> None:
    node = rig.connect(rig.sidecar("a.sock"))
    decode, prefill = rig.decode(node), rig.prefill(rig.node())
    sender = prefill.open("doomed", SOURCE)
    receiver = decode.worker.receive("doomed", rig.instance, {"kv": TARGET}, TOKENS)
    sender.publish(SOURCE[:1])
    assert wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    pid = serving(node)
    kill(pid, signal.SIGSTOP)  # what it was about to write into the engine's pages, it may still write
    alive_at_end: list[bool] = []
    receiver.on_end(lambda _: alive_at_end.append(not is_gone(pid)))
    assert wait_until(lambda: alive_at_end)
    assert alive_at_end == [False]
    assert receiver.poll() is ReceiverState.FAILED
    sender.abort()
    assert wait_until(lambda: node.health().ok)
    serve_at_last(rig, prefill, decode, "next", SOURCE, TARGET)
