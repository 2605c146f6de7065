"""Whole links over one transport: a decode rank in this process, prefill ranks in others, and what may go wrong.

Run by `backend_runs` with the name of a case, of a transport and of a way, and the case's own options, as JSON.
The transport's libraries stay loaded until a process ends, so that every case has one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pdlink.backends.base import Backend, PullHandle
from pdlink.backends.wrapped import WrappedBackend
from pdlink.bootstrap.client import BootstrapClient
from pdlink.decode.receiver import Receiver
from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.layout.fingerprint import fingerprint
from pdlink.testing.child import ChildEnded
from pdlink.testing.pattern import SENTINEL, Bytes
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState
from tests.link.brake import Brake
from tests.link.ranks import Rank, start_ranks
from tests.link.rig import PAGE_SIZE, Decode, Site, assert_whole, make_layout, wait_until
from tests.link.staged import arena, assert_slots_back, give_all, hold_all
from tests.link.transports import TRANSPORTS, Transport
from tests.processes import PATIENCE_S

WATCH_S = 1.5
NUM_LAYERS, CP = 4, 2
BIG = 1024
"""Pages of a request that is to be met in the middle: 103 MB from each rank."""
FEW = [5, 0, 1023, 512]
FEW_BYTES = 1 << 20
"""More than one rank sends for these, so more than one slot ever holds of them."""
FIRST_LAYER = NUM_LAYERS // CP
"""Of the last rank, by which a pull from it is seen to have begun."""
STOPPED = CP - 1
ENGINE_TIMEOUT_S = 30.0
"""After which mooncake itself gives a read up. Deadlines of these tests are a few seconds."""


class Replaced(Exception):
    """A request was planned for a rank in a life that is over."""


@dataclass
class World:
    """One link: its site, its ranks, and the decode rank, whose pulls are held in the middle where a case says so."""

    stack: contextlib.ExitStack
    transport: Transport
    way: str
    watch_s: float = WATCH_S
    owner_settings: dict[str, object] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)
    brakes: list[Brake] = field(default_factory=list)
    num_served: int = 0

    def __post_init__(self) -> None:
        settings = {"backends": self.transport.backend, "way": self.way, "resend_interval_s": 0.1}
        self.site = Site(self.stack, **settings, confirm_timeout_s=30.0)
        self.owner_settings = {**settings, **self.owner_settings}

    @property
    def brake(self) -> Brake:
        (brake,) = self.brakes
        return brake

    def start(self, **settings: object) -> Decode:
        """All ranks, and a decode rank whose pulls are held as soon as a page of the last rank has landed."""
        self.ranks = start_ranks(self.stack, self.site, CP, NUM_LAYERS, BIG, **self.owner_settings)
        decode: list[Decode] = []

        def has_landed() -> bool:
            return bool(np.any(decode[0].pool.heads("latent", FIRST_LAYER, 8) != SENTINEL))

        def wrap(inner):
            self.brakes.append(Brake(inner, has_landed))
            return self.brake

        decode.append(self.site.decode(make_layout(NUM_LAYERS), num_pages=BIG, wrap=wrap, **settings))
        return decode[0]

    def meet(self, decode: Decode, transfer_id: str = "t") -> Receiver:
        """A request of all pages, caught while they come from the last rank."""
        for rank in self.ranks:
            rank.publish(transfer_id, list(range(BIG)))
        target = {"kv": range(BIG - 1, -1, -1)}  # no two neighbours on both sides
        receiver = decode.worker.receive(transfer_id, self.site.instance, target, BIG * PAGE_SIZE)
        give_up = time.monotonic() + PATIENCE_S
        while not self.brake.caught.wait(0.05):
            assert not receiver.poll().is_final, f"the request ended before it was met: {receiver.failure}"
            assert time.monotonic() < give_up, "no page of the last rank came"
        return receiver

    def serve_again(self, decode: Decode) -> None:
        """The next request is whole. Owners that their engine may have ended, or that were killed, are replaced."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._serve(decode)
            except Replaced:  # decode has not heard of a rank's successor yet; whoever asked tries again
                assert time.monotonic() < give_up
            except (TransferFailed, ChildEnded):
                assert self.transport.owners_may_end
                assert time.monotonic() < give_up
                wait_until(lambda: not all(rank.process.is_alive for rank in self.ranks))

    def _serve(self, decode: Decode) -> None:
        for number, rank in enumerate(self.ranks):
            if not rank.process.is_alive:
                size = {"num_layers": NUM_LAYERS, "cp": CP, "num_pages": BIG}
                self.ranks[number] = Rank(self.stack, self.site, number, **size, **self.owner_settings)
                self.ranks[number].wait_ready()
        self.num_served += 1
        name = f"good {self.num_served}"
        slots = self._wipe(decode)
        for rank in self.ranks:
            rank.publish(name, FEW)
        receiver = decode.worker.receive(name, self.site.instance, {"kv": FEW[::-1]}, len(FEW) * PAGE_SIZE)
        state = ended(receiver)
        if receiver.failure and receiver.failure.reason is FailureReason.STALE:
            raise Replaced(str(receiver.failure))
        if state is not ReceiverState.DONE:
            raise TransferFailed(str(receiver.failure))
        assert_whole(decode, name, {"kv": FEW[::-1]})
        assert np.all(slots[:, FEW_BYTES:] == SENTINEL), "what an earlier request asked for landed in its slots"

    @contextlib.contextmanager
    def nothing_lands(self, decode: Decode) -> Iterator[None]:
        """The pages and slots of a request that is over are handed out, and watched for a while after what the caller
        does then: nothing comes into them, nor into the guard pages."""
        assert self.brake.is_quiet, "the request ended while the wire was not quiet"
        if self.way == "staged":
            assert_slots_back([decode.node])
        self.brake.open.set()
        slots = self._wipe(decode)
        yield
        until = time.monotonic() + self.watch_s
        while time.monotonic() < until:
            time.sleep(0.25)
        assert (touched := decode.pool.find_touched()) is None, f"landed in pages of others: {touched}"
        assert np.all(slots == SENTINEL), "landed in staging slots of others"

    def _wipe(self, decode: Decode) -> Bytes:
        """Sentinel in every page and every staging slot; returns the slots as uint8 [slots, bytes]."""
        decode.pool.wipe()
        if self.way != "staged":
            return np.zeros((0, 0), dtype=np.uint8)
        area, held = arena(decode.node).area, hold_all(decode.node)
        assert len(held) == area.num_slots, "slots are still in use"
        whole = (ctypes.c_uint8 * (area.num_slots * area.slot_bytes)).from_address(area.base_address)
        slots: Bytes = np.ctypeslib.as_array(whole).reshape(area.num_slots, area.slot_bytes)
        slots[:] = SENTINEL
        give_all(decode.node, held)
        return slots


def ended(receiver: Receiver) -> ReceiverState:
    with contextlib.suppress(TransferFailed):
        receiver.wait(PATIENCE_S)
    return receiver.poll()


# --- the cases --------------------------------------------------------------------------------------


def owners(world: World, num_layers: int, cp: int) -> None:
    """Layers of every owner arrive, and a rank without any has registered nothing and is released like the others."""
    layout, site, pages = make_layout(num_layers), world.site, [1, 2, 9]
    ranks = start_ranks(world.stack, site, cp, num_layers, **world.owner_settings)
    decode = site.decode(layout, page_gap=64)
    with BootstrapClient([site.bootstrap.address]) as client:
        told = client.resolve("pre", fingerprint(layout)).ranks
    contributors = {one.worker_id for one in told if any(one.owned.values())}
    assert len(contributors) == min(num_layers, cp)
    for one in told:
        assert bool(one.regions) == (one.worker_id in contributors)
        assert all(region.nbytes > 0 for region in one.regions)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4, 3, 9]}, 3 * PAGE_SIZE)
    for rank in ranks:
        rank.publish("t", pages)
    result = receiver.wait(PATIENCE_S)
    assert_whole(decode, "t", {"kv": [4, 3, 9]})
    assert {name for name, nbytes in result.num_bytes.items() if nbytes} == contributors
    assert set(result.backends.values()) == {world.transport.backend}
    # Where pages are read in place, that is what direct means.
    way = "mapped" if decode.node.backends[world.transport.backend].capabilities.gathers else "direct"
    assert {one for ways in result.ways.values() for one in ways} == {way if world.way == "direct" else "staged"}
    for rank in ranks:
        wait_until(lambda rank=rank: rank.tell(do="poll", id="t") == "released")


def late_writes(world: World, how: str) -> None:
    """A running pull is aborted, or its time runs out: its pages are free again only once nothing can land in them."""
    decode = world.start(transfer_timeout_s=10.0 if how == "deadline" else 300.0)
    receiver = world.meet(decode)
    if how == "abort":
        receiver.abort()
    assert ended(receiver) is (ReceiverState.ABORTED if how == "abort" else ReceiverState.FAILED)
    with world.nothing_lands(decode):
        pass
    world.serve_again(decode)


def reuse(world: World, how: str) -> None:
    """The owner takes pages back and their next user writes them, while a reader still pulls."""
    if how == "expire":
        world.owner_settings["publication_lease_s"] = 8.0
    verify = how == "overwrite"
    # Few slots, so that not all is packed before the owner writes: what is comes as it was published, and well.
    both: dict[str, object] = {"verify_digests": verify, "staging_slots": 2}
    world.owner_settings |= both
    silent = {"keepalive_interval_s": 1000, "liveness_timeout_s": 3000} if how == "expire" else {}
    decode = world.start(**both, **silent)
    receiver = world.meet(decode)
    owner = world.ranks[-1]
    if how in ("withdraw", "abort"):
        owner.tell(do=how, id="t", pages=[BIG - 1])
    if how != "overwrite":  # of that one, the owner's engine tells nobody
        wait_until(lambda: owner.tell(do="poll", id="t") in ("aborted", "expired"), PATIENCE_S)
    if how == "expire":  # one of them is first, and of its end the reader tells the others
        assert "expired" in [rank.tell(do="poll", id="t") for rank in world.ranks]
    owner.tell(do="overwrite", id="t", by="someone else", pages=list(range(BIG)))
    world.brake.open.set()
    assert ended(receiver) is ReceiverState.FAILED
    assert world.brake.is_quiet
    assert receiver.failure
    assert ("digest" in str(receiver.failure)) == verify, receiver.failure
    world.serve_again(decode)


def stop(world: World, then: str) -> None:
    """A rank freezes in the middle: the request fails in time, and its pages are nobody's but the next user's."""
    decode = world.start(liveness_timeout_s=4.0, keepalive_interval_s=0.2, drain_timeout_s=1.0, abort_ack_timeout_s=0.3)
    receiver = world.meet(decode)
    stopped = world.ranks[STOPPED].process
    stopped.stop()
    world.brake.open.set()  # so that more is asked of a rank that does not answer
    try:
        assert ended(receiver) is ReceiverState.FAILED
    except DeadlineExceeded:
        raise AssertionError(f"a stopped rank still holds the request after {PATIENCE_S:g} s") from None
    assert f"cp{STOPPED}" in str(receiver.failure)
    with world.nothing_lands(decode):
        if then == "resumes":
            stopped.resume()
        elif then == "is killed":
            stopped.kill()
    if then != "never resumes":
        world.serve_again(decode)


class Trap(WrappedBackend):
    """Once `springs` is set, the next pull from the last rank is posted right after that has frozen."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.springs: Callable[[], None] | None = None

    def submit(self, batch: PullBatch) -> PullHandle:
        if self.springs and f"cp{STOPPED}" in batch.worker_id:
            self.springs, spring = None, self.springs
            spring()
        return super().submit(batch)


def stop_small(world: World) -> None:
    """A rank freezes as a pull of a few pages from it begins: the request fails in time, and others are served."""
    world.ranks = start_ranks(world.stack, world.site, CP, NUM_LAYERS, BIG, **world.owner_settings)
    traps: list[Trap] = []

    def wrap(inner: Backend) -> Backend:
        traps.append(Trap(inner))
        return traps[0]

    limits = {
        "liveness_timeout_s": 4.0,
        "keepalive_interval_s": 0.2,
        "drain_timeout_s": 1.0,
        "abort_ack_timeout_s": 0.3,
        "confirm_timeout_s": 5.0,
    }
    decode = world.site.decode(make_layout(NUM_LAYERS), num_pages=BIG, wrap=wrap, **limits)
    world.serve_again(decode)  # so that it is connected, as small pulls go another path then
    stopped = world.ranks[STOPPED].process
    traps[0].springs = stopped.stop
    for rank in world.ranks:
        rank.publish("t", FEW[:2])
    receiver = decode.worker.receive("t", world.site.instance, {"kv": FEW[2:]}, 2 * PAGE_SIZE)
    wait_until(lambda: traps[0].springs is None)
    stopped_at = time.monotonic()
    assert ended(receiver) is ReceiverState.FAILED
    took_s = time.monotonic() - stopped_at
    assert took_s < ENGINE_TIMEOUT_S / 2, f"the request ended after {took_s:.0f} s: {receiver.failure}"
    assert f"cp{STOPPED}" in str(receiver.failure)
    stopped.kill()
    world.serve_again(decode)


CASES: dict[str, Callable[..., None]] = {
    "owners": owners,
    "late_writes": late_writes,
    "reuse": reuse,
    "stop": stop,
    "stop_small": stop_small,
}


def main(case: str, transport: str, way: str, options: str) -> None:
    told = json.loads(options)
    with contextlib.ExitStack() as stack:
        world = World(stack, TRANSPORTS[transport], way, told.pop("watch_s", WATCH_S))
        CASES[case](world, **told)


if __name__ == "__main__":
    main(*sys.argv[1:])
