"""Sides that do not fit, and requests that cannot be right: refused on both ends, in words, with nothing written."""

from __future__ import annotations

import contextlib
import time

import pytest
import zmq

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.errors import DeadlineExceeded, DuplicateTransfer, IncompatibleError, InvalidInput, TransferFailed
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import LayerPlan, OwnedLayers
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.rank import PrefillRank
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.rig import (
    DEADLINE_S,
    LOOPBACK,
    PAGE_SIZE,
    Decode,
    Owner,
    Site,
    assert_all,
    assert_whole,
    finished,
    make_layout,
    wait_until,
)
from tests.link.test_moving import two_groups

REFUSED_WITHIN_S = 30.0
GOOD, OTHER = "the-token-of-this-test", "another-token-than-that"


def serve(site: Site, owners: list[Owner], decode: Decode, transfer_id: str = "good") -> None:
    """One request that must go well."""
    target = {"kv": [9, 6]}
    receiver = decode.worker.receive(transfer_id, site.instance, target, 2 * PAGE_SIZE)
    senders = []
    for owner in owners:
        senders.append(owner.open(transfer_id, {"kv": [1, 4]}))
        senders[-1].publish([1, 4], last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, transfer_id, target)
    assert_all(senders, SenderState.RELEASED)


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize(
    ("field", "theirs", "values"),
    [
        ("page_size", make_layout(4, page_size=32), ("64", "32")),
        ("page_bytes", make_layout(4, latent_bytes=1312), ("41984", "83968")),
        ("num_layers", make_layout(5), ("is 4 on prefill", "5 on decode")),
    ],
)
def test_sides_that_differ_are_refused_on_both_ends_with_both_values_and_the_server_serves_on(
    site: Site, field: str, theirs: CacheLayout, values: tuple[str, str], opened: str
) -> None:
    layout = make_layout(4)
    owners, bad, good = site.prefill(layout, 2), site.decode(theirs, name="bad"), site.decode(layout)
    refused: list[list[str]] = [[] for _ in owners]
    for owner, seen in zip(owners, refused, strict=True):
        owner.node.events.subscribe(
            lambda event, seen=seen: event.name == "transfer.refused" and seen.append(event.name)
        )
    senders = [owner.open("t", {"kv": [1, 2, 3, 4]}) for owner in owners] if opened == "before" else []
    num_pages = -(-100 // theirs.components[0].page_size)
    started = time.monotonic()
    receiver = finished(bad.worker.receive("t", site.instance, {"kv": list(range(num_pages))}, 100))
    if opened == "after":
        wait_until(lambda: all(len(seen) for seen in refused))
        senders = [owner.open("t", {"kv": [1, 2, 3, 4]}) for owner in owners]
    assert_all(senders, SenderState.ABORTED)
    assert time.monotonic() - started < REFUSED_WITHIN_S
    assert receiver.poll() is ReceiverState.FAILED
    for failure in [receiver.failure, *(one.failure for one in senders)]:
        assert failure
        assert failure.reason is FailureReason.INCOMPATIBLE
        assert field in str(failure)
        assert all(value in str(failure) for value in values), str(failure)
        assert failure.fix
    assert bad.pool.find_touched() is None
    serve(site, owners, good)
    serve(site, owners, good, "t")


def start_ranks(site: Site, layout: CacheLayout, sizes: ParallelSizes, owned: dict[int, OwnedLayers]) -> list[Owner]:
    """Ranks along cp with any plan, right or wrong, registered in order without waiting for the outcome."""
    kinds = LayerPlan.balanced(layout, sizes).kinds
    owners = []
    for cp, cells in owned.items():
        pool = site.pool(layout, cells)
        node = site.node()
        rank = PrefillRank("pre", layout, sizes, RankCoordinates(cp=cp), kinds, cells, pool.regions)
        owners.append(Owner(node, node.prefill(rank, [site.bootstrap.address]), pool))
    return owners


@pytest.mark.parametrize(
    ("owned", "text"),
    [({0: (0, 1), 1: (3,)}, "layers 2 have no owner"), ({0: (0, 1, 2), 1: (2, 3)}, "layer 2 is owned by")],
    ids=["gap", "overlap"],
)
def test_ranges_with_a_gap_or_an_overlap_are_never_pulled_from(
    site: Site, owned: dict[int, tuple[int, ...]], text: str
) -> None:
    layout = make_layout(4)
    cells = {cp: {"latent": ids, "index_k": ids} for cp, ids in owned.items()}
    owners = start_ranks(site, layout, ParallelSizes(cp=2), cells)
    decode = site.decode(layout, resolve_timeout_s=0.5)
    with pytest.raises(TransferFailed, match=text):
        decode.worker.receive("t", site.instance, {"kv": [1]}, 10).wait(DEADLINE_S)
    assert decode.pool.find_touched() is None
    for owner in owners:
        owner.node.close()


def test_a_rank_that_registers_twice_does_not_stand_for_one_that_is_missing(site: Site) -> None:
    layout = make_layout(4)
    plan = LayerPlan.balanced(layout, ParallelSizes(cp=2))
    ranks = {cp: plan.owned[RankCoordinates(cp=cp)] for cp in range(2)}
    for _ in range(2):
        start_ranks(site, layout, ParallelSizes(cp=2), {0: ranks[0]})[0].worker.wait_registered(DEADLINE_S)
    decode = site.decode(layout, resolve_timeout_s=0.3)
    receiver = finished(decode.worker.receive("t", site.instance, {"kv": [1]}, 10))
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.NOT_READY
    assert "cp1" in receiver.failure.text

    other = make_layout(4, page_size=32)
    (odd,) = start_ranks(site, other, ParallelSizes(cp=2), {1: ranks[1]})
    with pytest.raises(IncompatibleError, match="page_size") as refusal:
        odd.worker.wait_registered(DEADLINE_S)
    assert "64" in str(refusal.value)
    assert "32" in str(refusal.value)


def test_page_lists_of_two_groups_that_were_swapped_are_refused_where_sizes_show_it(site: Site) -> None:
    layout = two_groups()
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    with pytest.raises(InvalidInput, match=r"'kv'.*need 2 pages of 64 tokens, 4 were given"):
        decode.worker.receive("t", site.instance, {"kv": [1, 2, 3, 4], "index": [1, 2]}, 128)
    assert decode.worker.num_receives == 0

    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2], "index": [1, 2, 3, 4]}, 128)
    for owner in owners:
        sender = owner.open("t", {"kv": [1, 2], "index": [1, 2, 3, 4]})
        sender.publish([1, 2, 3, 4], group="kv")
        sender.publish([1, 2], group="index", last=True)
    with pytest.raises(TransferFailed, match=r"never page 2 of 'index_k'"):
        receiver.wait(DEADLINE_S)


def test_a_prompt_that_is_shorter_on_prefill_fails_at_once_and_names_the_page(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2, 3]}, 3 * PAGE_SIZE)
    senders = [owner.open("t", {"kv": [1, 2]}) for owner in owners]
    started = time.monotonic()
    for sender in senders:
        sender.publish([1, 2], last=True)
    with pytest.raises(TransferFailed, match=r"never page 2 of 'latent' layer \d"):
        receiver.wait(DEADLINE_S)
    assert time.monotonic() - started < REFUSED_WITHIN_S
    assert_all(senders, SenderState.ABORTED)


def test_aux_that_is_expected_and_does_not_come_fails_and_names_the_rank(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1]}, PAGE_SIZE, expect_aux=True)
    for owner in owners:
        owner.open("t", {"kv": [2]}).publish([2], last=True)
    with pytest.raises(TransferFailed, match=r"pre/dp0\.pp0\.cp1\.tp0 is elected to send the aux"):
        receiver.wait(DEADLINE_S)


def test_aux_comes_from_the_elected_rank_alone(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 3), site.decode(layout)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1]}, PAGE_SIZE)
    for number, owner in enumerate(owners):
        owner.open("t", {"kv": [2]}).publish([2], last=True, aux=b"from %d" % number)
    assert receiver.wait(DEADLINE_S).aux == b"from 2"


def test_digests_that_only_decode_asks_for_are_missed_not_forgotten(site: Site) -> None:
    layout = make_layout(2)
    (owner,), decode = site.prefill(layout, 1), site.decode(layout, verify_digests=True)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1]}, PAGE_SIZE)
    owner.open("t", {"kv": [2]}).publish([2], last=True)
    with pytest.raises(TransferFailed, match="PDLINK_VERIFY_DIGESTS"):
        receiver.wait(DEADLINE_S)
    assert decode.pool.find_touched() is None


def test_a_second_live_request_of_one_id_is_refused_and_the_first_is_unaffected(site: Site) -> None:
    """On the same decode rank, on another decode instance, and on the prefill side."""
    layout = make_layout(4)
    owners, decode, other = site.prefill(layout, 2), site.decode(layout), site.decode(layout, name="other")
    first = decode.worker.receive("t", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
    senders = [owner.open("t", {"kv": [3, 4]}) for owner in owners]
    wait_until(lambda: first.poll() is ReceiverState.SUBSCRIBED)
    senders[0].publish([3])
    wait_until(lambda: first.poll() is ReceiverState.PULLING)
    with pytest.raises(DuplicateTransfer, match="'t'"):
        decode.worker.receive("t", site.instance, {"kv": [5, 6]}, 2 * PAGE_SIZE)
    with pytest.raises(DuplicateTransfer, match="'t'"):
        owners[0].worker.open("t")
    second = finished(other.worker.receive("t", site.instance, {"kv": [5, 6]}, 2 * PAGE_SIZE))
    assert second.failure
    assert second.failure.reason is FailureReason.DUPLICATE
    senders[0].publish([4], last=True)
    senders[1].publish([3, 4], last=True)
    first.wait(DEADLINE_S)
    assert_whole(decode, "t", {"kv": [1, 2]})
    assert other.pool.find_touched() is None
    assert_all(senders, SenderState.RELEASED)
    serve(site, owners, other, "t")


def test_reader_sets_that_disagree_on_their_size_are_refused(site: Site) -> None:
    layout = make_layout(4)
    owners, decode, other = site.prefill(layout, 2), site.decode(layout), site.decode(layout)
    senders = [owner.open("t", {"kv": [3]}) for owner in owners]
    senders[0].publish([3], last=True)
    first = decode.worker.receive("t", site.instance, {"kv": [1]}, PAGE_SIZE, readers=ReaderSet("dec", 0, 2))
    wait_until(lambda: first.poll() is ReceiverState.PULLING)
    second = finished(other.worker.receive("t", site.instance, {"kv": [1]}, PAGE_SIZE, readers=ReaderSet("dec", 1, 3)))
    assert second.failure
    assert second.failure.reason is FailureReason.DUPLICATE
    assert "2 readers" in second.failure.text
    assert "3 readers" in second.failure.text
    assert other.pool.find_touched() is None
    assert not first.poll().is_final


def test_malformed_and_foreign_frames_are_counted_and_a_good_request_passes(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    context = zmq.Context()
    target = owners[0].worker.control_endpoint
    junk = [[b""], [b"\x00"], [b"\x08\x01\x12"], [site.random.randbytes(1024)], [b"a", b"b", b"c"], [b"x" * (8 << 20)]]
    for parts in junk:  # a connection each: one that sends too much is cut off
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"tcp://{target}")
        socket.send_multipart(parts)
        socket.close()
    context.term()
    wait_until(lambda: owners[0].node.loop.counters.malformed >= len(junk) - 1)
    serve(site, owners, decode)
    assert owners[0].node.loop.is_alive


def test_an_instance_that_nobody_serves_fails_the_request_by_its_deadline(site: Site) -> None:
    decode = site.decode(make_layout(2), resolve_timeout_s=0.3)
    receiver = decode.worker.receive("t", PrefillInstance("nobody", (site.bootstrap.address,)), {"kv": [1]}, 9)
    with pytest.raises(TransferFailed, match="nobody"):
        receiver.wait(DEADLINE_S)


def test_a_wait_that_runs_out_says_so_and_changes_nothing(site: Site) -> None:
    layout = make_layout(2)
    (owner,), decode = site.prefill(layout, 1), site.decode(layout)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1]}, PAGE_SIZE)
    with pytest.raises(DeadlineExceeded, match="'t' is"):
        receiver.wait(0.05)
    owner.open("t", {"kv": [3]}).publish([3], last=True)
    receiver.wait(DEADLINE_S)


@pytest.mark.parametrize(("token", "host"), [(OTHER, "127.0.0.1"), (GOOD, "192.0.2.1")])
def test_credentials_that_are_refused_or_may_not_be_sent_are_no_peer_that_is_gone(
    stack: contextlib.ExitStack, token: str, host: str
) -> None:
    site = Site(stack)
    guarded = stack.enter_context(BootstrapServer.start(LOOPBACK, load_settings({}, token=GOOD)))
    decode = site.decode(make_layout(2), **load_settings({}, token=token).model_dump(include={"token"}))
    where = PrefillInstance("pre", (Address(host, guarded.address.port),))
    receiver = decode.worker.receive("t", where, {"kv": [0, 1, 2]}, 3 * PAGE_SIZE)
    wait_until(lambda: receiver.state.is_final)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.DENIED
    assert "retrying cannot help" in receiver.failure.fix
