"""What is special about the mooncake backend. What it shares with every other is in the conformance suite."""

import json
import os
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends import mooncake_link
from pdlink.backends.base import Peer, PullStatus, Settled
from pdlink.backends.mooncake import MooncakeBackend
from pdlink.config import Settings, load_settings
from pdlink.errors import AddressError, BackendError, BackendUnavailable, PeerGone, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.runtime.node import Node
from pdlink.testing.conformance.pool import PrivateBlock, hand_out_again
from pdlink.testing.conformance.rig import check_untouched, check_whole, pull_part, rig_for, wait, whole
from pdlink.testing.conformance.setup import Setup
from pdlink.transfer.descriptors import GroupMove, LayerTable, PageRuns, PullBatch, pair_pages
from tests import processes
from tests.backends.needs import needs_mooncake
from tests.transfer.values import ints

pytestmark = [needs_mooncake, pytest.mark.backend("mooncake-tcp")]

BIG = {"num_layers": 2, "num_pages": 512, "page_bytes": 65536}
PAGE = 4096


@pytest.fixture
def rig():
    with rig_for(Setup("mooncake")) as made:
        yield made


@pytest.fixture
def opened():
    """Backends made by a test; they end with it."""
    made = []

    def make(**settings):
        made.append(MooncakeBackend(Settings(**settings)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def block():
    made = PrivateBlock(64 * PAGE)
    yield made
    made.close()


def move(source, destination, pages=((0, 0, 1),)):
    """Pages (source, destination, count) from one region to another."""
    table = LayerTable(
        ints([0]),
        ints([source.base_address]),
        ints([source.page_stride]),
        ints([destination.base_address]),
        ints([destination.page_stride]),
        ints([source.page_bytes]),
    )
    return PullBatch("w0", (GroupMove("kv", PageRuns(*(ints(one) for one in zip(*pages, strict=True))), table),))


# --- settings -------------------------------------------------------------------------------------


def test_peers_are_told_the_advertised_host_and_the_protocol(opened, block):
    backend = opened(advertise_host="localhost")
    backend.register(Region("kv", 0, block.address, PAGE, PAGE, 4))
    told = json.loads(backend.endpoint())
    assert told["protocol"] == "tcp"
    assert told["session"].startswith("localhost:")
    assert told["spans"] == [[block.address, block.address + 4 * PAGE]]


def test_a_wildcard_is_never_told_to_peers(opened, block):
    backend = opened(bind_host="0.0.0.0")
    backend.register(Region("kv", 0, block.address, PAGE, PAGE, 4))
    with pytest.raises(AddressError, match="cannot be advertised; set PDLINK_ADVERTISE_HOST"):
        backend.endpoint()


def test_pages_move_between_ipv6_addresses():
    script = """
from pdlink.backends.base import PullStatus
from pdlink.testing.conformance.rig import check_whole, rig_for, wait, whole
from pdlink.testing.conformance.setup import Setup
with rig_for(Setup("mooncake")) as rig:
    owner, pool, backend = rig.ready(num_layers=1, num_pages=8)
    assert b"[::1]:" in owner.peer.endpoint, owner.peer.endpoint
    assert wait(backend, backend.submit(whole(owner, pool))) is PullStatus.DONE
    check_whole(owner, pool)
"""
    env = {**os.environ, "PDLINK_BIND_HOST": "::1"}
    done = processes.run([sys.executable, "-c", script], env=env)
    assert done.returncode == 0, done.stderr


def test_a_node_hands_its_own_settings_to_the_backend(block):
    with Node(load_settings({}, backends="mooncake", advertise_host="localhost")) as node:
        backend = node.backends["mooncake"]
        backend.register(Region("kv", 0, block.address, PAGE, PAGE, 4))
        assert json.loads(backend.endpoint())["session"].startswith("localhost:")


def test_a_rank_without_memory_serves_nothing_and_says_so(opened):
    backend = opened()
    assert json.loads(backend.endpoint()) == {"protocol": "tcp", "session": "", "spans": []}
    backend.connect(Peer("w0", 1, backend.endpoint()))


def test_a_peer_with_another_protocol_is_refused_with_both(opened):
    theirs = json.dumps({"protocol": "rdma", "session": "127.0.0.1:15000", "spans": [[1, 2]]}).encode()
    with pytest.raises(BackendUnavailable, match="w0 moves mooncake over rdma, this process over tcp; set PDLINK_MOON"):
        opened().connect(Peer("w0", 1, theirs))


def test_device_memory_is_refused_over_tcp_where_the_library_knows_none(opened, block):
    region = Region("kv", 3, block.address, PAGE, PAGE, 4, MemoryKind.CUDA, 0)
    with pytest.raises(RegionError, match="over tcp serves host memory here; 'kv' layer 3 is on cuda"):
        opened().register(region)


# --- memory ---------------------------------------------------------------------------------------


def test_regions_that_lie_in_each_others_gaps_move_until_each_is_taken_back(opened, block):
    even = Region("k", 0, block.address, 2 * PAGE, PAGE, 8)
    odd = Region("v", 0, block.address + PAGE, 2 * PAGE, PAGE, 8)
    target = Region("k", 0, block.address + 32 * PAGE, PAGE, PAGE, 16)
    block.array.reshape(-1, PAGE)[:16] = np.arange(16, dtype=np.uint8)[:, None]
    owner, reader = opened(), opened()
    owner.register(even)
    owner.register(odd)
    peer = Peer("w0", 1, owner.endpoint())
    reader.register(target)
    reader.connect(peer)
    assert wait(reader, reader.submit(move(even, target, [(0, 0, 8)]))) is PullStatus.DONE
    assert wait(reader, reader.submit(move(odd, target, [(0, 8, 8)]))) is PullStatus.DONE
    assert block.array.reshape(-1, PAGE)[32:48, -1].tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    owner.deregister(even)
    assert wait(reader, reader.submit(move(odd, target, [(7, 0, 1)]))) is PullStatus.DONE
    taken = reader.submit(move(even, target))
    assert wait(reader, taken) is PullStatus.FAILED
    assert "though 127.0.0.1:" in str(taken.error)
    assert "it may have taken its memory back" in str(taken.error)


def test_memory_that_is_registered_while_peers_are_connected_is_known_at_once(opened, block):
    owner, reader = opened(), opened()
    regions = [Region("kv", layer, block.address + 8 * layer * PAGE, PAGE, PAGE, 4) for layer in range(4)]
    block.array[8 * PAGE : 12 * PAGE] = 3
    owner.register(regions[0])
    reader.register(regions[2])
    reader.connect(Peer("w0", 1, owner.endpoint()))
    owner.register(regions[1])
    reader.connect(Peer("w0", 2, owner.endpoint()))
    reader.register(regions[3])
    assert wait(reader, reader.submit(move(regions[1], regions[3], [(0, 0, 4)]))) is PullStatus.DONE
    assert set(block.array[24 * PAGE : 28 * PAGE].tolist()) == {3}


# --- the window -----------------------------------------------------------------------------------


def test_reads_are_on_the_wire_before_anybody_looks(rig):
    owner, pool, backend = rig.ready(num_layers=1, num_pages=8)
    handle = backend.submit(whole(owner, pool))
    assert handle.posted
    assert handle.timings.post_s > 0
    assert wait(backend, handle) is PullStatus.DONE


def test_long_ranges_are_cut_and_what_is_in_flight_stays_in_bounds(rig, monkeypatch):
    narrow = replace(mooncake_link.NETWORK, read_bytes=1000, batches=4, nbytes=3500)
    monkeypatch.setattr(mooncake_link, "NETWORK", narrow)
    owner, pool, backend = rig.ready(num_layers=2, num_pages=16)
    handle = backend.submit(whole(owner, pool))
    while backend.poll(handle) is PullStatus.PENDING:
        assert 0 < len(handle.posted) <= 4
        assert handle.nbytes == sum(nbytes for _, nbytes in handle.posted) <= 3500
        assert max(nbytes for _, nbytes in handle.posted) <= 1000
    assert handle.status is PullStatus.DONE
    check_whole(owner, pool)


@given(
    pages=st.lists(st.integers(0, 5000), unique=True, min_size=1, max_size=60),
    layers=st.integers(1, 5),
    most=st.integers(2, 50),
    nbytes=st.sampled_from([64, 32 << 20]),
)
def test_between_devices_many_ranges_go_in_one_batch_and_none_is_cut(pages, layers, most, nbytes):
    ids = ints(pages)
    table = LayerTable(
        np.arange(layers),
        (1 << 40) + np.arange(layers) * (1 << 39),
        np.full(layers, nbytes),
        (1 << 50) + np.arange(layers) * (1 << 39),
        np.full(layers, nbytes),
        np.full(layers, nbytes),
    )
    batch = PullBatch("w0", (GroupMove("kv", pair_pages(ids, ids[::-1]), table),))
    wanted = [row for one in batch.expand() for row in zip(one.source, one.destination, one.nbytes, strict=True)]
    made = list(mooncake_link.batches_of(batch, replace(mooncake_link.DEVICES, batch_reads=most)))
    assert all(len(sources) <= most for sources, _, _ in made)
    assert sorted(row for one in made for row in zip(*one, strict=True)) == sorted(wanted)
    assert all(type(value) is int for one in made for column in one for value in column)


def test_pulls_from_one_peer_share_its_queue_and_all_end(rig, monkeypatch):
    monkeypatch.setattr(mooncake_link, "NETWORK", replace(mooncake_link.NETWORK, link_batches=8))
    owner, pool, backend = rig.ready(num_layers=2, num_pages=64)
    handles = [backend.submit(whole(owner, pool)) for _ in range(5)]
    waiting = list(handles)
    while waiting:
        assert sum(len(one.posted) for one in handles) <= 8 + len(handles)
        waiting = [one for one in waiting if backend.poll(one) is PullStatus.PENDING]
    assert {one.status for one in handles} == {PullStatus.DONE}
    check_whole(owner, pool)


def test_callers_that_connect_a_peer_at_once_share_one_link(rig):
    owner = rig.owner(num_layers=1, num_pages=16)
    pool = rig.pool(owner)
    backend = rig.backend(*pool.regions)
    start, failures = threading.Barrier(6), []

    def connect_and_pull():
        start.wait(60)
        backend.connect(owner.peer)
        handle = backend.submit(whole(owner, pool))
        if wait(backend, handle) is not PullStatus.DONE:
            failures.append(handle.error)

    threads = [threading.Thread(target=connect_and_pull) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert len(backend._links) == 1
    check_whole(owner, pool)


def test_a_closed_backend_reaches_nobody(rig):
    owner = rig.owner(num_layers=1, num_pages=16)
    backend = rig.backend()
    backend.close()
    with pytest.raises(BackendUnavailable, match="this mooncake backend is closed"):
        backend.connect(owner.peer)


# --- the ends of links ----------------------------------------------------------------------------


def test_a_pull_goes_on_when_another_caller_forgets_its_peer(rig):
    owner, pool, backend = rig.ready(**BIG)
    handle = pull_part(backend, whole(owner, pool), pool)
    backend.disconnect(owner.peer)
    assert handle.link.is_open
    assert wait(backend, handle) is PullStatus.DONE
    assert not handle.link.is_open
    check_whole(owner, pool)


def test_a_fence_reaches_the_pull_of_a_forgotten_peer(rig):
    owner, pool, backend = rig.ready(**BIG)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.process.stop()
    backend.disconnect(owner.peer)
    assert backend.fence(owner.peer) == ("w0",)
    assert backend.settle(handle) is Settled.QUIET
    hand_out_again(pool)
    owner.process.resume()
    backend.connect(owner.peer)
    check_untouched(pool, "the pull of a forgotten peer was fenced")


def test_a_stopped_peer_is_not_quiet_until_the_fence_and_costs_no_time_in_poll(rig):
    owner, pool, backend = rig.ready(**BIG)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.process.stop()
    # What was in the sockets still lands; after that nothing does.
    num_open = -1
    while num_open != len(handle.posted):
        num_open = len(handle.posted)
        for _ in range(200):
            assert backend.poll(handle) is PullStatus.PENDING
    assert backend.settle(handle) is Settled.NOT_QUIET
    assert backend.poll(handle) is PullStatus.FAILED
    backend.fence(owner.peer)
    assert backend.settle(handle) is Settled.QUIET
    owner.process.kill()


def test_a_killed_peer_is_said_to_be_gone(rig):
    owner, pool, backend = rig.ready(**BIG)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.process.kill()
    assert wait(backend, handle) is PullStatus.FAILED
    assert isinstance(handle.error, PeerGone)
    assert str(handle.error).startswith("w0 is gone: a read over mooncake failed, and 127.0.0.1:")


def test_a_peer_that_is_stopped_before_it_is_reached_costs_the_connect_timeout(rig, opened):
    owner = rig.owner(num_layers=1, num_pages=16)
    pool = rig.pool(owner)
    backend = opened(connect_timeout_s=2.0)
    for region in pool.regions:
        backend.register(region)
    owner.process.stop()
    with pytest.raises(PeerGone, match=r"w0 at 127.0.0.1:\d+ did not answer mooncake for 2 s"):
        backend.connect(owner.peer)
    with pytest.raises(PeerGone, match=r"w0 at .* has not answered mooncake yet"):
        backend.connect(owner.peer)
    assert sum(one.name == "pdlink-mooncake-w0" for one in threading.enumerate()) == 1
    owner.process.resume()
    assert processes.wait_until(lambda: all(one.name != "pdlink-mooncake-w0" for one in threading.enumerate()))
    backend.connect(owner.peer)
    assert wait(backend, backend.submit(whole(owner, pool))) is PullStatus.DONE
    check_whole(owner, pool)


def test_a_call_that_is_stuck_in_the_library_keeps_a_fence_from_promising_quiet(rig, monkeypatch):
    monkeypatch.setattr(mooncake_link, "CLOSE_TIMEOUT_S", 0.1)
    owner, pool, backend = rig.ready(num_layers=1, num_pages=16)
    handle = backend.submit(whole(owner, pool))
    with handle.link._lock, pytest.raises(BackendError, match=r"a call of mooncake for w0 has not returned for 0\.1 s"):
        backend.fence(owner.peer)
    assert handle.link.is_open
    assert backend.fence(owner.peer) == ("w0",)
    assert not handle.link.is_open


@pytest.mark.parametrize("when", ["after a pull", "in the middle of a pull"])
def test_a_process_that_closes_nothing_ends_with_its_own_exit_code(when):
    script = """
import sys
from pdlink.backends.base import PullStatus
from pdlink.testing.conformance.rig import pull_part, rig_for, wait, whole
from pdlink.testing.conformance.setup import Setup
rig = rig_for(Setup("mooncake")).__enter__()
owner, pool, backend = rig.ready(num_layers=2, num_pages=512, page_bytes=65536)
handle = pull_part(backend, whole(owner, pool), pool)
if sys.argv[1] == "after a pull":
    assert wait(backend, handle) is PullStatus.DONE
owner.process.close()
sys.exit(7)
"""
    done = processes.run([sys.executable, "-c", script, when])
    assert done.returncode == 7, done.stderr
