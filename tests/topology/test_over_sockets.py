"""Whole instances over real sockets and a real bootstrap: decode ranks of two stages and four head ranges, and a
refusal that both ends are told of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pdlink.decode.receiver import Receiver
from pdlink.errors import TransferFailed
from pdlink.layout import CacheLayout, DecodePlan, DecodeRank, DecodeSizes, LayerPlan, ParallelSizes, part_of
from pdlink.layout.components import heads
from pdlink.prefill.worker import PrefillRank, PrefillWorker
from pdlink.transfer.states import SenderState
from tests.link.rig import DEADLINE_S, assert_all, finished
from tests.link.rig import Site as LinkSite
from tests.topology.cache import Landed, Pool, Truth

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


def test_a_pair_that_cannot_be_verified_is_refused_on_both_ends(stack: contextlib.ExitStack) -> None:
    site = LinkSite(stack, verify_digests=True, confirm_timeout_s=30.0)
    ((owner, _),) = start_prefill(stack, site, ParallelSizes())
    layout, taken = gqa(HEADS // 2), DecodeSizes(tp=2)
    place = DecodePlan.balanced(layout, taken).place(DecodeRank(tp=1))
    target = pool_of(stack, layout, place.layers(layout))
    worker = site.node().decode("dec", layout, target.regions, place=place)
    sender = owner.open("t")
    sender.publish(SOURCE, last=True)
    receiver = finished(worker.receive("t", site.instance, {"kv": TARGET}, PAGE_SIZE * len(TARGET)))
    with pytest.raises(TransferFailed, match="PDLINK_VERIFY_DIGESTS=0"):
        receiver.result()
    assert_all([sender], SenderState.ABORTED)
    assert sender.failure
    assert "verify_digests" in str(sender.failure)
    assert Landed(target).find_wrong() == ""
