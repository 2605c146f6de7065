"""What a link costs is measured by pulls that are large enough to tell, and no larger than a slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends.base import PullHandle, PullStatus
from pdlink.backends.staging import Arena
from pdlink.config import Settings
from pdlink.decode import calibration
from pdlink.decode.calibration import LARGE_BYTES, LEAST_S, ROUNDS, measure, num_rows
from pdlink.decode.stage_inbox import StageInbox
from pdlink.decode.staging_link import StagingLink
from pdlink.layout.staging import StagingArea
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import Failure
from pdlink.transfer.ways import WireCost


class ClockedWire:
    """A link whose pulls take what its figures say, by a clock of its own. Nothing moves."""

    def __init__(self, cost: WireCost) -> None:
        self.cost = cost
        self.now_s = 0.0
        self.batches: list[PullBatch] = []

    def start(self, batch: PullBatch) -> PullHandle:
        self.batches.append(batch)
        return PullHandle(batch)

    def look(self, handle: PullHandle) -> PullStatus | Failure:
        self.now_s += self.cost.seconds(handle.batch.num_descriptors, handle.batch.nbytes)
        return PullStatus.DONE

    def nap(self, nap_s: float) -> None:
        raise AssertionError("a pull that is over is not waited for")

    def finish(self, handle: PullHandle) -> Failure | None:
        self.look(handle)
        return None

    def drop(self, handle: PullHandle) -> None:
        raise AssertionError("a pull that is over is not dropped")


def measured(
    monkeypatch: pytest.MonkeyPatch, cost: WireCost, slot_bytes: int, row_bytes: int = 41_984
) -> tuple[WireCost, list[PullBatch]]:
    arena = Arena(1, slot_bytes, (), shared=False)  # of private memory, which takes none before it is touched
    try:
        link = StagingLink(arena, StagingArea(1 << 40, slot_bytes, 2), StageInbox(), Settings())
        assert num_rows(link, row_bytes)
        wire = ClockedWire(cost)
        monkeypatch.setattr(calibration, "perf_counter", lambda: wire.now_s)
        found = measure(link, wire, "w0", 0, row_bytes)
        assert isinstance(found, WireCost)
        return found, wire.batches
    finally:
        arena.close()


@given(st.floats(1e-7, 1e-4), st.floats(1e8, 4e11), st.sampled_from([8 << 20, 64 << 20, 128 << 20]))
def test_a_link_is_found_to_cost_what_it_costs(each_s: float, rate: float, slot_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found, batches = measured(patch, WireCost(each_s, rate), slot_bytes)
    assert max(one.nbytes for one in batches) <= slot_bytes
    largest = next(one.nbytes for one in reversed(batches) if one.num_descriptors == 1)
    # A pull has one descriptor, so the rate comes out a little low: by that one's share.
    assert found.bytes_per_s == pytest.approx(largest / (largest / rate + each_s))
    assert found.per_descriptor_s == pytest.approx(each_s, rel=0.05, abs=41_984 / rate * 0.5)


def test_a_quick_link_is_measured_with_more_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found, batches = measured(monkeypatch, WireCost(20e-6, 385e9), 128 << 20)
    assert max(one.nbytes for one in batches) == 128 << 20
    assert found.bytes_per_s > 0.9 * 385e9


def test_a_slow_link_is_measured_with_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, batches = measured(monkeypatch, WireCost(20e-6, 1e9), 128 << 20)
    assert LARGE_BYTES / 1e9 > LEAST_S
    assert max(one.nbytes for one in batches) == LARGE_BYTES
    assert len(batches) == 2 * ROUNDS
