"""Many threads on one ipc backend."""

import threading

import pytest

from pdlink.backends import ipc_host
from pdlink.backends.base import Peer, PullStatus
from pdlink.testing.pattern import PatternPool
from tests.backends.owner import find_wrong, make_batch, make_layout, make_planner, make_pool, pull, serving

pytestmark = pytest.mark.backend("ipc")


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


def run_together(calls):
    """Run all calls at once, each on a thread; returns what they raised."""
    gate, raised = threading.Barrier(len(calls)), []

    def run(call):
        gate.wait(60)
        try:
            call()
        except Exception as error:  # noqa: BLE001 - told to the test
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return raised


def test_sixteen_threads_pull_from_sixteen_peers_at_once(monkeypatch):
    monkeypatch.setattr(ipc_host, "BYTES_PER_POLL", 2000)
    layout = make_layout(16)
    everything = {one.name: one.layers for one in layout.components}
    target = PatternPool(layout, everything, 32)
    backend = serving(target)
    owners = [PatternPool(layout, {"latent": (layer,)}, 32) for layer in range(16)]
    try:
        for owner in owners:
            owner.fill("t", {"kv": range(32)})

        def work(layer):
            peer = Peer(f"w{layer}", 1, serving(owners[layer]).endpoint())
            wanted = {"latent": [layer]}
            planner = make_planner(owners[layer].regions, target, peer.worker_id, wanted)
            for _ in range(20):
                backend.connect(peer)
                assert pull(backend, make_batch(planner, range(32), range(31, -1, -1))) is PullStatus.DONE
                backend.disconnect(peer)

        assert run_together([lambda layer=layer: work(layer) for layer in range(16)]) == []
        wrong = find_wrong(target, "t", range(32), range(31, -1, -1))
        assert {component for component, _, _ in wrong} == {"index_k"}
        assert len(wrong) == 8 * 32
    finally:
        backend.close()
        for one in (target, *owners):
            one.close()


def test_sixteen_threads_pull_from_one_peer_at_once(pool, backend):
    other = make_pool(3, 32)
    try:
        other.fill("t", {"kv": range(32)})
        peer = Peer("w0", 1, serving(other).endpoint())
        planner = make_planner(other.regions, pool)

        def work(first):
            backend.connect(peer)
            for _ in range(20):
                assert pull(backend, make_batch(planner, (first, first + 1), (first, first + 1))) is PullStatus.DONE

        assert run_together([lambda first=first: work(first) for first in range(0, 32, 2)]) == []
        assert find_wrong(pool, "t", range(32), range(32)) == []
    finally:
        other.close()


def test_regions_come_and_go_while_others_pull(pool, backend):
    other, spare = make_pool(3, 32), make_pool(3, 4)
    try:
        other.fill("t", {"kv": range(32)})
        peer = Peer("w0", 1, serving(other).endpoint())
        backend.connect(peer)
        planner = make_planner(other.regions, pool)

        def move():
            for _ in range(50):
                assert pull(backend, make_batch(planner, range(32), range(32))) is PullStatus.DONE

        def churn():
            for _ in range(200):
                for region in spare.regions:
                    backend.register(region)
                    backend.endpoint()
                    backend.deregister(region)

        assert run_together([churn, churn, move]) == []
    finally:
        other.close()
        spare.close()
