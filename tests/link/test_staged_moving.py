"""Whole requests by the staged way: every byte at its place, nothing beside it touched, every slot given back."""

from __future__ import annotations

import contextlib
import logging

import pytest

from pdlink.events import Event
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.rank import PrefillRank
from pdlink.transfer.states import SenderState
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Owner, Site, assert_all, assert_whole, make_layout
from tests.link.staged import arena, assert_slots_back, pair, publish_scattered, staged_site
from tests.link.test_moving import two_groups

pytestmark = pytest.mark.backend("ipc")


@pytest.fixture
def site(stack: contextlib.ExitStack) -> Site:
    return staged_site(stack)


@pytest.mark.parametrize(("num_layers", "cp"), [(10, 4), (3, 4), (4, 1), (7, 2)])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_uneven_layers_arrive_byte_exact_and_every_slot_comes_back(
    stack: contextlib.ExitStack, num_layers: int, cp: int, num_slots: int
) -> None:
    site = staged_site(stack, staging_slots=num_slots)
    layout = make_layout(num_layers)
    owners, decode = site.prefill(layout, cp), site.decode(layout)
    target = {"kv": site.scatter(decode.pool, 5)}
    receiver = decode.worker.receive("t", site.instance, target, 5 * PAGE_SIZE - 7)
    senders = publish_scattered(site, owners, 5)
    result = receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)
    busy = [owner for owner in owners if owner.pool.regions]
    assert dict(result.ways) == {owner.worker.rank.worker_id: ("staged",) for owner in busy}
    assert_slots_back([decode.node, *(owner.node for owner in busy)])


def test_pages_between_which_there_are_gaps_arrive(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout, page_gap=40)
    target = {"kv": site.scatter(decode.pool, 6)}
    receiver = decode.worker.receive("t", site.instance, target, 6 * PAGE_SIZE)
    publish_scattered(site, owners, 6)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)


def test_chunks_and_layer_ranges_in_any_order_after_a_prefix_arrive(site: Site) -> None:
    _, owners, decode = pair(site, 2, 8)
    target = {"kv": site.scatter(decode.pool, 5)}
    receiver = decode.worker.receive("t", site.instance, target, 7 * PAGE_SIZE, prefix_tokens=2 * PAGE_SIZE + 5)
    pieces = []
    senders = []
    for owner in owners:
        pages = site.scatter(owner.pool, 7)
        senders.append(owner.open("t", {"kv": pages}))
        mine = owner.worker.rank.owned["latent"]
        for start, stop in ((0, 3), (3, 4), (4, 7)):
            for layers in (mine[:1], mine[1:]):
                pieces.append((senders[-1], pages[start:stop], start, dict.fromkeys(("latent", "index_k"), layers)))
    site.random.shuffle(pieces)
    for sender, pages, start, layers in pieces:
        sender.publish(pages, start_page=start, layers=layers)
    for sender in senders:
        sender.publish(last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target, {"kv": 2})
    assert_all(senders, SenderState.RELEASED)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])


def test_two_page_groups_keep_their_own_pages_and_sizes(site: Site) -> None:
    layout = two_groups()
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    target = {"kv": site.scatter(decode.pool, 3), "index": site.scatter(decode.pool, 6)}
    receiver = decode.worker.receive("t", site.instance, target, 3 * PAGE_SIZE - 3)
    senders = []
    for owner in owners:
        pages = {"kv": site.scatter(owner.pool, 3), "index": site.scatter(owner.pool, 6)}
        senders.append(owner.open("t", pages))
        senders[-1].publish(pages["index"], group="index")
        senders[-1].publish(pages["kv"], last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)


def test_digests_of_pages_that_came_packed_agree(stack: contextlib.ExitStack) -> None:
    site = staged_site(stack, verify_digests=True)
    _, owners, decode = pair(site, 2, 5)
    target = {"kv": site.scatter(decode.pool, 5)}
    receiver = decode.worker.receive("t", site.instance, target, 5 * PAGE_SIZE)
    publish_scattered(site, owners, 5)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)


def test_two_decode_ranks_pull_one_request(site: Site) -> None:
    layout = make_layout(4)
    owners, decodes = site.prefill(layout, 2), [site.decode(layout) for _ in range(2)]
    targets = [{"kv": site.scatter(one.pool, 4)} for one in decodes]
    receivers = [
        one.worker.receive("t", site.instance, targets[index], 4 * PAGE_SIZE, readers=ReaderSet("dec", index, 2))
        for index, one in enumerate(decodes)
    ]
    senders = publish_scattered(site, owners, 4)
    for index, one in enumerate(decodes):
        receivers[index].wait(DEADLINE_S)
        assert_whole(one, "t", targets[index])
    assert_all(senders, SenderState.RELEASED)
    assert_slots_back([one.node for one in (*decodes, *owners)])


def test_ranks_of_one_process_share_its_slots(site: Site) -> None:
    layout = make_layout(4)
    sizes = ParallelSizes(cp=2)
    plan = LayerPlan.balanced(layout, sizes)
    node = site.node(staging_slots=1)
    owners = []
    for rank in sizes.ranks():
        pool = site.pool(layout, plan.owned[rank])
        info = PrefillRank("pre", layout, sizes, rank, plan.kinds, plan.owned[rank], pool.regions)
        owners.append(Owner(node, node.prefill(info, [site.bootstrap.address]), pool))
        owners[-1].worker.wait_registered(DEADLINE_S)
    decode = site.decode(layout, staging_slots=4)
    target = {"kv": site.scatter(decode.pool, 6)}
    receiver = decode.worker.receive("t", site.instance, target, 6 * PAGE_SIZE)
    senders = publish_scattered(site, owners, 6)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)
    owners[0].worker.close()  # which leaves the slots to the other
    assert_slots_back([node, decode.node])


# --- which way, and why ------------------------------------------------------------------------------


@pytest.mark.parametrize("off", ["prefill", "decode"])
def test_a_side_without_slots_makes_pulls_direct_and_that_is_logged(
    site: Site, off: str, caplog: pytest.LogCaptureFixture
) -> None:
    layout = make_layout(4)
    owners = site.prefill(layout, 2, staging_slots=0 if off == "prefill" else 2)
    decode = site.decode(layout, staging_slots=0 if off == "decode" else 2)
    target = {"kv": site.scatter(decode.pool, 4)}
    with caplog.at_level(logging.WARNING, "pdlink.decode"):
        receiver = decode.worker.receive("t", site.instance, target, 4 * PAGE_SIZE)
        publish_scattered(site, owners, 4)
        result = receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)
    assert set(result.ways.values()) == {("mapped",)}
    whose = "this side has no" if off == "decode" else "offers no"
    told = [one.message for one in caplog.records if "are not staged" in one.message]
    assert len(told) == 2
    assert all(whose in one and "PDLINK_STAGING_SLOTS" in one for one in told)


def test_a_page_larger_than_a_slot_makes_pulls_direct_and_names_the_setting(stack: contextlib.ExitStack) -> None:
    site = staged_site(stack, staging_slot_bytes=16 << 10)
    _, owners, decode = pair(site, 1)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4]}, PAGE_SIZE)
    publish_scattered(site, owners, 1)
    assert set(receiver.wait(DEADLINE_S).ways.values()) == {("mapped",)}
    (text,) = decode.worker.explain(site.instance).values()
    assert "PDLINK_STAGING_SLOT_BYTES" in text


@pytest.mark.parametrize("way", ["auto", "direct"])
def test_a_backend_that_gathers_is_never_staged_unless_that_is_asked_for(stack: contextlib.ExitStack, way: str) -> None:
    """And no memory is set aside for it."""
    site = staged_site(stack, way=way)
    _, owners, decode = pair(site)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4, 1]}, 2 * PAGE_SIZE)
    publish_scattered(site, owners, 2)
    assert set(receiver.wait(DEADLINE_S).ways.values()) == {("mapped",)}
    assert not any(one for node in (decode.node, owners[0].node) for one in node._arenas.values())


def test_each_choice_is_an_event_and_can_be_explained(site: Site) -> None:
    _, owners, decode = pair(site)
    seen: list[Event] = []
    decode.node.events.subscribe(lambda event: seen.append(event) if event.name == "pull.way" else None)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4, 1]}, 2 * PAGE_SIZE)
    publish_scattered(site, owners, 2)
    receiver.wait(DEADLINE_S)
    names = {owner.worker.rank.worker_id for owner in owners}
    assert {event.fields["worker_id"] for event in seen} == names
    assert {event.fields["way"] for event in seen} == {"staged"}
    told = decode.worker.explain(site.instance)
    assert set(told) == names
    assert all(text.startswith("staged: PDLINK_WAY=staged") for text in told.values())


def test_the_memory_of_slots_is_what_the_settings_say(site: Site) -> None:
    _, _, decode = pair(site)
    area = arena(decode.node).area
    assert (area.num_slots, area.slot_bytes) == (4, 128 << 10)
