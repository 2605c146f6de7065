"""Which reader a pool uses, and what it says of it."""

from __future__ import annotations

import pytest

from pdlink.errors import BackendUnavailable
from pdlink.layout.regions import MemoryKind
from pdlink.memory.open_reader import host_number
from pdlink.memory.reader_choice import LinkCosts, RankFacts, ReaderKind, choose_reader, estimate_ms

HOST, CUDA = MemoryKind.HOST, MemoryKind.CUDA


def ranks(count: int) -> list[RankFacts]:
    return [RankFacts("one", reaches=frozenset(range(count)) - {rank}) for rank in range(count)]


def test_ranks_of_one_host_gather_for_themselves() -> None:
    choice = choose_reader(HOST, ranks(8), 788)
    assert choice.kind is ReaderKind.PEER
    assert "share one host" in choice.reason


@pytest.mark.parametrize(
    ("memory", "other", "words"),
    [
        (HOST, RankFacts("two"), "shard rank 1 is on another host"),
        (CUDA, RankFacts("two", reaches=frozenset({0})), "shard rank 1 is on another host"),
        (HOST, RankFacts("one", can_order=False), "the machine of shard rank 1"),
        (CUDA, RankFacts("one"), "the device of shard rank 1 cannot map memory of shard rank 0's"),
    ],
)
def test_what_keeps_ranks_from_gathering_is_said(memory: MemoryKind, other: RankFacts, words: str) -> None:
    facts = [ranks(2)[0], other]
    choice = choose_reader(memory, facts, 788)
    assert choice.kind is ReaderKind.BROADCAST
    assert words in choice.reason
    with pytest.raises(BackendUnavailable, match=words):
        choose_reader(memory, facts, 788, wanted=ReaderKind.PEER)
    assert choose_reader(memory, facts, 788, wanted=ReaderKind.BROADCAST).kind is ReaderKind.BROADCAST


def test_an_order_of_stores_matters_to_host_boards_only() -> None:
    facts = [RankFacts("one", False, one.reaches) for one in ranks(2)]
    assert choose_reader(CUDA, facts, 788).kind is ReaderKind.PEER


def test_on_devices_many_readers_of_one_owner_make_broadcasts_cheaper() -> None:
    two, eight = (choose_reader(CUDA, ranks(count), 788) for count in (2, 8))
    assert two.kind is ReaderKind.PEER
    assert eight.kind is ReaderKind.BROADCAST
    for choice, count in ((two, 2), (eight, 8)):
        peer, broadcast = estimate_ms(count, 788 * 32768)
        assert f"{peer:.3f} ms by peer" in choice.reason
        assert f"{broadcast:.3f} ms by broadcast" in choice.reason
    # With little to move the fixed cost decides, however many ranks there are.
    assert choose_reader(CUDA, ranks(8), 788, live_tokens=256).kind is ReaderKind.PEER
    slow = LinkCosts(peer_gb_s=10.0)
    assert choose_reader(CUDA, ranks(2), 788, costs=slow).kind is ReaderKind.BROADCAST


def test_what_is_asked_for_is_taken() -> None:
    choice = choose_reader(CUDA, ranks(8), 788, wanted=ReaderKind.PEER)
    assert (choice.kind, choice.reason) == (ReaderKind.PEER, "peer is asked for")


def test_the_number_of_a_host_is_steady() -> None:
    assert host_number() == host_number() > 0
