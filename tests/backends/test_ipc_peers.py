"""Who can be connected to over ipc, and what becomes of peers that end, restart or lie."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdlink.backends import ipc_host
from pdlink.backends.base import Peer, PullStatus
from pdlink.backends.ipc import IpcBackend
from pdlink.errors import BackendError, BackendUnavailable, PeerGone, RegionError
from pdlink.layout import MemoryKind, Region
from tests.backends.owner import find_wrong, make_batch, make_planner, make_pool, pull, running, serving

pytestmark = pytest.mark.backend("ipc")

PAGES = ((3, 4, 9), (0, 7, 8))


@pytest.fixture
def pool():
    made = make_pool(3, 32)
    yield made
    made.close()


@pytest.fixture
def backend(pool):
    made = serving(pool)
    yield made
    made.close()


def changed(pool, **fields):
    """The endpoint of a pool of this process, with some of it replaced."""
    endpoint = {**json.loads(serving(pool).endpoint()), **fields}
    return json.dumps(endpoint).encode()


def test_private_memory_is_refused_at_the_endpoint_with_the_way_out():
    memory = np.zeros(4096, dtype=np.uint8)
    backend = IpcBackend()
    backend.register(Region("latent", 0, memory.__array_interface__["data"][0], 1024, 1024, 4))
    with pytest.raises(RegionError, match=r"private to this process.*pdlink\.memory\.allocate"):
        backend.endpoint()
    backend.close()


def test_memory_of_a_segment_that_was_closed_is_refused_at_the_endpoint():
    pool = make_pool(1, 4)
    backend = serving(pool)
    pool.close()
    with pytest.raises(RegionError, match="private"):
        backend.endpoint()
    backend.close()


def test_what_is_no_device_memory_is_refused_at_register():
    with pytest.raises(
        RegionError, match=r"is on a device, which backend ipc cannot serve here|is no memory of device"
    ):
        IpcBackend().register(Region("latent", 3, 4096, 64, 64, 1, MemoryKind.CUDA))


def test_an_endpoint_names_each_segment_once_and_not_its_pages(pool):
    small, large = make_pool(3, 4), make_pool(3, 400)
    try:
        sizes = [len(serving(one).endpoint()) for one in (small, large)]
        assert sizes[1] - sizes[0] < 64
        told = json.loads(serving(small).endpoint())
        assert len(told["segments"]) == len(small.regions)
        assert json.loads(IpcBackend().endpoint())["segments"] == []
    finally:
        small.close()
        large.close()


def test_a_peer_on_another_host_is_unavailable_and_named(pool, backend):
    peer = Peer("node7/gpu0", 1, changed(pool, host="11111111-2222/24:1"))
    with pytest.raises(BackendUnavailable, match=r"node7/gpu0 runs on another host.*11111111"):
        backend.connect(peer)


GARBAGE = [
    b"",
    b"\xff\xfe",
    b"{}",
    b"[]",
    b"7",
    b"null",
    b'{"host": "h"}',
    b'{"host": "h", "segments": 5}',
    b'{"host": "h", "segments": [[1, 2]]}',
    b'{"host": "h", "segments": [["n", "x", 1]]}',
    b'{"host": "h", "segments": [["n", Infinity, 1]]}',
    b'{"host": "h", "segments": [["n", ' + b"9" * 5000 + b", 1]]}",
    b"[" * 60_000,
    bytes(range(256)) * 4,
]


@pytest.mark.parametrize("endpoint", GARBAGE, ids=range(len(GARBAGE)))
def test_an_endpoint_that_cannot_be_read_is_unavailable(backend, endpoint):
    with pytest.raises(BackendUnavailable, match="w0 offers an ipc endpoint that cannot be read"):
        backend.connect(Peer("w0", 1, endpoint))


@pytest.mark.parametrize(
    "segment",
    [
        ["../../etc/passwd", 4096, 10],
        ["pdlink-1-../../../../x", 4096, 10],
        ["pdlink-1-0123456789abcdef", 0, 10],
        ["pdlink-1-0123456789abcdef", -4096, 10],
        ["pdlink-1-0123456789abcdef", 4096, 0],
        ["pdlink-1-0123456789abcdef", 4096, -5],
        ["pdlink-1-0123456789abcdef", 1 << 63, 10],
        ["pdlink-1-0123456789abcdef", 4096, 1 << 63],
        ["pdlink-1-0123456789abcdef", 4096, 10],
    ],
)
def test_an_endpoint_that_names_what_is_no_segment_is_refused(pool, backend, segment):
    with pytest.raises(BackendError):
        backend.connect(Peer("w0", 1, changed(pool, segments=[segment])))


def test_a_segment_of_another_size_is_refused_with_both_sizes(pool, backend):
    (name, base, nbytes), *others = json.loads(backend.endpoint())["segments"]
    for wrong in (nbytes - 1, nbytes + 1):
        endpoint = changed(pool, segments=[*others, [name, base, wrong]])
        with pytest.raises(RegionError, match=f"{nbytes} bytes, its owner said {wrong}"):
            backend.connect(Peer("w0", 1, endpoint))
    with pytest.raises(PeerGone, match="not connected"):
        backend.submit(make_batch(make_planner(pool.regions, pool), (1,), (2,)))


def test_an_owner_that_ended_is_gone_at_connect(pool, backend):
    with running() as owner:
        pass
    with pytest.raises(PeerGone, match="is gone"):
        backend.connect(owner.peer)


def test_an_owner_that_was_killed_is_gone_at_connect_though_its_files_lie_on(pool, backend):
    with running() as owner:
        owner.kill()
        try:
            with pytest.raises(PeerGone, match=r"is gone|owner that has died"):
                backend.connect(owner.peer)
        finally:
            remove_left(owner)


def remove_left(owner):
    for name, _, _ in json.loads(owner.peer.endpoint)["segments"]:
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def test_what_was_connected_stays_readable_after_its_owner_was_killed(pool, backend):
    with running() as owner:
        backend.connect(owner.peer)
        owner.kill()
        remove_left(owner)
        assert pull(backend, make_batch(make_planner(owner.regions, pool), *PAGES)) is PullStatus.DONE
        assert find_wrong(pool, "t", *PAGES) == []


def test_the_same_incarnation_is_not_attached_twice_and_another_one_takes_its_place(pool, backend, monkeypatch):
    attached = []

    def attach(name, nbytes):
        attached.append(name)
        return real(name, nbytes)

    real = ipc_host.attach
    monkeypatch.setattr(ipc_host, "attach", attach)
    with running("old", incarnation=1) as old, running("new", incarnation=2) as new:
        backend.connect(old.peer)
        backend.connect(old.peer)
        backend.connect(replace(old.peer, endpoint=b"never looked at"))
        assert len(attached) == len(old.regions)
        halfway = backend.submit(make_batch(make_planner(old.regions, pool), *PAGES))
        backend.connect(new.peer)
        assert len(attached) == 2 * len(old.regions)
        assert backend.poll(halfway) is PullStatus.FAILED
        assert pool.find_touched() is None
        assert pull(backend, make_batch(make_planner(new.regions, pool), *PAGES)) is PullStatus.DONE
        assert find_wrong(pool, "new", *PAGES) == []
        backend.disconnect(old.peer)
        assert pull(backend, make_batch(make_planner(new.regions, pool), *PAGES)) is PullStatus.DONE


def test_a_failed_connect_leaves_the_present_link_as_it_was(pool, backend):
    with running() as owner:
        backend.connect(owner.peer)
        with pytest.raises(BackendUnavailable):
            backend.connect(Peer("w0", 2, b"garbage"))
        assert pull(backend, make_batch(make_planner(owner.regions, pool), *PAGES)) is PullStatus.DONE
        assert find_wrong(pool, "t", *PAGES) == []


def test_peers_that_map_their_pools_at_one_address_are_told_apart(pool, backend):
    # Two processes may well have the same addresses: a batch is read from the peer that it names.
    with running("a") as one:
        other = make_pool(3, 32)
        try:
            other.fill("b", {"kv": range(32)})
            served = json.loads(serving(other).endpoint())
            shifted = {name: base for name, base, _ in json.loads(one.peer.endpoint)["segments"]}
            moved = [
                [mine[0], theirs, mine[2]] for mine, theirs in zip(served["segments"], shifted.values(), strict=True)
            ]
            backend.connect(one.peer)
            backend.connect(Peer("w1", 1, json.dumps({**served, "segments": moved}).encode()))
            batch = make_batch(make_planner(one.regions, pool), *PAGES)
            assert pull(backend, batch) is PullStatus.DONE
            assert find_wrong(pool, "a", *PAGES) == []
            assert pull(backend, replace(batch, worker_id="w1")) is PullStatus.DONE
            assert find_wrong(pool, "b", *PAGES) == []
        finally:
            other.close()
