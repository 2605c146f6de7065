"""Owns the scenarios about peers that misbehave: killed, stopped, restarted, taking memory back.

What each one proves is the memory rule of `pdlink.backends.base`: a pull that says DONE is exact, and once a pull is
quiet, nothing lands in its pages any more. "Quiet" is proved by handing the pages out again and watching them.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus
from pdlink.errors import BackendError
from pdlink.testing.conformance.owner import Owner
from pdlink.testing.conformance.pool import hand_out_again
from pdlink.testing.conformance.rig import (
    Rig,
    check,
    check_untouched,
    check_whole,
    check_works_again,
    pull,
    pull_part,
    quieten,
    wait,
    whole,
)
from pdlink.testing.pattern import PatternPool

PROGRESS_S = 1.0


def a_peer_killed_in_the_middle_of_a_pull_leaves_exact_or_quiet_pages(rig: Rig) -> None:
    """kill -9 of the owner."""
    owner, pool, backend = rig.ready(**rig.big)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.process.kill()
    _ends_by_the_rule(rig, owner, pool, backend, handle)


def a_stopped_peer_that_never_resumes_costs_a_bounded_time(rig: Rig) -> None:
    """SIGSTOP of the owner; the fence is what ends the pull."""
    owner, pool, backend = rig.ready(**rig.big)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.process.stop()
    _ends_by_the_rule(rig, owner, pool, backend, handle)
    owner.process.kill()


def a_stopped_peer_that_resumes_after_the_fence_writes_nothing(rig: Rig) -> None:
    """SIGSTOP, fence, hand the pages out, SIGCONT: what was under way must not land in pages of others."""
    owner, pool, backend = rig.ready(**rig.big)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.process.stop()
    if not _ends_by_the_rule(rig, owner, pool, backend, handle):
        return
    owner.process.resume()
    _stays_quiet(rig, pool, "the peer has resumed after the fence")
    check_works_again(rig, owner, pool, backend, "went while it was frozen")


def a_stopped_peer_that_is_killed_after_the_fence_writes_nothing(rig: Rig) -> None:
    """SIGSTOP, fence, hand the pages out, SIGKILL."""
    owner, pool, backend = rig.ready(**rig.big)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.process.stop()
    if _ends_by_the_rule(rig, owner, pool, backend, handle):
        owner.process.kill()
        _stays_quiet(rig, pool, "the peer was killed after the fence")


def a_peer_that_was_stopped_before_a_pull_costs_a_bounded_time(rig: Rig) -> None:
    """A connected peer is frozen, then pulled from; when it resumes afterwards, nothing lands. Bytes that are said to
    move inside `poll` need no peer to move."""
    owner, pool, backend = rig.ready(**rig.big)
    pull(backend, whole(owner, pool))
    hand_out_again(pool)
    owner.process.stop()
    handle = backend.submit(whole(owner, pool))
    if backend.capabilities.works_in_poll:
        status = wait(backend, handle)
        text = (
            "works_in_poll is said of bytes that do not move without their owner: small pulls would hold up all others"
        )
        check(status is PullStatus.DONE, f"{text} ({status}, {handle.error})")
    if _ends_by_the_rule(rig, owner, pool, backend, handle):
        owner.process.resume()
        _stays_quiet(rig, pool, "the peer has resumed after the fence")


def a_peer_that_restarts_under_its_name_is_pulled_from_again(rig: Rig) -> None:
    """The old process is killed; the new one has the same name, a newer incarnation and other bytes."""
    first, pool, backend = rig.ready(num_layers=2, num_pages=32, transfer_id="first")
    pull(backend, whole(first, pool))
    check_whole(first, pool)
    first.process.kill()
    for life in ("second", "third"):
        owner = rig.owner(num_layers=2, num_pages=32, transfer_id=life)
        check(owner.peer.worker_id == first.peer.worker_id, "the rig gives a restarted peer another name")
        backend.connect(owner.peer)
        pull(backend, whole(owner, pool))
        check_whole(owner, pool)
        owner.process.kill()


def a_dead_peer_is_an_error_in_bounded_time(rig: Rig) -> None:
    """Connecting to, or pulling from, a process that has gone."""
    owner = rig.owner(num_layers=1, num_pages=16)
    pool = rig.pool(owner)
    backend = rig.backend(*pool.regions)
    owner.process.kill()
    try:
        backend.connect(owner.peer)
        handle = backend.submit(whole(owner, pool))
    except BackendError:
        check_untouched(pool, "a dead peer was refused")
        return
    _ends_by_the_rule(rig, owner, pool, backend, handle)


def other_peers_go_on_when_one_is_fenced(rig: Rig) -> None:
    """Two owners; one is frozen and fenced, the other is pulled from before, meanwhile and after."""
    frozen, pool, backend = rig.ready(**rig.big)
    healthy = rig.owner(num_layers=1, num_pages=64)
    other = rig.pool(healthy)
    for region in other.regions:
        backend.register(region)
    peer = replace(healthy.peer, worker_id="healthy")
    backend.connect(peer)
    batch = replace(whole(healthy, other), worker_id="healthy")
    pull(backend, batch)
    handle = pull_part(backend, whole(frozen, pool), pool)
    frozen.process.stop()
    pull(backend, batch)
    broken = _quieten(rig, backend, handle, frozen.peer)
    if "healthy" in broken:
        backend.connect(peer)
    pull(backend, batch)
    check_whole(healthy, other)
    frozen.process.kill()


def an_owner_that_deregisters_under_a_pull_leaves_exact_or_quiet_pages(rig: Rig) -> None:
    """The owner takes its regions back while they are read; their memory stays as it is."""
    owner, pool, backend = rig.ready(**rig.big)
    handle = pull_part(backend, whole(owner, pool), pool)
    owner.deregister()
    _ends_by_the_rule(rig, owner, pool, backend, handle)


# --- the rule -------------------------------------------------------------------------------------


def _ends_by_the_rule(rig: Rig, owner: Owner, pool: PatternPool, backend: Backend, handle: PullHandle) -> bool:
    """The pull is DONE and exact, or it is made quiet and stays so. Returns whether it was the second."""
    status = wait(backend, handle, PROGRESS_S)
    if status is PullStatus.DONE:
        check_whole(owner, pool)
        return False
    check(status is not PullStatus.FAILED or handle.error is not None, "a pull that FAILED has no error")
    _quieten(rig, backend, handle, owner.peer)
    hand_out_again(pool)
    _stays_quiet(rig, pool, "the pull was said to be quiet")
    return True


def _quieten(rig: Rig, backend: Backend, handle: PullHandle, peer: Peer) -> tuple[str, ...]:
    return quieten(backend, handle, peer, rig.setup.fence_timeout_s)


def _stays_quiet(rig: Rig, pool: PatternPool, why: str) -> None:
    until = time.monotonic() + rig.setup.watch_s
    while time.monotonic() < until:
        time.sleep(min(0.25, rig.setup.watch_s))
    check_untouched(pool, why)
