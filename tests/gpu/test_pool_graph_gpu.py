"""Forwards of a layer-sharded pool in CUDA graphs: captured once, replayed with other pages and counts.

`-k kernels` takes seconds and one device; each world starts two processes and takes about a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdlink.memory.page_lists import PaddedPages
from pdlink.memory.pool_device import Lane, PageCopy, PageList, TroubleKind
from tests.memory import scenarios_graph
from tests.memory.test_lane_worlds import check
from tests.memory.worlds import run_world

NUM_PAGES = 40
WORLD_TIMEOUT_S = 240
WORLDS = {
    "plain": [f"peer+cuda:{name}" for name in scenarios_graph.PEER],
    "ahead": [
        *(f"peer+cuda+ahead:{name}" for name in scenarios_graph.PEER),
        "broadcast+cuda:broadcasts_are_not_captured",
    ],
}


@pytest.fixture(scope="module")
def device() -> Iterator[object]:
    from pdlink.memory.cuda_device import CudaDevice

    made = CudaDevice(0)
    yield made
    made.close()


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page_bytes", [64 * 656, 64 * 132, 7 * 30])
def test_kernels_of_one_graph_copy_the_pages_that_are_listed_by_then(device, page_bytes):
    import torch

    data = np.random.default_rng(3).integers(0, 255, (NUM_PAGES, page_bytes), dtype=np.uint8)
    source = torch.from_numpy(data).cuda()
    target = torch.zeros_like(source)
    memory = device.scratch((8 * (1 + NUM_PAGES),))
    pages = PaddedPages(64, PageList(memory.data_ptr(), NUM_PAGES)).pages
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        device.fork()
        device.copy(PageCopy(source.data_ptr(), target.data_ptr(), page_bytes, pages))
        device.join(device.mark())
    assert not target.any(), "a capture moves nothing"
    for ids in ([7, 0, 39], [], list(range(NUM_PAGES))[::-1], [12]):
        target.fill_(0xEE)
        device.fork()
        device.fill(memory, np.array([len(ids), *ids], dtype=np.int64))
        device.join(device.mark())
        graph.replay()
        torch.cuda.synchronize()
        wanted = np.full_like(data, 0xEE)
        wanted[ids] = data[ids]
        assert np.array_equal(target.cpu().numpy(), wanted), ids
    assert device.trouble() is None


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_kernels_of_one_graph_wait_for_epochs_that_count_from_a_word(device):
    import torch

    words, base = torch.zeros(64, dtype=torch.int64, device="cuda:0"), device.scratch((8,))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        device.fork()
        device.wait_for(Lane.FETCH, [words.data_ptr()], [3], 2, 0.2, base=base.data_ptr())
        device.join(device.mark())
    for start, seen, is_late in ((0, 2, False), (1 << 40, (1 << 40) + 2, False), (1 << 41, (1 << 41) + 1, True)):
        words[0] = seen
        device.fork()
        device.fill(base, np.array([start], dtype=np.int64))
        device.join(device.mark())
        graph.replay()
        torch.cuda.synchronize()
        found = device.trouble()
        device.clear_trouble()
        assert (found is not None) == is_late
        if found is not None:
            assert (found.kind, found.rank, found.wanted, found.seen) == (TroubleKind.LATE, 3, start + 2, seen)


@pytest.mark.gpu(2)
@pytest.mark.timeout(2 * WORLD_TIMEOUT_S)
@pytest.mark.parametrize("world", list(WORLDS))
def test_worlds_of_two_devices_replay_right_bytes(tmp_path: Path, world: str) -> None:
    outcomes = run_world(tmp_path, 2, WORLDS[world], WORLD_TIMEOUT_S, warnings="default")
    for name, ranks in outcomes.items():
        failed = " FAILED" if any(one.error for one in ranks) else ""
        print(f"{name}: {max(one.seconds for one in ranks):.2f} s{failed}")
    check(outcomes)
