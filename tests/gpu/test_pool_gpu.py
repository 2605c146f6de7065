"""The layer-sharded pool on GPUs: its kernels alone, then whole worlds of two ranks with a device each.

`-k kernels` takes seconds and one device; each world starts two processes and takes one to two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdlink.memory.pool_device import Lane, PageCopy, TroubleKind
from tests.memory import scenarios_bytes, scenarios_cuda, scenarios_formats, scenarios_random
from tests.memory.test_lane_worlds import AHEAD, check
from tests.memory.worlds import run_world

NUM_PAGES = 40
PAGES = [7, 0, 39, 12, 13]
WORLD_TIMEOUT_S = 240
RANDOM = list(scenarios_random.SCENARIOS)[::4]
# Groups of more than two ranks, and what comes late on the host, are not for two devices.
BYTES = [name for name in scenarios_bytes.SCENARIOS if "two_shard_groups" not in name]
WORLDS = {
    "peer": [
        *(f"peer+cuda+ahead:{one.__name__}" for one in scenarios_cuda.PEER),
        *(f"peer+cuda:{name}" for name in (*BYTES, *scenarios_formats.SCENARIOS)),
    ],
    "peer-order": [
        *(f"peer+cuda+ahead:{name}" for name in (*AHEAD, *RANDOM)),
        "peer+cuda:ranks_read_what_they_like",
        "peer+cuda:an_empty_batch_on_one_rank_is_fine",
        "peer+cuda:a_rank_without_work_holds_nobody_up",
        "peer+cuda:writers_wait_for_slow_gathers",
        "peer+cuda:gathers_wait_for_slow_writers",
    ],
    "broadcast": [
        *(f"broadcast+cuda+ahead:{one.__name__}" for one in scenarios_cuda.BROADCAST),
        *(f"broadcast+cuda:{name}" for name in (*BYTES, *scenarios_formats.SCENARIOS)),
    ],
    "broadcast-order": [f"broadcast+cuda+ahead:{name}" for name in RANDOM],
}


@pytest.fixture(scope="module")
def device() -> Iterator[object]:
    from pdlink.memory.cuda_device import CudaDevice

    made = CudaDevice(0)
    yield made
    made.close()


def numbers(shape):
    return np.random.default_rng(3).integers(0, 255, shape, dtype=np.uint8)


def finish(device):
    import torch

    torch.cuda.synchronize(0)
    found = device.trouble()
    device.clear_trouble()
    return found


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page_bytes", [64 * 656, 64 * 132, 64 * 1152, 7 * 30, 132, 100_000])
@pytest.mark.parametrize("packed", ["neither", "source", "target"])
def test_kernels_copy_listed_pages_and_nothing_else(device, page_bytes, packed):
    import torch

    data = numbers((NUM_PAGES, page_bytes))
    source = torch.from_numpy(data).cuda()
    target = torch.full((NUM_PAGES, page_bytes), 0xEE, dtype=torch.uint8, device="cuda:0")
    pages = device.list_pages(np.array(PAGES, dtype=np.int64))
    device.fork()
    sides = {"source_is_packed": packed == "source", "target_is_packed": packed == "target"}
    device.copy(PageCopy(source.data_ptr(), target.data_ptr(), page_bytes, pages, **sides))
    assert finish(device) is None
    wanted = np.full_like(data, 0xEE)
    for place, page in enumerate(PAGES):
        wanted[place if packed == "target" else page] = data[place if packed == "source" else page]
    assert np.array_equal(target.cpu().numpy(), wanted)


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_kernels_wait_in_vain_for_a_bounded_time_then_poison_and_say_so(device):
    import torch

    words = torch.zeros(64, dtype=torch.int64, device="cuda:0")
    at = [words.data_ptr() + 256, words.data_ptr()]
    source = torch.zeros((NUM_PAGES, 64), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(source)
    device.fork()
    device.advance(Lane.FETCH, at[0], 12)
    device.advance(Lane.FETCH, at[0], 11)
    device.wait_for(Lane.FETCH, at[:1], [5], 12, 1.0)
    assert finish(device) is None
    assert int(words[32]) == 12
    device.wait_for(Lane.FETCH, at, [5, 6], 12, 0.05, broken=words.data_ptr() + 128)
    pages = device.list_pages(np.array(PAGES, dtype=np.int64))
    device.copy(PageCopy(source.data_ptr(), target.data_ptr(), 64, pages))
    found = finish(device)
    assert found is not None
    assert (found.kind, found.rank, found.wanted, found.seen) == (TroubleKind.LATE, 6, 12, 0)
    assert int(words[16]) == 12
    assert (target[PAGES] == 0xFF).all()
    assert int((target == 0xFF).sum()) == len(PAGES) * 64
    device.copy(PageCopy(source.data_ptr(), target.data_ptr(), 64, pages))
    assert finish(device) is None
    assert not target.any()


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_kernels_stamp_and_find_what_is_no_stamp(device):
    import torch

    wire = torch.zeros(32, dtype=torch.int64, device="cuda:0")
    stamp = np.arange(100, 112, dtype=np.int64)
    device.fork()
    device.stamp(wire.data_ptr(), stamp)
    device.check_stamp(wire.data_ptr(), stamp, 1)
    assert finish(device) is None
    assert wire[:12].tolist() == stamp.tolist()
    assert not wire[12:].any()
    other = stamp.copy()
    other[3] = 7
    device.check_stamp(wire.data_ptr(), other, 2)
    found = finish(device)
    assert (found.kind, found.rank, found.wanted, found.seen) == (TroubleKind.TRAILER, 2, 7, 103)
    device.look_for_broken([wire.data_ptr()], [4], 101)
    assert finish(device) is None
    device.look_for_broken([wire.data_ptr()], [4], 100)
    assert finish(device).kind is TroubleKind.OVERWRITTEN


@pytest.mark.gpu(2)
@pytest.mark.timeout(2 * WORLD_TIMEOUT_S)
@pytest.mark.parametrize("world", list(WORLDS))
def test_worlds_of_two_devices_bring_right_bytes(tmp_path: Path, world: str) -> None:
    outcomes = run_world(tmp_path, 2, WORLDS[world], WORLD_TIMEOUT_S, warnings="default")
    for name, ranks in outcomes.items():
        print(
            f"{name}: {max(one.seconds for one in ranks):.2f} s{'' if not any(o.error for o in ranks) else ' FAILED'}"
        )
    check(outcomes)
