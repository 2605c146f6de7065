"""What a prefill rank digests for readers that take parts of pages: when, of what, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pdlink.control.frames import PageSpan, Ready, Refused, Subscribed
from pdlink.errors import BackendError
from pdlink.layout import CacheLayout, Part, ReaderSet, Region
from pdlink.layout.components import heads, latent
from pdlink.layout.page_slices import held_runs
from pdlink.layout.parts import WHOLE
from pdlink.prefill import part_digests
from pdlink.prefill.chunk import RankFacts
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestKind, Digests, Runs, page_digests
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.rig import Rig, facts, subscribe

PAGE_SIZE, NUM_PAGES, HEADS = 4, 6, 4
LAYOUT = CacheLayout(
    2,
    (
        latent(PAGE_SIZE, range(2), bytes_per_token=3),
        heads("k", PAGE_SIZE, range(2), num_heads=HEADS, head_bytes=2, dtype="x", total_heads=HEADS),
    ),
)
LOW, HIGH, ODD = {"k": Part(0, 2)}, {"k": Part(1, 2)}, {"k": Part(0, 1, 1, 2)}
PAIR = [ReaderSet("dec", index, 2) for index in range(2)]
PAGES = [4, 1, 3]


class Memory:
    """A rank's pages, and a digester of them that keeps count of what it was asked."""

    def __init__(self) -> None:
        self.rows = {
            (one.name, layer): self._page_rows(one.page_bytes, layer)
            for one in LAYOUT.components
            for layer in one.layers
        }
        self.asked: list[bool] = []
        """Whether each call was of packed pages."""
        self.error: BackendError | None = None
        self.on_digest: Callable[[], None] | None = None

    @staticmethod
    def _page_rows(nbytes: int, layer: int) -> np.ndarray:
        return np.random.default_rng(layer + nbytes).integers(0, 256, (NUM_PAGES, nbytes), dtype=np.uint8)

    def regions(self) -> dict[tuple[str, int], Region]:
        return {
            (name, layer): Region(name, layer, rows.ctypes.data, rows.shape[1], rows.shape[1], NUM_PAGES)
            for (name, layer), rows in self.rows.items()
        }

    def digest(
        self, kind: DigestKind, regions: Sequence[Region], pages: Int64Array, *, runs: Sequence[Runs | None] = ()
    ) -> Digests:
        if self.error:
            raise self.error
        self.asked.append(bool(runs))
        if self.on_digest:
            self.on_digest()
        return page_digests(kind, regions, pages, runs=runs)

    def wanted(self, parts: dict[str, Part], pages: Sequence[int]) -> np.ndarray:
        """By hand: rows of k and of latent by name and layer, of what a reader of `parts` takes."""
        found = []
        for (name, _), rows in sorted(self.rows.items()):
            component = LAYOUT.component(name)
            if name in parts:
                part = parts[name]
                shaped = rows.reshape(NUM_PAGES, PAGE_SIZE, HEADS, 2)
                mine = part.heads(HEADS)
                taken = shaped[:, part.token_index :: part.token_count, mine.start : mine.stop].reshape(NUM_PAGES, -1)
            else:
                taken = rows
            taken = np.ascontiguousarray(taken)
            region = Region(name, 0, taken.ctypes.data, taken.shape[1], taken.shape[1], NUM_PAGES)
            found.append(page_digests(DigestKind.XXH3_64, [region], np.array(pages, dtype=np.int64))[0])
            assert component.page_bytes == rows.shape[1]
        return np.stack(found)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def rank(memory: Memory) -> RankFacts:
    owned = {one.name: one.layers for one in LAYOUT.components}
    return replace(
        facts(),
        layout=LAYOUT,
        owned=owned,
        regions=memory.regions(),
        digest_kind=DigestKind.XXH3_64,
        digest=memory.digest,
        parts=dict.fromkeys(owned, WHOLE),
    )


def ask(rig: Rig, attempt: int, parts: dict[str, Part], readers: ReaderSet) -> None:
    body = replace(subscribe(readers, spans=(PageSpan("kv", 0, 3),)), parts=parts)
    rig.sender.on_subscribe(b"route%d" % attempt, attempt, body)


def told(rig: Rig, attempt: int) -> np.ndarray:
    """The digests that a reader was told, of all publications together."""
    tables = [one.digests for one in rig.take(Ready, attempt)]
    assert all(tables)
    return np.concatenate([one.values for one in tables if one], axis=1)


@pytest.mark.parametrize("parts", [LOW, HIGH, ODD])
def test_a_reader_that_asks_before_is_told_digests_of_what_it_takes(rank: RankFacts, memory: Memory, parts) -> None:
    rig = Rig(rank)
    ask(rig, 1, parts, PAIR[0])
    ask(rig, 2, {}, PAIR[1])
    rig.sender.publish(PAGES, last=True)
    assert rig.waiting == []
    assert np.array_equal(told(rig, 1), memory.wanted(parts, PAGES))
    assert np.array_equal(told(rig, 2), memory.wanted({}, PAGES))


def test_a_reader_that_asks_later_is_told_once_its_digests_are_made_and_others_do_not_wait(
    rank: RankFacts, memory: Memory
) -> None:
    rig = Rig(rank)
    rig.sender.publish(PAGES[:1])
    rig.sender.publish(PAGES[1:], last=True)
    ask(rig, 1, HIGH, PAIR[0])
    assert rig.take(Subscribed, 1)
    assert rig.take(Ready) == []
    assert rig.waiting == [rig.sender]
    ask(rig, 2, {}, PAIR[1])
    assert np.array_equal(told(rig, 2), memory.wanted({}, PAGES))
    assert not rig.sender.look_ready()
    assert np.array_equal(told(rig, 1), memory.wanted(HIGH, PAGES))
    memory.asked.clear()
    ask(rig, 1, HIGH, PAIR[0])  # again: its first answer was lost
    assert np.array_equal(told(rig, 1), memory.wanted(HIGH, PAGES))
    assert memory.asked == []


def test_readers_of_the_same_parts_share_digests_and_whole_pages_are_digested_again_once(
    rank: RankFacts, memory: Memory
) -> None:
    rig = Rig(rank)
    rig.sender.publish(PAGES, last=True)
    memory.asked.clear()
    for index in range(4):
        ask(rig, 1 + index, HIGH if index % 2 else LOW, ReaderSet("dec", index, 4))
    assert not rig.sender.look_ready()
    assert sorted(memory.asked) == [False, True, True]
    for index in range(4):
        assert np.array_equal(told(rig, 1 + index), memory.wanted(HIGH if index % 2 else LOW, PAGES))


def test_what_was_written_before_a_reader_of_parts_came_fails_the_request(rank: RankFacts, memory: Memory) -> None:
    rig = Rig(rank)
    rig.sender.publish(PAGES, last=True)
    memory.rows["k", 1][PAGES[2], 0] ^= 1  # the first head, which the reader does not even take
    ask(rig, 1, HIGH, PAIR[0])
    assert not rig.sender.look_ready()
    assert rig.take(Ready) == []
    assert rig.sender.poll() is SenderState.ABORTED
    assert rig.sender.failure
    assert rig.sender.failure.reason is FailureReason.DIGEST
    assert "'k' layer 1, page 3 is not what was published" in rig.sender.failure.text


def test_many_pages_are_digested_in_steps_and_no_further_than_they_are_wanted(
    rank: RankFacts, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_digests, "STEP_BYTES", 1)  # a page at a time
    rig = Rig(rank)
    rig.sender.publish(PAGES, last=True)
    ask(rig, 1, HIGH, PAIR[0])
    memory.asked.clear()
    assert not rig.sender.look_ready()
    assert memory.asked == [True, False] * len(PAGES)
    assert np.array_equal(told(rig, 1), memory.wanted(HIGH, PAGES))
    memory.on_digest = rig.sender.abort
    ask(rig, 2, LOW, PAIR[1])
    memory.asked.clear()
    assert not rig.sender.look_ready()
    assert memory.asked == [True, False]
    assert rig.take(Ready) == []


def test_a_request_that_ends_meanwhile_tells_nobody(rank: RankFacts) -> None:
    rig = Rig(rank)
    rig.sender.publish(PAGES, last=True)
    ask(rig, 1, HIGH, PAIR[0])
    rig.sender.withdraw(PAGES)
    assert not rig.sender.look_ready()
    assert rig.take(Ready) == []


def test_pages_that_cannot_be_read_later_fail_the_request(rank: RankFacts, memory: Memory) -> None:
    rig = Rig(rank)
    rig.sender.publish(PAGES, last=True)
    memory.error = BackendError("device 0 is gone")
    ask(rig, 1, HIGH, PAIR[0])
    assert not rig.sender.look_ready()
    assert rig.sender.failure
    assert "could not be digested: device 0 is gone" in rig.sender.failure.text


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"v": Part(0, 2)}, "no component 'v'"),
        ({"latent": Part(0, 2)}, "'latent' has 1 heads, not 2 ranges"),
        ({"k": Part(0, 1, 0, 3)}, "dcp=3 does not divide page_size=4"),
    ],
)
def test_parts_that_are_not_to_be_had_are_refused(rank: RankFacts, parts, words: str) -> None:
    rig = Rig(rank)
    ask(rig, 1, parts, PAIR[0])
    (said,) = rig.take(Refused)
    assert words in said.cause.text


def test_a_rank_that_makes_no_digests_takes_no_notice_of_parts(rank: RankFacts, memory: Memory) -> None:
    rig = Rig(replace(rank, digest_kind=None))
    rig.sender.publish(PAGES, last=True)
    ask(rig, 1, HIGH, PAIR[0])
    (said,) = rig.take(Ready)
    assert said.digests is None
    assert memory.asked == []


def test_the_parts_of_an_attempt_stay_what_it_first_said(rank: RankFacts, memory: Memory) -> None:
    rig = Rig(rank)
    ask(rig, 1, HIGH, PAIR[0])
    ask(rig, 1, LOW, PAIR[0])
    rig.sender.publish(PAGES, last=True)
    assert np.array_equal(told(rig, 1), memory.wanted(HIGH, PAGES))


def test_a_packed_page_has_the_runs_that_staging_packs() -> None:
    offsets, sizes = held_runs(LAYOUT.component("k"), WHOLE, HIGH["k"])
    assert offsets.tolist() == [4, 12, 20, 28]
    assert sizes.tolist() == [4] * 4
