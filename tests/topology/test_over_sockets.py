"""Whole instances over real sockets and a real bootstrap: decode ranks of two stages and four head ranges, and digests
of what each of them takes of a page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pdlink.decode.receiver import Receiver
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import TransferFailed
from pdlink.layout import CacheLayout, DecodePlan, DecodeSizes, LayerPlan, ParallelSizes, part_of
from pdlink.layout.components import heads
from pdlink.layout.parts import WHOLE
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.worker import PrefillWorker
from pdlink.transfer.digests import DigestKind
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import SenderState
from tests.link.rig import DEADLINE_S, Gate, assert_all, finished, wait_until
from tests.link.rig import Site as LinkSite
from tests.topology.cache import GUARD_PAGES, Landed, Pool, Truth

HEADS, PAGE_SIZE, NUM_LAYERS = 4, 4, 3
SOURCE, TARGET = [3, 0, 5], [1, 4, 2]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def gqa(num_heads: int) -> CacheLayout:
    made = (
        heads(n, PAGE_SIZE, range(NUM_LAYERS), num_heads=num_heads, head_bytes=8, dtype="x", total_heads=HEADS)
        for n in "kv"
    )
    return CacheLayout(NUM_LAYERS, tuple(made))


def pool_of(stack: contextlib.ExitStack, layout: CacheLayout, owned: dict[str, tuple[int, ...]]) -> Pool:
    pool = Pool(layout, owned, 8)
    stack.callback(pool.close)
    return pool


def start_prefill(
    stack: contextlib.ExitStack, site: LinkSite, sizes: ParallelSizes
) -> list[tuple[PrefillWorker, Pool]]:
    layout = gqa(HEADS // sizes.tp)
    plan, ranks = LayerPlan.balanced(layout, sizes), []
    for rank in sizes.ranks():
        pool = pool_of(stack, layout, dict(plan.owned[rank]))
        info = PrefillRank("pre", layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions)
        ranks.append((site.node().prefill(info, [site.bootstrap.address]), pool))
    for worker, _ in ranks:
        worker.wait_registered(DEADLINE_S)
    return ranks


@pytest.mark.parametrize("way", ["auto", "staged"])
def test_ranks_of_two_stages_and_four_head_ranges_pull_one_request(stack: contextlib.ExitStack, way: str) -> None:
    site = LinkSite(stack, way=way, confirm_timeout_s=30.0)
    ranks = start_prefill(stack, site, ParallelSizes(cp=2, tp=2))
    taken, layout = DecodeSizes(pp=2, tp=4), gqa(1)
    plan = DecodePlan.balanced(layout, taken)
    receivers: list[Receiver] = []
    landed: list[Landed] = []
    truth = Truth("t", {"kv": len(SOURCE)})
    for rank in taken.ranks():
        place = plan.place(rank)
        pool = pool_of(stack, layout, place.layers(layout))
        worker = site.node().decode("dec", layout, pool.regions, place=place)
        receivers.append(worker.receive("t", site.instance, {"kv": TARGET}, PAGE_SIZE * len(TARGET)))
        landed.append(Landed(pool))
        landed[-1].add(truth, place.parts(layout), {"kv": TARGET}, {"kv": 0}, {"k": False, "v": False})
    senders = []
    for worker, pool in ranks:
        parts = {one.name: part_of(one, worker.rank.rank.tp, 2) for one in pool.layout.components}
        truth.fill(pool, parts, {"kv": SOURCE})
        senders.append(worker.open("t"))
        senders[-1].publish(SOURCE, last=True)
    for one in receivers:
        one.wait(DEADLINE_S)
    assert_all(senders, SenderState.RELEASED)
    assert [one.find_wrong() for one in landed] == [""] * len(landed)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", list(DigestKind))
def test_parts_of_pages_are_verified_whether_their_reader_asks_before_or_after_they_are_published(
    stack: contextlib.ExitStack, kind: str, when: str
) -> None:
    pair = Halves(stack, kind)
    receivers = pair.receive(subscribed=True) if when == "before" else []
    pair.publish()
    for one in receivers or pair.receive():
        one.wait(DEADLINE_S)
    assert_all([pair.sender], SenderState.RELEASED)
    assert [one.find_wrong() for one in pair.landed] == ["", ""]


@pytest.mark.parametrize("kind", list(DigestKind))
def test_a_part_that_is_damaged_on_its_way_fails_the_request_and_its_page_is_named(
    stack: contextlib.ExitStack, kind: str
) -> None:
    """Written between its publication and the pull."""
    pair = Halves(stack, kind, held=True)
    _, receiver = pair.receive(subscribed=True)
    pair.publish()
    pair.gate.wait_held(1)
    pair.damage("v", 1, position=2, byte=-1)  # of the last head, which that reader takes
    pair.gate.open.set()
    page = TARGET[2]
    with pytest.raises(TransferFailed, match=rf"digest of 'v' layer 1, page {page} differs from what .*: {kind}"):
        receiver.wait(DEADLINE_S)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.DIGEST
    assert_all([pair.sender], SenderState.ABORTED)


@pytest.mark.parametrize("byte", [0, -1])
def test_what_is_damaged_before_a_reader_of_parts_asks_fails_the_request_on_the_side_that_has_it(
    stack: contextlib.ExitStack, byte: int
) -> None:
    pair = Halves(stack, "mix64")
    pair.publish()
    pair.damage("k", 2, position=0, byte=byte)
    for receiver in map(finished, pair.receive()):
        with pytest.raises(TransferFailed, match=rf"'k' layer 2, page {SOURCE[0]} is not what was published any more"):
            receiver.result()
        assert receiver.failure
        assert receiver.failure.reason is FailureReason.DIGEST
    assert_all([pair.sender], SenderState.ABORTED)


class Halves:
    """A prefill rank that has all heads, and two decode ranks that take half of them each; digests are on. The pulls of
    the second one may be held."""

    def __init__(self, stack: contextlib.ExitStack, kind: str, *, held: bool = False) -> None:
        site = LinkSite(stack, verify_digests=True, digest_kind=kind, confirm_timeout_s=30.0)
        self.instance = site.instance
        ((owner, self.source),) = start_prefill(stack, site, ParallelSizes())
        self.truth = Truth("t", {"kv": len(SOURCE)})
        self.truth.fill(self.source, dict.fromkeys("kv", WHOLE), {"kv": SOURCE})
        self.sender = owner.open("t")
        self.readers: list[DecodeWorker] = []
        self.landed: list[Landed] = []
        layout, sizes = gqa(HEADS // 2), DecodeSizes(tp=2)
        for rank in sizes.ranks():
            place = DecodePlan.balanced(layout, sizes).place(rank)
            pool, node = pool_of(stack, layout, place.layers(layout)), site.node()
            best = next(iter(node.backends))
            self.gate = Gate(node.backends[best])
            if held and rank.tp:
                node.backends[best] = self.gate
            self.readers.append(node.decode("dec", layout, pool.regions, place=place))
            self.landed.append(Landed(pool))
            parts = place.parts(layout)
            self.landed[-1].add(self.truth, parts, {"kv": TARGET}, {"kv": 0}, {"k": False, "v": False})

    def publish(self) -> None:
        self.sender.publish(SOURCE[:1])
        self.sender.publish(SOURCE[1:], last=True)

    def receive(self, *, subscribed: bool = False) -> list[Receiver]:
        """Ask; `subscribed`: and wait until the prefill rank has heard both."""
        asked = [one.receive("t", self.instance, {"kv": TARGET}, PAGE_SIZE * len(TARGET)) for one in self.readers]
        if subscribed:
            wait_until(lambda: self.sender.first_pages() is not None)
        return asked

    def damage(self, component: str, layer: int, position: int, byte: int) -> None:
        self.source.rows[component, layer][SOURCE[position] + GUARD_PAGES][byte] ^= 4
