"""Readers that do not fit a prefill rank are refused with both values, and end only what is theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange
from pdlink.control.frames import (
    Failed,
    Ready,
    Refused,
    Subscribe,
    Subscribed,
)
from pdlink.layout.components import CacheLayout, index_k, latent
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.peer import Desk, desk
from tests.prefill.rig import INCARNATION, SOLO, subscribe

OTHER = ReaderSet("other")


@pytest.fixture
def at() -> Iterator[Desk]:
    with desk() as made:
        yield made


def mismatched(readers: ReaderSet = SOLO) -> Subscribe:
    """What a decode side with rows of 1,312 bytes sends."""
    parts = (latent(64, range(4), bytes_per_token=1312), index_k(64, range(4)))
    theirs = fingerprint(CacheLayout(4, parts))
    return dataclasses.replace(subscribe(readers), fingerprint_digest=theirs.digest, fingerprint=theirs)


@pytest.mark.parametrize("when", ["open", "later"])
def test_a_mismatch_fails_the_open_request_or_the_one_that_opens_next_with_both_values(at: Desk, when: str) -> None:
    peer = at.peer()
    sender = at.worker.open("t") if when == "open" else None
    answers = peer.ask(1, mismatched())
    sender = sender or at.worker.open("t")
    assert sender.poll() is SenderState.ABORTED
    for failure in [sender.failure, *(one.cause for one in answers if isinstance(one, Refused))]:
        assert failure
        assert failure.reason is FailureReason.INCOMPATIBLE
        assert "83968" in failure.text
        assert "41984" in failure.text
    peer.ask(2, subscribe(SOLO), "good")
    at.worker.open("good").publish([4], last=True)
    assert len(peer.answers(Ready, 2)) == 1


def test_after_a_mismatch_the_id_is_free_for_another_set(at: Desk) -> None:
    peer = at.peer()
    at.worker.open("t")
    peer.ask(1, mismatched(OTHER))
    assert peer.ask(2, subscribe(SOLO)) == [Subscribed(INCARNATION, 0, False)]
    at.worker.open("t").publish([4], last=True)
    assert len(peer.answers(Ready, 2)) == 1


def test_a_mismatch_of_another_set_does_not_end_a_claimed_request(at: Desk) -> None:
    peer = at.peer()
    sender = at.worker.open("t")
    peer.ask(1, subscribe(SOLO))
    assert [type(one) for one in peer.ask(2, mismatched(OTHER))] == [Refused]
    assert sender.poll() is SenderState.OPEN


def test_a_mismatch_of_another_set_does_not_end_an_early_one(at: Desk) -> None:
    peer = at.peer()
    peer.ask(1, subscribe(SOLO))
    peer.ask(2, mismatched(OTHER))
    assert at.worker.open("t").poll() is SenderState.OPEN


def test_a_mismatch_of_one_reader_is_not_forgotten_when_another_of_its_set_fits(at: Desk) -> None:
    peer = at.peer()
    peer.ask(1, mismatched(ReaderSet("dec", 0, 2)))
    peer.ask(2, subscribe(ReaderSet("dec", 1, 2)))
    sender = at.worker.open("t")
    assert sender.failure
    assert sender.failure.reason is FailureReason.INCOMPATIBLE
    assert [one.cause.reason for one in peer.answers(Failed, 2)] == [FailureReason.INCOMPATIBLE]


def test_a_protocol_without_a_common_version_is_refused_before_anything_else(at: Desk) -> None:
    future = ProtocolRange(PROTOCOL.greatest + 1, PROTOCOL.greatest + 1)
    (refusal,) = at.peer().ask(1, dataclasses.replace(mismatched(), protocol=future))
    assert isinstance(refusal, Refused)
    assert [one.field for one in refusal.cause.mismatches] == ["protocol"]


def test_a_subscribe_that_means_another_incarnation_is_stale_and_ends_nothing(at: Desk) -> None:
    sender = at.worker.open("t")
    (refusal,) = at.peer().ask(1, dataclasses.replace(subscribe(SOLO), incarnation=INCARNATION - 1))
    assert isinstance(refusal, Refused)
    assert refusal.cause.reason is FailureReason.STALE
    assert sender.poll() is SenderState.OPEN
