"""What the peer reader is made of, in one process: epochs, boards, runs of pages and mapped layers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdlink.errors import BackendUnavailable, DeadlineExceeded, IntegrityError, LimitReached, PeerGone, RegionError
from pdlink.layout import CacheLayout
from pdlink.layout.components import index_k, latent
from pdlink.memory import peer_board
from pdlink.memory.epochs import CHANGES_PER_FORWARD, EpochCursor, begin_of, end_of
from pdlink.memory.forward import LivePages
from pdlink.memory.lockstep import Step, StepKind
from pdlink.memory.owned_regions import OwnedRegions
from pdlink.memory.peer_board import PeerBoards
from pdlink.memory.peer_regions import MappedLayers, describe_regions, page_runs, read_regions

LAYOUT = CacheLayout(3, (latent(64, range(3), bytes_per_token=656), index_k(64, (0, 2))))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_epochs_only_grow_and_say_which_forward_they_are_of(changes: list[int]) -> None:
    cursor, seen = EpochCursor(), [end_of(0)]
    for forward, count in enumerate(changes, 1):
        assert cursor.before_writes == seen[-1], "between forwards, a write waits for all reads of the one before"
        seen.append(cursor.begin(forward))
        for _ in range(count):
            assert cursor.before_writes == end_of(forward - 1)
            seen.append(cursor.change(forward))
            assert cursor.forward == forward
        assert cursor.num_changes == count
        seen.append(cursor.end(forward))
        assert cursor.forward == forward
    assert seen == sorted(set(seen))


def test_a_forward_has_only_so_many_epochs() -> None:
    cursor = EpochCursor()
    cursor.begin(4)
    cursor.epoch += CHANGES_PER_FORWARD - 2
    with pytest.raises(LimitReached, match="forward 4"):
        cursor.change(4)
    assert cursor.epoch < end_of(4) < begin_of(5)


@pytest.fixture
def boards() -> Iterator[list[PeerBoards]]:
    """Three ranks' views of each other, with global ranks 4, 6 and 5."""
    every = [PeerBoards(rank, (4, 6, 5), f"of {rank}".encode(), timeout_s=0.2) for rank in range(3)]
    for one in every:
        one.connect([(other.name, other.nbytes) for other in every])
    yield every
    for one in every:
        one.close()
        one.close()


def test_each_rank_sees_what_the_others_show(boards: list[PeerBoards]) -> None:
    assert [boards[1].manifest(rank) for rank in range(3)] == [b"of 0", b"of 1", b"of 2"]
    steps = [Step(StepKind.BEGIN, 1, num_pages=rank) for rank in range(3)]
    for one, step in zip(boards, steps, strict=True):
        one.post(step)
    for one in boards:
        assert one.records(1, "a begin") == steps


def test_epochs_never_go_back(boards: list[PeerBoards]) -> None:
    boards[0].advance_written(begin_of(3))
    boards[0].advance_written(begin_of(2))
    boards[1].wait_written(0, begin_of(3), 3, lambda: "a read")
    for one in boards:
        one.advance_read(end_of(3))
        one.advance_read(end_of(2))
    boards[1].wait_read(end_of(3), 3, "a write")


def test_a_wait_ends_when_the_last_rank_is_there(boards: list[PeerBoards]) -> None:
    for one in boards:
        one.timeout_s = 20.0
    boards[0].advance_read(end_of(1))
    timer = threading.Timer(0.05, boards[2].advance_read, (end_of(1),))
    timer.start()
    boards[1].wait_read(end_of(1), 2, "a write")
    timer.join()


def test_a_wait_that_is_too_long_names_who_is_late(boards: list[PeerBoards]) -> None:
    boards[0].advance_read(end_of(1))
    with pytest.raises(DeadlineExceeded, match=r"^a write: waited 0.2 s for shard rank 2 \(global rank 5\), which may"):
        boards[1].wait_read(end_of(1), 2, "a write")
    with pytest.raises(DeadlineExceeded, match=r"shard rank 0 \(global rank 4\), which owns the layer"):
        boards[1].wait_written(0, begin_of(1), 1, lambda: "a read")
    boards[0].post(Step(StepKind.BEGIN, 1))
    with pytest.raises(DeadlineExceeded, match=r"for shard rank 1 .*, shard rank 2 .* has not begun it"):
        boards[0].records(1, "the begin")


def test_an_owner_that_failed_in_the_forward_is_named(boards: list[PeerBoards]) -> None:
    boards[0].fail(3)
    with pytest.raises(IntegrityError, match=r"shard rank 0 .* has failed in forward 3"):
        boards[1].wait_written(0, begin_of(3), 3, lambda: "a read")
    boards[0].advance_written(begin_of(3))
    boards[1].wait_written(0, begin_of(3), 3, lambda: "a read")


def test_a_rank_that_ended_is_named(boards: list[PeerBoards]) -> None:
    for one in boards:
        one.timeout_s = 20.0
    boards[2].advance_written(begin_of(1))
    boards[2].close()
    boards[1].wait_written(2, begin_of(1), 1, lambda: "a read of what it has written")
    with pytest.raises(PeerGone, match=r"shard rank 2 .* has ended or closed its pool"):
        boards[1].wait_written(2, begin_of(2), 2, lambda: "a read")


def test_a_rank_that_is_ahead_counts_as_having_skipped_unless_it_failed(boards: list[PeerBoards]) -> None:
    for one in boards[:2]:
        one.post(Step(StepKind.BEGIN, 1, setup_digest=8))
    boards[2].post(Step(StepKind.SKIP, 1, setup_digest=8, changes=-1))
    boards[2].post(Step(StepKind.SKIP, 2, setup_digest=8, changes=-1))
    assert boards[0].records(1, "a begin")[2].forward == 1
    boards[2].post(Step(StepKind.BEGIN, 3, num_pages=2, setup_digest=8))
    assert boards[0].records(1, "a begin")[2] == Step(StepKind.SKIP, 1, setup_digest=8, changes=-1)
    boards[2].fail(1)
    assert boards[0].records(1, "a begin")[2].kind is StepKind.FAILED


def test_a_half_written_record_is_waited_for(boards: list[PeerBoards]) -> None:
    for one in boards:
        one.post(Step(StepKind.BEGIN, 2))
    boards[2]._own[24 + 3] ^= 1
    with pytest.raises(DeadlineExceeded, match="shard rank 2"):
        boards[0].records(2, "a begin")


def test_a_board_that_is_not_there_is_told_with_what_to_do() -> None:
    with PeerBoardsOf(0, (0, 1)) as one, pytest.raises(PeerGone, match=r"shard rank 1 .* on one host"):
        one.connect([(one.name, one.nbytes), ("pdlink-1-0123456789abcdef", one.nbytes)])


def test_machines_that_reorder_stores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_board.platform, "machine", lambda: "aarch64")
    with pytest.raises(BackendUnavailable, match="this is aarch64; use the broadcast reader"):
        PeerBoards(0, (0, 1), b"", timeout_s=1.0)


class PeerBoardsOf(PeerBoards):
    def __init__(self, rank: int, global_ranks: tuple[int, ...]) -> None:
        super().__init__(rank, global_ranks, b"", timeout_s=1.0)

    def __enter__(self) -> PeerBoardsOf:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@given(st.sets(st.integers(0, 40)))
def test_runs_are_the_pages_in_order(pages: set[int]) -> None:
    starts, lengths = page_runs(np.array(sorted(pages), np.int64))
    runs = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]
    assert [page for run in runs for page in run] == sorted(pages)
    assert all(second[0] - first[-1] > 1 for first, second in itertools.pairwise(runs))


def test_a_gather_brings_live_rows_and_touches_nothing_else() -> None:
    owned = OwnedRegions(LAYOUT, {"index_k": (0, 2)}, 8)
    mapped = MappedLayers(LAYOUT, 8, read_regions(describe_regions(owned)))
    try:
        about = LAYOUT.component("index_k")
        source = owned.tensor(("index_k", 2))
        source.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, tuple(source.shape), dtype=np.uint8)))
        rows = np.zeros((4, 64), np.bool_)
        rows[:3] = True
        rows[3, [0, 5]] = True
        target = torch.full_like(source, 0xEE)
        nbytes = mapped.gather(about, 2, LivePages.of(np.array([5, 1, 2, 7]), rows), target)
        assert nbytes == 3 * about.page_bytes + 2 * 132
        assert torch.equal(target[[1, 2, 5]], source[[1, 2, 5]])
        assert (target[[0, 3, 4, 6]] == 0xEE).all()
        assert torch.equal(target[7, 5 * 128 : 6 * 128], source[7, 5 * 128 : 6 * 128])
        assert torch.equal(target[7, 8192 + 20 : 8192 + 24], source[7, 8192 + 20 : 8192 + 24])
        assert int((target[7] != 0xEE).sum()) <= 2 * 132
        with pytest.raises(RegionError, match="'latent' layer 0"):
            mapped.tensor(("latent", 0))
    finally:
        mapped.close()
        mapped.close()
        owned.close()


def test_a_layer_that_does_not_fit_its_segment_is_refused() -> None:
    owned = OwnedRegions(LAYOUT, {"index_k": (0,)}, 8)
    mapped = MappedLayers(LAYOUT, 9, read_regions(describe_regions(owned)))
    try:
        with pytest.raises(RegionError, match="would need bytes 0 to"):
            mapped.tensor(("index_k", 0))
    finally:
        mapped.close()
        owned.close()
