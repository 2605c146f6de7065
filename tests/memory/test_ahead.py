"""Fetches ahead of the reads: in order, one at a time, and never counted before they were taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pdlink.errors import DeadlineExceeded, IntegrityError
from pdlink.memory.ahead import Ahead
from pdlink.memory.scratch_ring import ScratchRing

A, B, C = ("latent", 0), ("index_k", 0), ("latent", 1)


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    one = Ahead(20.0)
    yield one
    one.close()
    one.close()


def test_fetches_run_in_order_and_are_taken_once(ahead: Ahead) -> None:
    ran: list[str] = []
    ahead.start([A, B, C])
    for name in "abc":
        ahead.submit(lambda name=name: ran.append(name))  # type: ignore[misc]
    assert ahead.next is None
    assert ahead.under_way("latent") == [0, 1]
    assert ahead.take(C)
    assert ran == ["a", "b", "c"]
    assert not ahead.take(C)
    assert ahead.under_way("latent") == [0]


def test_nothing_is_fetched_after_a_failure_until_the_next_forward(ahead: Ahead) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise IntegrityError("it is wrong")

    ahead.start([A, B, C])
    ahead.submit(fail)
    ahead.submit(lambda: ran.append("b"))
    for key in (B, A):
        with pytest.raises(IntegrityError, match="it is wrong"):
            ahead.take(key)
    assert ran == []
    ahead.start([A])
    ahead.submit(lambda: ran.append("a"))
    assert ahead.take(A)
    assert ran == ["a"]


def test_what_is_no_error_of_ours_ends_the_forward_too(ahead: Ahead, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    ahead.start([A])
    ahead.submit(fail)
    with pytest.raises(IntegrityError, match="'latent' layer 0 broke: a bug"):
        ahead.take(A)
    assert "a bug" in caplog.text


def test_a_stop_waits_for_what_runs_and_tells_what_was_fetched_for_nothing(ahead: Ahead) -> None:
    let_go, ran = threading.Event(), threading.Event()

    def fetch() -> None:
        assert let_go.wait(60.0)
        ran.set()

    ahead.start([A, B])
    ahead.submit(fetch)
    threading.Timer(0.05, let_go.set).start()
    assert ahead.stop() == [A]
    assert ran.is_set()
    assert ahead.next is None


def test_a_fetch_without_an_end_is_never_forgotten() -> None:
    ahead, let_go = Ahead(0.05), threading.Event()
    ahead.start([A])
    ahead.submit(lambda: let_go.wait(60.0) and None)
    for call in (ahead.drain, ahead.stop, lambda: ahead.start([B])):
        with pytest.raises(DeadlineExceeded):
            call()
    let_go.set()
    assert ahead._jobs[A].done.wait(60.0)
    assert ahead.stop() == [A]
    ahead.close()


def test_the_reading_thread_fetches_the_next_itself_and_gives_up_what_was_skipped(ahead: Ahead) -> None:
    ahead.start([A, B, C])
    ahead.submit(lambda: None)
    assert ahead.pass_by(C) is None
    assert ahead.pass_by(B) == []
    assert ahead.pass_by(C) == [0]
    assert not ahead.take(A)


def test_layers_to_keep_keep_their_slots() -> None:
    ring = ScratchRing(3)
    for layer in (0, 1, 2):
        ring.claim(layer)
        ring.fill(layer)
    ring.pin(2)
    ring.claim(5, keep=[0])
    assert [layer for _, layer, _ in ring.held()] == [0, 5, 2]
