"""Whole requests that go well: every byte at its place, nothing beside it touched, every rank released."""

from __future__ import annotations

import threading

import pytest

from pdlink.layout.components import CacheLayout, Component, index_k, latent
from pdlink.layout.layer_plan import PlanKind
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Site, assert_all, assert_whole, finished, make_layout, wait_until

pytestmark = pytest.mark.backend("ipc")


@pytest.mark.parametrize(("num_layers", "cp"), [(10, 4), (78, 8), (3, 4), (1, 3), (4, 1)])
def test_uneven_layers_of_any_number_of_ranks_arrive_byte_exact(site: Site, num_layers: int, cp: int) -> None:
    """Also where a rank owns nothing: it is subscribed and released like the others, and serves no byte."""
    layout = make_layout(num_layers)
    owners, decode = site.prefill(layout, cp), site.decode(layout)
    target = {"kv": site.scatter(decode.pool, 5)}
    receiver = decode.worker.receive("t", site.instance, target, 5 * PAGE_SIZE - 7, expect_aux=True)
    senders = []
    for owner in owners:
        pages = site.scatter(owner.pool, 5)
        senders.append(owner.open("t", {"kv": pages}))
        senders[-1].publish(pages, last=True, aux=b"token 42")
    result = receiver.wait(DEADLINE_S)
    assert result.aux == b"token 42"
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)
    busy = {owner.worker.rank.worker_id for owner in owners if owner.pool.regions}
    assert set(result.num_bytes) == busy
    assert len(busy) == min(num_layers, cp)
    assert sum(result.num_bytes.values()) == 5 * num_layers * PAGE_SIZE * (656 + 132)


def test_chunks_and_layer_ranges_may_be_published_in_any_order(site: Site) -> None:
    layout = make_layout(8)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    target = {"kv": site.scatter(decode.pool, 6)}
    receiver = decode.worker.receive("t", site.instance, target, 6 * PAGE_SIZE)
    pieces = []
    for owner in owners:
        pages = site.scatter(owner.pool, 6)
        sender = owner.open("t", {"kv": pages})
        mine = owner.worker.rank.owned["latent"]
        for start, stop in ((0, 2), (2, 3), (3, 6)):
            for layers in (mine[:1], mine[1:]):
                named = dict.fromkeys(("latent", "index_k"), layers)
                pieces.append((sender, pages[start:stop], start, named))
    site.random.shuffle(pieces)
    for sender, pages, start, layers in pieces:
        sender.publish(pages, start_page=start, layers=layers)
    senders = list({id(one[0]): one[0] for one in pieces}.values())
    assert not receiver.poll().is_final
    for sender in senders:
        sender.publish(last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)


def test_a_prefix_that_decode_holds_is_not_moved(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    target = {"kv": site.scatter(decode.pool, 4)}
    # 2 whole pages and part of the third are there already; the third is wanted again.
    receiver = decode.worker.receive("t", site.instance, target, 6 * PAGE_SIZE, prefix_tokens=2 * PAGE_SIZE + 9)
    senders = []
    for owner in owners:
        pages = site.scatter(owner.pool, 6)
        senders.append(owner.open("t", {"kv": pages}))
        senders[-1].publish(pages[:3])
        senders[-1].publish(pages[3:], last=True)
    result = receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target, {"kv": 2})
    assert sum(result.num_bytes.values()) == 4 * 4 * PAGE_SIZE * (656 + 132)
    assert_all(senders, SenderState.RELEASED)


def test_publishing_may_come_before_anybody_asks(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    senders = []
    for owner in owners:
        senders.append(owner.open("t", {"kv": [5, 6]}))
        senders[-1].publish([5, 6], last=True)
    decode.worker.receive("t", site.instance, {"kv": [9, 2]}, 2 * PAGE_SIZE).wait(DEADLINE_S)
    assert_whole(decode, "t", {"kv": [9, 2]})
    assert_all(senders, SenderState.RELEASED)


def test_many_requests_at_once_do_not_mix(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2, num_pages=110), site.decode(layout, num_pages=110)
    ids = [f"request {number}" for number in range(50)]
    free = site.scatter(decode.pool, 100)
    target = {one: free[2 * number : 2 * number + 2] for number, one in enumerate(ids)}
    receivers = {
        one: decode.worker.receive(one, site.instance, {"kv": target[one]}, 2 * PAGE_SIZE, expect_aux=True)
        for one in ids
    }
    senders = []
    for owner in owners:
        pages = site.scatter(owner.pool, 100)
        for number, one in enumerate(site.random.sample(ids, len(ids))):
            mine = pages[2 * number : 2 * number + 2]
            senders.append(owner.open(one, {"kv": mine}))
            senders[-1].publish(mine[:1])
            senders[-1].publish(mine[1:], last=True, aux=one.encode())
    for one in ids:
        assert receivers[one].wait(DEADLINE_S).aux == one.encode()
    for one in ids:
        assert decode.pool.find_wrong(one, {"kv": target[one]}) is None
    assert decode.pool.find_touched({"kv": free}) is None
    assert_all(senders, SenderState.RELEASED)


def test_replicas_share_the_load_and_all_are_released(site: Site) -> None:
    layout = make_layout(8)
    owners = site.prefill(layout, 4, kind=PlanKind.REPLICATED)
    decode = site.decode(layout)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE, expect_aux=True)
    senders = []
    for owner in owners:
        senders.append(owner.open("t", {"kv": [3, 4]}))
        senders[-1].publish([3, 4], last=True, aux=b"tok")
    result = receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", {"kv": [1, 2]})
    assert set(result.num_bytes) == {owner.worker.rank.worker_id for owner in owners}
    assert max(result.num_bytes.values()) <= 2 * min(result.num_bytes.values())
    assert_all(senders, SenderState.RELEASED)


def test_digests_of_bytes_that_arrived_well_agree(site: Site) -> None:
    layout = make_layout(5)
    owners = site.prefill(layout, 2, verify_digests=True)
    decode = site.decode(layout, verify_digests=True, page_gap=40)
    receiver = decode.worker.receive("t", site.instance, {"kv": [7, 1, 3]}, 3 * PAGE_SIZE, prefix_tokens=0)
    senders = []
    for owner in owners:
        pages = site.scatter(owner.pool, 3)
        senders.append(owner.open("t", {"kv": pages}))
        senders[-1].publish(pages[:1])
        senders[-1].publish(pages[1:], last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", {"kv": [7, 1, 3]})


@pytest.mark.parametrize("order", ["together", "late"])
def test_two_decode_ranks_pull_one_request_and_its_pages_go_back_once(site: Site, order: str) -> None:
    layout = make_layout(4)
    owners = site.prefill(layout, 2)
    decodes = [site.decode(layout) for _ in range(2)]
    sets = [ReaderSet("dec", index, 2) for index in range(2)]
    senders = []
    for owner in owners:
        pages = site.scatter(owner.pool, 3)
        senders.append(owner.open("t", {"kv": pages}))
        senders[-1].publish(pages, last=True, aux=b"tok")
    targets = [{"kv": [4, 1, 8]}, {"kv": [2, 3, 11]}]

    def receive(index: int):
        return decodes[index].worker.receive(
            "t", site.instance, targets[index], 3 * PAGE_SIZE, readers=sets[index], expect_aux=True
        )

    first = receive(0)
    second = receive(1) if order == "together" else None
    assert first.wait(DEADLINE_S).aux == b"tok"
    if second is None:
        assert [one.poll() for one in senders] == [SenderState.PUBLISHED] * 2
        second = receive(1)
    assert second.wait(DEADLINE_S).aux == b"tok"
    for index in range(2):
        assert_whole(decodes[index], "t", targets[index])
    assert_all(senders, SenderState.RELEASED)


def two_groups() -> CacheLayout:
    """`latent` in pages of 64 tokens and `index_k` in pages of 32, each group with page ids of its own."""
    keys = index_k(32, range(4))
    return CacheLayout(
        4,
        (
            latent(PAGE_SIZE, range(4), bytes_per_token=656),
            Component(keys.name, keys.dtype, keys.page_size, keys.page_bytes, keys.layers, keys.fields, "index"),
        ),
    )


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


def test_nothing_to_move_is_done_at_once_and_releases_every_rank(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 4), site.decode(layout)
    senders = [owner.open("t", {"kv": [1, 2, 3, 4]}) for owner in owners]
    receiver = decode.worker.receive("t", site.instance, {"kv": []}, 4 * PAGE_SIZE, prefix_tokens=4 * PAGE_SIZE)
    result = receiver.wait(DEADLINE_S)
    assert dict(result.num_bytes) == {}
    assert receiver.poll() is ReceiverState.DONE
    for sender in senders:
        sender.publish([1, 2, 3, 4], last=True)
    assert_all(senders, SenderState.RELEASED)
    assert decode.pool.find_touched() is None


def test_nothing_to_move_still_brings_the_aux(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 4), site.decode(layout)
    receiver = decode.worker.receive(
        "t", site.instance, {"kv": []}, 4 * PAGE_SIZE, prefix_tokens=4 * PAGE_SIZE, expect_aux=True
    )
    senders = [owner.open("t", {"kv": [1, 2, 3, 4]}) for owner in owners]
    for sender in senders:
        sender.publish([1, 2, 3, 4], last=True, aux=b"first token")
    assert receiver.wait(DEADLINE_S).aux == b"first token"
    assert_all(senders, SenderState.RELEASED)
    assert decode.pool.find_touched() is None


def test_an_id_may_be_used_again_at_once(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    for round_number in range(5):
        target = {"kv": site.scatter(decode.pool, 2)}
        receiver = decode.worker.receive("t", site.instance, target, 2 * PAGE_SIZE)
        senders = []
        for owner in owners:
            pages = site.scatter(owner.pool, 2)
            senders.append(owner.open("t", {"kv": pages}))
            senders[-1].publish(pages, last=True)
        receiver.wait(DEADLINE_S)
        assert decode.pool.find_wrong("t", target) is None, round_number
        assert_all(senders, SenderState.RELEASED)


def test_what_ended_leaves_no_receive_behind(site: Site) -> None:
    layout = make_layout(2)
    (owner,), decode = site.prefill(layout, 1), site.decode(layout)
    seen = []
    for number in range(3):
        receiver = decode.worker.receive(f"t{number}", site.instance, {"kv": [number]}, PAGE_SIZE)
        receiver.on_end(lambda one: seen.append((one.transfer_id, one.poll())))
        owner.open(f"t{number}", {"kv": [3]}).publish([3], last=True)
        receiver.wait(DEADLINE_S)
    assert decode.worker.num_receives == 0
    decode.node.close()
    assert seen == [(f"t{number}", ReceiverState.DONE) for number in range(3)]


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_pages_that_a_device_writes_after_they_were_published_arrive_as_it_wrote_them(site: Site, way: str) -> None:
    """Their digests too: nothing of a publication is read before its event is done."""
    layout = make_layout(4)
    moves = {"way": way, "verify_digests": True}
    owners, decode = site.prefill(layout, 2, **moves), site.decode(layout, **moves)
    target = {"kv": site.scatter(decode.pool, 5)}
    receiver = decode.worker.receive("t", site.instance, target, 5 * PAGE_SIZE)
    written = [threading.Event() for _ in owners]
    senders, sources = [], []
    for owner, event in zip(owners, written, strict=True):
        sources.append(site.scatter(owner.pool, 5))
        senders.append(owner.worker.open("t"))
        senders[-1].publish(sources[-1][:2], ready=DeviceWrites(event))
        senders[-1].publish(sources[-1][2:], last=True)
    wait_until(lambda: all(one.first_pages() is not None for one in senders))
    assert {one.poll() for one in senders} == {SenderState.OPEN}
    for owner, pages, event in zip(owners, sources, written, strict=True):
        assert not receiver.poll().is_final
        owner.pool.fill("t", {"kv": pages})
        event.set()
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)


class DeviceWrites:
    """Done when the event is set, as the event of a device is when its work is."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def query(self) -> bool:
        return self._over.is_set()


def test_a_worker_that_closes_while_a_device_still_writes_ends_the_request(site: Site) -> None:
    layout = make_layout(4)
    (owner,), decode = site.prefill(layout, 1), site.decode(layout)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
    sender = owner.worker.open("t")
    sender.publish([3, 4], last=True, ready=DeviceWrites(threading.Event()))
    wait_until(lambda: sender.first_pages() is not None)
    owner.worker.close()
    assert sender.poll() is SenderState.ABORTED
    assert finished(receiver).poll() is ReceiverState.FAILED
