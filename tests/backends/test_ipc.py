"""Bytes between two processes over ipc, and what is refused before one moves."""

import gc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdlink.backends import ipc_host
from pdlink.backends.base import PullStatus, Settled
from pdlink.backends.ipc import IpcBackend
from pdlink.errors import BackendError, PeerGone, RegionError
from pdlink.transfer.descriptors import PullBatch
from tests.backends.owner import find_wrong, make_batch, make_planner, make_pool, pull, running, serving
from tests.transfer.values import ints

pytestmark = pytest.mark.backend("ipc")

NUM_PAGES = 32
PAIRS = {
    "contiguous": (range(3, 19), range(8, 24)),
    "scattered": ((7, 1, 30, 12, 2), (0, 29, 3, 14, 15)),
    "single": ((5,), (9,)),
    "first": ((0,), (0,)),
    "last": ((NUM_PAGES - 1,), (NUM_PAGES - 1,)),
    "all": (range(NUM_PAGES), range(NUM_PAGES)),
    "reversed": (range(NUM_PAGES), range(NUM_PAGES - 1, -1, -1)),
    "none": ((), ()),
    "one source twice": ((4, 4), (1, 8)),
}


@pytest.fixture(scope="module", params=[0, 13], ids=["dense", "strided"])
def owner(request):
    with running(gap=request.param) as one:
        yield one


@pytest.fixture(params=[0, 21], ids=["into dense", "into strided"])
def pool(request):
    made = make_pool(3, NUM_PAGES, request.param)
    yield made
    made.close()


@pytest.fixture
def backend(pool):
    made = serving(pool)
    yield made
    made.close()


@pytest.mark.parametrize("name", PAIRS)
def test_pages_of_another_process_arrive_byte_for_byte_and_nothing_else_is_written(owner, pool, backend, name):
    source, destination = PAIRS[name]
    backend.connect(owner.peer)
    assert pull(backend, make_batch(make_planner(owner.regions, pool), source, destination)) is PullStatus.DONE
    assert find_wrong(pool, "t", source, destination) == []
    assert pool.find_touched({"kv": destination}) is None


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_pages_arrive_byte_for_byte(owner, pool, backend, data):
    pages = st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=NUM_PAGES)
    destination = data.draw(pages)
    source = data.draw(st.lists(st.integers(0, NUM_PAGES - 1), min_size=len(destination), max_size=len(destination)))
    for component, layer in pool.layout.cells():
        pool.view(component, layer)[:] = 0xEE
    backend.connect(owner.peer)
    assert pull(backend, make_batch(make_planner(owner.regions, pool), source, destination)) is PullStatus.DONE
    assert find_wrong(pool, "t", source, destination) == []
    assert pool.find_touched({"kv": destination}) is None


@pytest.mark.parametrize("limit", [1, 100, 333, 4000])
def test_a_poll_moves_no_more_than_its_share_whatever_the_length_of_a_run(owner, pool, backend, monkeypatch, limit):
    monkeypatch.setattr(ipc_host, "BYTES_PER_POLL", limit)
    source, destination = PAIRS["contiguous"]
    batch = make_batch(make_planner(owner.regions, pool), source, destination)
    backend.connect(owner.peer)
    handle, num_polls = backend.submit(batch), 1
    while backend.poll(handle) is PullStatus.PENDING:
        num_polls += 1
    # A piece may begin just below the share, so that two shares are the most that one poll moves.
    assert num_polls >= batch.nbytes // (2 * limit)
    assert find_wrong(pool, "t", source, destination) == []
    assert pool.find_touched({"kv": destination}) is None


# --- stopping in the middle ---------------------------------------------------------------------


def halfway(owner, pool, backend, monkeypatch):
    """A pull of all pages of which some, and not all, have landed."""
    monkeypatch.setattr(ipc_host, "BYTES_PER_POLL", 1000)
    backend.connect(owner.peer)
    handle = backend.submit(make_batch(make_planner(owner.regions, pool), *PAIRS["reversed"]))
    for _ in range(3):
        assert backend.poll(handle) is PullStatus.PENDING
    wrong = find_wrong(pool, "t", *PAIRS["reversed"])
    assert 0 < len(wrong) < NUM_PAGES * len(pool.regions)
    return handle


def stays_quiet(pool, backend, handle):
    """Whether no poll moves a byte any more; the pull has failed with a reason."""
    before = find_wrong(pool, "t", *PAIRS["reversed"])
    for _ in range(3):
        assert backend.poll(handle) is PullStatus.FAILED
        assert backend.settle(handle) is Settled.QUIET
    assert isinstance(handle.error, BackendError)
    return find_wrong(pool, "t", *PAIRS["reversed"]) == before


def test_after_settle_in_the_middle_nothing_lands(owner, pool, backend, monkeypatch):
    handle = halfway(owner, pool, backend, monkeypatch)
    assert backend.settle(handle) is Settled.QUIET
    assert stays_quiet(pool, backend, handle)


def test_after_a_fence_nothing_lands_and_the_peer_must_be_connected_again(owner, pool, backend, monkeypatch):
    handle = halfway(owner, pool, backend, monkeypatch)
    assert backend.fence(owner.peer) == ("w0",)
    assert stays_quiet(pool, backend, handle)
    batch = make_batch(make_planner(owner.regions, pool), *PAIRS["all"])
    with pytest.raises(PeerGone, match="w0 is not connected"):
        backend.submit(batch)
    backend.connect(owner.peer)
    assert pull(backend, batch) is PullStatus.DONE
    assert find_wrong(pool, "t", *PAIRS["all"]) == []


def test_a_fence_of_an_earlier_life_leaves_the_present_one_alone(owner, pool, backend):
    backend.connect(owner.peer)
    assert backend.fence(replace(owner.peer, incarnation=0)) == ("w0",)
    batch = make_batch(make_planner(owner.regions, pool), *PAIRS["all"])
    assert pull(backend, batch) is PullStatus.DONE


def test_after_close_nothing_lands_and_closing_twice_is_fine(owner, pool, backend, monkeypatch):
    handle = halfway(owner, pool, backend, monkeypatch)
    backend.close()
    backend.close()
    assert stays_quiet(pool, backend, handle)
    with pytest.raises(PeerGone):
        backend.submit(PullBatch("w0", ()))


def test_settling_a_pull_that_is_done_leaves_it_done(owner, pool, backend):
    backend.connect(owner.peer)
    handle = backend.submit(PullBatch("w0", ()))
    assert backend.poll(handle) is PullStatus.DONE
    assert backend.settle(handle) is Settled.QUIET
    assert backend.poll(handle) is PullStatus.DONE
    assert handle.error is None


def test_a_pull_under_way_outlives_a_disconnect_and_the_mapping_goes_with_it(owner, pool, backend, monkeypatch):
    handle = halfway(owner, pool, backend, monkeypatch)
    backend.disconnect(owner.peer)
    backend.disconnect(owner.peer)
    assert mapped_of(owner) == len(owner.regions)
    while backend.poll(handle) is PullStatus.PENDING:
        pass
    assert find_wrong(pool, "t", *PAIRS["reversed"]) == []
    gc.collect()
    assert mapped_of(owner) == 0


def mapped_of(owner):
    """How many segments of the owner this process has mapped."""
    with open("/proc/self/maps") as file:
        return sum(f"pdlink-{owner.process.pid}-" in line for line in file)


# --- ranges -------------------------------------------------------------------------------------


def damaged(batch, name, by):
    (move,) = batch.moves
    layers = replace(move.layers, **{name: getattr(move.layers, name) + by})
    return PullBatch(batch.worker_id, (replace(move, layers=layers),))


def with_pages(batch, **pages):
    (move,) = batch.moves
    runs = replace(move.runs, **{name: ints(values) for name, values in pages.items()})
    return PullBatch(batch.worker_id, (replace(move, runs=runs),))


def past_guard(batch):
    (move,) = with_pages(batch, source=[NUM_PAGES - 1]).moves
    layers = replace(move.layers, page_bytes=move.layers.source_stride + 1)
    return PullBatch(batch.worker_id, (replace(move, layers=layers),))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda batch: damaged(batch, "destination_base", 1 << 30), "destination .* is in no registered region"),
        (lambda batch: damaged(batch, "destination_base", -1), "is in no registered region"),
        (lambda batch: damaged(batch, "destination_base", -(1 << 40)), "is in no registered region"),
        (lambda batch: damaged(batch, "destination_stride", 4000), "is in no registered region"),
        (lambda batch: damaged(batch, "page_bytes", 1 << 20), "is in no registered region"),
        (lambda batch: with_pages(batch, destination=[NUM_PAGES - 1]), "is in no registered region"),
        (
            lambda batch: damaged(with_pages(batch, destination=[NUM_PAGES - 2]), "page_bytes", 1),
            "no registered region",
        ),
        (lambda batch: damaged(with_pages(batch, destination=[0]), "destination_base", -1), "no registered region"),
        (lambda batch: with_pages(batch, destination=[-1]), "outside the address space"),
        (lambda batch: with_pages(batch, destination=[1 << 61]), "outside the address space"),
        (lambda batch: damaged(batch, "source_base", 1 << 30), "in no segment of w0"),
        (lambda batch: damaged(batch, "source_base", -(1 << 40)), "in no segment of w0"),
        (lambda batch: damaged(batch, "source_stride", 1 << 20), "in no segment of w0"),
        (lambda batch: with_pages(batch, source=[NUM_PAGES * 2]), "in no segment of w0"),
        # One guard page lies in the segment behind the last page; here the run ends one byte behind that.
        (lambda batch: past_guard(batch), "in no segment of w0"),
        (lambda batch: with_pages(batch, source=[-3]), "outside the address space"),
        (lambda batch: with_pages(batch, source=[1 << 61]), "outside the address space"),
        (lambda batch: damaged(batch, "source_stride", 1 << 61), "outside the address space"),
    ],
)
def test_a_range_outside_is_refused_before_a_byte_moves(owner, pool, backend, damage, says):
    backend.connect(owner.peer)
    batch = make_batch(make_planner(owner.regions, pool), (4, 5), (20, 21))
    assert batch.moves[0].runs.num_runs == 1
    with pytest.raises(RegionError, match=says):
        backend.submit(damage(batch))
    assert pool.find_touched() is None


def test_a_region_can_be_written_from_its_register_to_its_last_deregister(owner, pool, backend):
    backend.connect(owner.peer)
    batch = make_batch(make_planner(owner.regions, pool), *PAIRS["all"])
    region = pool.regions[1]
    backend.register(region)
    backend.deregister(region)
    assert pull(backend, batch) is PullStatus.DONE
    backend.deregister(region)
    backend.deregister(region)
    with pytest.raises(RegionError, match=f"destination {region.base_address:#x}"):
        backend.submit(batch)
    backend.register(region)
    assert pull(backend, batch) is PullStatus.DONE


def test_nothing_can_be_pulled_into_a_backend_without_regions(owner, pool):
    backend = IpcBackend()
    backend.connect(owner.peer)
    with pytest.raises(RegionError, match="no registered region"):
        backend.submit(make_batch(make_planner(owner.regions, pool), (1,), (2,)))
    backend.close()
    assert pool.find_touched() is None


def test_a_peer_that_was_never_connected_is_gone(owner, pool, backend):
    with pytest.raises(PeerGone, match="w0 is not connected over ipc"):
        backend.submit(make_batch(make_planner(owner.regions, pool), (1,), (2,)))
