"""One nixl backend serves host memory and device memory at once, and either end of a pull may lie in either."""

from __future__ import annotations

import contextlib
import itertools
import time

import numpy as np
import pytest

from pdlink.backends.base import Peer, PullStatus
from pdlink.config import load_settings
from pdlink.errors import RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.descriptors import GroupMove, LayerTable, PullBatch, pair_pages
from tests.backends.needs import nixl_missing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_PAGES, PAGE_BYTES = 40, 4096
DEADLINE_S = 30.0
DIRECTIONS = list(itertools.product(MemoryKind, MemoryKind))
"""(source, destination) of each layer."""


def make(kinds, devices):
    """One tensor for each layer, in memory of its kind, and their regions."""
    import torch

    tensors, regions = [], []
    for layer, kind in enumerate(kinds):
        where = torch.device("cuda", devices) if kind is MemoryKind.CUDA else torch.device("cpu")
        tensor = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8, device=where)
        tensors.append(tensor)
        place = (kind, devices if kind is MemoryKind.CUDA else 0)
        regions.append(Region("kv", layer, tensor.data_ptr(), PAGE_BYTES, PAGE_BYTES, NUM_PAGES, *place))
    return tensors, regions


@pytest.mark.parametrize("short", [0, 64], ids=["whole pages", "parts of pages"])
def test_pages_move_between_host_and_device_memory_in_every_direction(short):
    if reason := nixl_missing():
        pytest.skip(reason)
    import torch

    from pdlink.backends.nixl import NixlBackend

    last = torch.cuda.device_count() - 1
    sources, from_regions = make([one for one, _ in DIRECTIONS], 0)
    targets, to_regions = make([one for _, one in DIRECTIONS], last)
    rng = np.random.default_rng(1)
    for tensor in sources:
        tensor.copy_(torch.from_numpy(rng.integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)))
    for device in {0, last}:
        torch.cuda.synchronize(device)
    at, to = rng.permutation(NUM_PAGES)[:24], rng.permutation(NUM_PAGES)[:24]
    with contextlib.ExitStack() as stack:
        owner, reader = (stack.enter_context(contextlib.closing(NixlBackend(load_settings({})))) for _ in range(2))
        assert owner.capabilities.memory == set(MemoryKind)
        for backend, regions in ((owner, from_regions), (reader, to_regions)):
            for region in regions:
                backend.register(region)
        peer = Peer("w0", 1, owner.endpoint())
        owner.serve("w0", 1)
        reader.connect(peer)
        size = np.full(len(DIRECTIONS), PAGE_BYTES)
        columns = (np.array([one.base_address for one in regions]) for regions in (from_regions, to_regions))
        source_base, target_base = columns
        table = LayerTable(np.arange(len(DIRECTIONS)), source_base, size, target_base, size, size - short)
        handle = reader.submit(PullBatch("w0", (GroupMove("kv", pair_pages(at, to), table),)))
        until = time.monotonic() + DEADLINE_S
        while (status := reader.poll(handle)) is PullStatus.PENDING:
            assert time.monotonic() < until
        assert status is PullStatus.DONE, handle.error
        reader.disconnect(peer)
    for direction, source, target in zip(DIRECTIONS, sources, targets, strict=True):
        wanted = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
        wanted[to, : PAGE_BYTES - short] = source.cpu()[at, : PAGE_BYTES - short]
        assert torch.equal(target.cpu(), wanted), direction


def test_an_address_that_is_no_device_memory_is_refused_with_the_device():
    if reason := nixl_missing():
        pytest.skip(reason)
    from pdlink.backends.nixl import NixlBackend

    with contextlib.closing(NixlBackend(load_settings({}))) as backend:
        backend.register(Region("kv", 0, 1 << 40, PAGE_BYTES, PAGE_BYTES, NUM_PAGES, MemoryKind.CUDA, 0))
        with pytest.raises(RegionError, match="CUDA device 0"):
            backend.endpoint()
