"""Owns the scenarios about bytes: which pages arrive, exactly, and which ranges are refused before one moves."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np

from pdlink.errors import BackendError, RegionError
from pdlink.testing.conformance.rig import (
    Rig,
    Skipped,
    check,
    check_pages,
    check_untouched,
    check_whole,
    damaged,
    make_batch,
    pull,
    refused,
    whole,
)
from pdlink.testing.conformance.setup import MemorySource
from pdlink.testing.pattern import SENTINEL, page_patterns
from pdlink.transfer.descriptors import PullBatch


def pages_arrive_exactly_and_nothing_else_is_written(rig: Rig) -> None:
    """Contiguous, scattered, single, first, last, no, all, and one page to several places."""
    owner = rig.owner(num_layers=3, num_pages=32, page_bytes=140)
    last = owner.spec.num_pages - 1
    cases: dict[str, tuple[list[int], list[int]]] = {
        "contiguous": (list(range(3, 19)), list(range(8, 24))),
        "scattered": ([7, 1, 30, 12, 2], [0, 29, 3, 14, 15]),
        "single": ([5], [9]),
        "first": ([0], [0]),
        "last": ([last], [last]),
        "no page": ([], []),
        "all": (list(range(last + 1)), list(range(last + 1))),
        "one source twice": ([4, 4], [1, 8]),
    }
    for source, destination in cases.values():
        pool = rig.pool(owner)
        backend = rig.backend(*pool.regions)
        backend.connect(owner.peer)
        pull(backend, make_batch(owner, pool, source, destination))
        check_pages(pool, source, destination)
        backend.close()
        pool.close()


def strided_regions_move_between_any_gaps(rig: Rig) -> None:
    """Pages apart on the owner's side, on the reader's, or on both."""
    for source_gap, gap in ((52, 0), (0, 20), (52, 20)):
        owner = rig.owner(num_layers=2, num_pages=24, page_bytes=140, gap=source_gap)
        pool = rig.pool(owner, gap=gap)
        backend = rig.backend(*pool.regions)
        backend.connect(owner.peer)
        pull(backend, whole(owner, pool))
        check_whole(owner, pool)


def a_slice_of_every_page_arrives_in_its_place(rig: Rig) -> None:
    """The middle of each page, as a rank pulls that needs some heads only: the rest of the page is not touched."""
    owner, pool, backend = rig.ready(num_layers=2, num_pages=24, page_bytes=4096)
    begin, end = 1024, 3072
    pages = list(range(24))
    batch = damaged(
        make_batch(owner, pool, pages, pages[::-1]),
        source_base=lambda base: base + begin,
        destination_base=lambda base: base + begin,
        page_bytes=lambda nbytes: nbytes * 0 + (end - begin),
    )
    pull(backend, batch)
    for region in pool.regions:
        found = pool.view(region.component, region.layer)
        wanted = page_patterns(owner.spec.transfer_id, region.component, region.layer, pages[::-1], 4096)
        check(np.array_equal(found[:, begin:end], wanted[:, begin:end]), f"layer {region.layer} has other bytes")
        check(np.all(found[:, :begin] == SENTINEL), f"layer {region.layer}: bytes before the slice were written")
        check(np.all(found[:, end:] == SENTINEL), f"layer {region.layer}: bytes after the slice were written")


def offsets_beyond_two_gigabytes_are_exact(rig: Rig) -> None:
    """The last page of each region lies more than 2^31 bytes behind its base, on both sides."""
    page_bytes, gap = 65536, (1 << 31) + 4096
    if rig.setup.memory is MemorySource.SHARED:
        need, facts = 2 * (gap + 2 * page_bytes), os.statvfs("/dev/shm")
        free = facts.f_bavail * facts.f_frsize if facts.f_blocks else need
        if free < need:
            raise Skipped(f"/dev/shm has {free >> 20} MiB free and two segments of this size need {need >> 20}")
    owner = rig.owner(num_layers=1, num_pages=2, page_bytes=page_bytes, gap=gap, sparse=True)
    pool = rig.pool(owner, gap=gap)
    backend = rig.backend(*pool.regions)
    backend.connect(owner.peer)
    pull(backend, whole(owner, pool))
    check_whole(owner, pool)


def thousands_of_descriptors_arrive(rig: Rig) -> None:
    """4,096 scattered pages of three layers at once."""
    owner, pool, backend = rig.ready(num_layers=3, num_pages=4096, page_bytes=512)
    order = np.random.default_rng(7).permutation(owner.spec.num_pages).tolist()
    batch = make_batch(owner, pool, range(owner.spec.num_pages), order)
    check(batch.num_descriptors > 10_000, f"only {batch.num_descriptors} descriptors were made")
    pull(backend, batch)
    check_pages(pool, range(owner.spec.num_pages), order)


def many_small_pulls_one_after_another_arrive(rig: Rig) -> None:
    """200 pulls of one page each over one connection."""
    owner, pool, backend = rig.ready(num_layers=1, num_pages=200, page_bytes=4096)
    for page in range(200):
        pull(backend, make_batch(owner, pool, [page], [199 - page]))
    check_whole(owner, pool)


def the_order_of_registration_does_not_matter(rig: Rig) -> None:
    """Regions of either side first to last or last to first, and destinations registered before or after connect."""
    for backwards in (False, True):
        owner = rig.owner(num_layers=3, num_pages=16, backwards=backwards)
        for connect_first in (False, True):
            pool = rig.pool(owner)
            backend = rig.backend()
            if connect_first:
                backend.connect(owner.peer)
            for region in pool.regions[:: -1 if connect_first else 1]:
                backend.register(region)
            if not connect_first:
                backend.connect(owner.peer)
            pull(backend, whole(owner, pool))
            check_whole(owner, pool)


def a_rank_that_owns_nothing_takes_part(rig: Rig) -> None:
    """No region of size 0 exists; such a rank is connected to and pulled from, and nothing moves."""
    owner = rig.owner(num_layers=0)
    pool = rig.pool(owner, num_layers=1)
    backend = rig.backend(*pool.regions)
    backend.connect(owner.peer)
    pull(backend, PullBatch(owner.peer.worker_id, ()))
    check_untouched(pool, "a rank that owns nothing was pulled from")


def source_ranges_outside_the_owners_regions_are_refused(rig: Rig) -> None:
    """A page past the end, one before the base, and an address far away: refused, and nothing moves."""
    owner, pool, backend = rig.ready(num_layers=2, num_pages=16)
    good = make_batch(owner, pool, [3, 4, 9], [1, 2, 3])
    far = 1 << 40
    for what, bad in {
        "a source page past the end": damaged(good, source=lambda pages: pages + 16),
        "a source page before the base": damaged(good, source=lambda pages: pages - 10),
        "a source address far away": damaged(good, source_base=lambda base: base + far),
        "a run that leaves the region": damaged(good, count=lambda count: count + 100),
        "a page longer than the rest of its region": damaged(good, page_bytes=lambda nbytes: nbytes * 16),
    }.items():
        refused(lambda bad=bad: backend.submit(bad), RegionError, what)  # type: ignore[misc]
        check_untouched(pool, f"{what} was refused")
    pull(backend, good)
    check_pages(pool, [3, 4, 9], [1, 2, 3])


def destination_ranges_outside_own_regions_are_refused(rig: Rig) -> None:
    """The same on the reader's side, where one region is not registered too, or not any more."""
    owner, pool, backend = rig.ready(num_layers=2, num_pages=16)
    good = make_batch(owner, pool, [3, 4, 9], [1, 2, 3])
    for what, bad in {
        "a destination page past the end": damaged(good, destination=lambda pages: pages + 16),
        "a destination page before the base": damaged(good, destination=lambda pages: pages - 10),
        "a destination address far away": damaged(good, destination_base=lambda base: base + (1 << 40)),
    }.items():
        refused(lambda bad=bad: backend.submit(bad), RegionError, what)  # type: ignore[misc]
        check_untouched(pool, f"{what} was refused")
    backend.deregister(pool.regions[1])
    refused(lambda: backend.submit(good), RegionError, "a destination that was deregistered")
    check_untouched(pool, "a destination that was deregistered was refused")
    backend.register(pool.regions[1])
    pull(backend, good)
    check_pages(pool, [3, 4, 9], [1, 2, 3])


def an_endpoint_that_makes_no_sense_is_refused(rig: Rig) -> None:
    """Empty, cut short or random bytes in place of an endpoint are an error of the backend, not of the process."""
    owner, pool, backend = rig.ready(num_layers=1, num_pages=4)
    noise = np.random.default_rng(1).bytes(300)
    for number, blob in enumerate((b"", owner.peer.endpoint[:-7], noise, b"{}")):
        stranger = replace(owner.peer, worker_id=f"x{number}", endpoint=blob)
        refused(lambda peer=stranger: backend.connect(peer), BackendError, f"endpoint {blob[:16]!r}")  # type: ignore[misc]
    pull(backend, whole(owner, pool))
    check_whole(owner, pool)


def a_link_that_was_idle_still_works(rig: Rig) -> None:
    """A pull, a pause, and another pull."""
    owner, pool, backend = rig.ready(num_layers=1, num_pages=64)
    pull(backend, make_batch(owner, pool, [1], [1]))
    time.sleep(rig.setup.idle_s)
    pull(backend, whole(owner, pool))
    check_whole(owner, pool)
