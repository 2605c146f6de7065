"""Owns the scenarios about a backend's own life: cancelling, fencing, closing, several instances, threads, the end."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from pdlink.backends.base import PullStatus, Settled
from pdlink.errors import BackendError
from pdlink.layout.regions import Region
from pdlink.testing.conformance.owner import Owner
from pdlink.testing.conformance.pool import hand_out_again
from pdlink.testing.conformance.rig import (
    PULL_TIMEOUT_S,
    Rig,
    check,
    check_pages,
    check_untouched,
    check_whole,
    check_works_again,
    make_batch,
    pull,
    pull_part,
    refused,
    whole,
)

JOIN_TIMEOUT_S = 40.0
PULLS_PER_THREAD = 10


def a_cancelled_pull_is_quiet_when_it_says_so(rig: Rig) -> None:
    """Settle in the middle of a pull from a healthy peer, until it says QUIET; then nothing lands."""
    owner, pool, backend = rig.ready(**rig.big)
    handle = pull_part(backend, whole(owner, pool), pool)
    give_up = time.monotonic() + PULL_TIMEOUT_S
    while backend.settle(handle) is Settled.NOT_QUIET:
        check(time.monotonic() < give_up, "a cancelled pull from a healthy peer does not settle")
        time.sleep(1e-3)
    hand_out_again(pool)
    time.sleep(rig.setup.watch_s)
    check_untouched(pool, "a cancelled pull was said to be quiet")
    check(backend.settle(handle) is Settled.QUIET, "a quiet pull does not stay quiet")
    pull(backend, whole(owner, pool))
    check_whole(owner, pool)


def a_pull_that_is_done_settles_at_once_and_stays_done(rig: Rig) -> None:
    owner, pool, backend = rig.ready(num_layers=1, num_pages=16)
    handle = backend.submit(whole(owner, pool))
    give_up = time.monotonic() + PULL_TIMEOUT_S
    while backend.poll(handle) is PullStatus.PENDING:
        check(time.monotonic() < give_up, "a small pull does not end")
    check(backend.settle(handle) is Settled.QUIET, "a pull that is done is not quiet")
    check(backend.poll(handle) is PullStatus.DONE, "a pull that was done is something else after settle")
    check(handle.error is None, f"a pull that was done has an error: {handle.error}")
    check_whole(owner, pool)


def a_fence_in_the_middle_of_a_pull_makes_it_quiet(rig: Rig) -> None:
    """Fencing a healthy peer: nothing lands, the peer must be connected again, and then works."""
    owner, pool, backend = rig.ready(**rig.big)
    handle = pull_part(backend, whole(owner, pool), pool)
    check(owner.peer.worker_id in backend.fence(owner.peer), "a fence does not name the peer that it breaks")
    hand_out_again(pool)
    time.sleep(rig.setup.watch_s)
    check_untouched(pool, "the peer was fenced")
    check(backend.settle(handle) is Settled.QUIET, "a pull of a fenced peer is not quiet")
    refused(lambda: backend.submit(whole(owner, pool)), BackendError, "a pull from a fenced peer")
    check_works_again(rig, owner, pool, backend, "fenced it in the middle of a pull")


def connecting_again_is_cheap_and_disconnecting_twice_is_fine(rig: Rig) -> None:
    owner, pool, backend = rig.ready(num_layers=1, num_pages=16)
    backend.connect(owner.peer)
    pull(backend, make_batch(owner, pool, [1], [1]))
    backend.disconnect(owner.peer)
    backend.disconnect(owner.peer)
    refused(lambda: backend.submit(whole(owner, pool)), BackendError, "a pull from a peer that was disconnected")
    backend.connect(owner.peer)
    pull(backend, whole(owner, pool))
    check_whole(owner, pool)


def closing_twice_is_fine_and_nothing_works_afterwards(rig: Rig) -> None:
    owner, pool, backend = rig.ready(num_layers=1, num_pages=16)
    pull(backend, whole(owner, pool))
    backend.close()
    backend.close()
    refused(lambda: backend.submit(whole(owner, pool)), BackendError, "a pull over a backend that is closed")


def closing_in_the_middle_of_a_pull_makes_it_quiet(rig: Rig) -> None:
    owner, pool, backend = rig.ready(**rig.big)
    pull_part(backend, whole(owner, pool), pool)
    backend.close()
    hand_out_again(pool)
    time.sleep(rig.setup.watch_s)
    check_untouched(pool, "the backend was closed")


def two_instances_in_one_process_do_not_disturb_each_other(rig: Rig) -> None:
    """Both pull from the same owner, one after the other and at once; then one is closed."""
    owner, pool, backend = rig.ready(num_layers=2, num_pages=64)
    second_pool = rig.pool(owner)
    second = rig.backend(*second_pool.regions)
    second.connect(owner.peer)
    both = ((backend, pool), (second, second_pool))
    handles = [(one, one.submit(whole(owner, its))) for one, its in both]
    give_up = time.monotonic() + PULL_TIMEOUT_S
    while any(one.poll(handle) is PullStatus.PENDING for one, handle in handles):
        check(time.monotonic() < give_up, "two pulls at once over two instances do not end")
    for _, its in both:
        check_whole(owner, its)
    backend.close()
    hand_out_again(second_pool)
    pull(second, whole(owner, second_pool))
    check_whole(owner, second_pool)


def an_instance_pulls_from_another_of_its_own_process(rig: Rig) -> None:
    """A prefill and a decode rank may share a process."""
    owner, pool, backend = rig.ready(num_layers=2, num_pages=32)
    pull(backend, whole(owner, pool))
    server = rig.backend(*pool.regions)
    target = rig.pool(owner)
    reader = rig.backend(*target.regions)
    peer = replace(owner.peer, endpoint=server.endpoint())
    server.serve("owner", 1)
    reader.connect(peer)
    local = _as_owner(owner, pool.regions)
    pull(reader, whole(local, target))
    server.serve("owner", 0)
    # Pulled twice, last page first each time: the pages are back in their places.
    pages = range(owner.spec.num_pages)
    check_pages(target, pages, pages)


def sixteen_threads_pull_at_once(rig: Rig) -> None:
    """A thread for each of several peers, over one backend; every page is checked."""
    num_peers = rig.setup.num_thread_peers
    owner = rig.owner(num_layers=1, num_pages=64, num_ranks=num_peers)
    pools = [rig.pool(owner) for _ in range(num_peers)]
    backend = rig.backend(*(region for pool in pools for region in pool.regions))
    errors: list[str] = []

    def work(rank: int) -> None:
        try:
            backend.connect(owner.peers[rank])
            for _ in range(PULLS_PER_THREAD):
                hand_out_again(pools[rank])
                pull(backend, whole(owner, pools[rank], rank))
                check_whole(owner, pools[rank])
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the scenario reports it
            errors.append(f"rank {rank}: {type(error).__name__}: {error}")

    _run_together([lambda rank=rank: work(rank) for rank in range(num_peers)])  # type: ignore[misc]
    check(not errors, "; ".join(errors))


def a_process_that_used_it_ends_with_its_own_exit_code(rig: Rig) -> None:
    """0 for one that ends well and 7 for one that says so: no library decides."""
    for code in (0, 7):
        owner = rig.owner(num_layers=1, num_pages=16, exit_code=code)
        pool = rig.pool(owner)
        backend = rig.backend(*pool.regions)
        backend.connect(owner.peer)
        pull(backend, whole(owner, pool))
        ended = owner.process.close()
        check(ended == code, f"a process that wanted to end with code {code} ended with {ended}")
        check_whole(owner, pool)
        backend.close()


def _run_together(bodies: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + JOIN_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
    check(not any(thread.is_alive() for thread in threads), f"threads hang after {JOIN_TIMEOUT_S:g} s")


def _as_owner(owner: Owner, regions: tuple[Region, ...]) -> Owner:
    """The owner as if it held `regions`, which lie in this process."""
    made = copy.copy(owner)
    made.rank_regions = (regions,)
    return made
