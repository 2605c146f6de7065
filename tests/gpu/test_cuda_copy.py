"""What a device's copier moves, byte for byte, and that it waits for nobody's stream."""

import ctypes

import numpy as np
import pytest

from pdlink.backends.cuda_copy import DeviceCopier
from pdlink.backends.cuda_driver import DeviceBlock, PinnedBlock, call, find_allocation, on_device
from pdlink.errors import RegionError
from pdlink.transfer.descriptors import GroupMove, LayerTable, PageRuns, PullBatch
from tests.transfer.values import ints

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def copier():
    made = DeviceCopier(0)
    yield made
    made.close()


def numbers(nbytes, seed=1):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def on_gpu(data, device=0):
    import torch

    made = torch.from_numpy(data).to(f"cuda:{device}")
    torch.cuda.synchronize(device)
    return made


def make_batch(source, destination, sizes, strides, pairs):
    """`source` and `destination` are (address of layer 0, bytes from layer to layer)."""
    count = len(sizes)
    layers = ints(range(count))
    table = LayerTable(
        layers,
        source[0] + layers * source[1],
        ints(strides),
        destination[0] + layers * destination[1],
        ints(strides),
        ints(sizes),
    )
    from_pages, to_pages = (ints(column) for column in zip(*pairs, strict=True))
    runs = PageRuns(from_pages, to_pages, np.ones(len(pairs), dtype=np.int64))
    return PullBatch("w", (GroupMove("kv", runs, table),))


@pytest.mark.parametrize(
    ("sizes", "gap", "num_pages"),
    [
        ((41_984, 8_448, 41_984), 0, 64),
        ((132,), 0, 300),
        ((133, 1), 3, 200),
        ((100_000,), 16, 20),
        ((5 << 20,), 0, 4),
    ],
    ids=["latent and index", "words of 4", "single bytes", "with gaps", "large pages"],
)
@pytest.mark.parametrize("from_device", [0, 1])
def test_scattered_pages_arrive_and_nothing_else_is_written(copier, sizes, gap, num_pages, from_device):
    import torch

    if from_device >= torch.cuda.device_count():
        from_device = 0
    if from_device:
        from pdlink.backends.cuda_driver import open_to

        open_to(0, from_device)
    strides = [size + gap for size in sizes]
    layer_bytes = -(-max(strides) * num_pages // 16) * 16
    data = numbers(layer_bytes * len(sizes))
    source, target = on_gpu(data, from_device), on_gpu(np.full(layer_bytes * len(sizes), 0xEE, dtype=np.uint8))
    order = np.random.default_rng(2)
    pairs = list(
        zip(order.permutation(num_pages)[: num_pages // 2], order.permutation(num_pages)[: num_pages // 2], strict=True)
    )
    batch = make_batch((source.data_ptr(), layer_bytes), (target.data_ptr(), layer_bytes), sizes, strides, pairs)
    assert copier.copy(batch, lambda: False)
    wanted = np.full_like(data, 0xEE)
    for layer, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        for one, other in pairs:
            start, stop = layer * layer_bytes + other * stride, layer * layer_bytes + one * stride
            wanted[start : start + size] = data[stop : stop + size]
    assert np.array_equal(target.cpu().numpy(), wanted)


def test_pages_are_copied_into_pinned_host_memory(copier):
    data = numbers(64 * 512)
    source = on_gpu(data)
    block = PinnedBlock(data.nbytes, 0)
    try:
        pairs = [(page, 511 - page) for page in range(512)]
        batch = make_batch((source.data_ptr(), 0), (block.address, 0), [64], [64], pairs)
        assert copier.copy(batch, lambda: False)
        assert np.array_equal(_host_view(block), data.reshape(512, 64)[::-1].reshape(-1))
    finally:
        block.close()


def test_more_pages_than_one_table_holds_and_many_copies_at_once_arrive(copier):
    num_pages = 150_000
    data = numbers(16 * num_pages)
    source, target = on_gpu(data), on_gpu(np.zeros_like(data))
    pairs = [(page, (page * 7919) % num_pages) for page in range(num_pages)]
    batch = make_batch((source.data_ptr(), 0), (target.data_ptr(), 0), [16], [16], pairs)
    started = [copier.start(batch) for _ in range(8)]
    for one in started:
        one.wait()
    assert all(one.is_over for one in started)
    wanted = np.empty_like(data).reshape(num_pages, 16)
    wanted[[other for _, other in pairs]] = data.reshape(num_pages, 16)
    assert np.array_equal(target.cpu().numpy(), wanted.reshape(-1))


def test_a_page_past_two_to_the_31_bytes_arrives(copier):
    import torch

    num_pages, page_bytes = 3 * 1024 * 1024, 1024
    source = torch.empty(num_pages * page_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)
    last = source.view(num_pages, page_bytes)[-3:]
    last.copy_(torch.from_numpy(numbers(3 * page_bytes).reshape(3, page_bytes)))
    torch.cuda.synchronize(0)
    pairs = [(num_pages - 3 + one, num_pages - 1 - one) for one in range(3)]
    batch = make_batch((source.data_ptr(), 0), (target.data_ptr(), 0), [page_bytes], [page_bytes], pairs)
    assert copier.copy(batch, lambda: False)
    got = target.view(num_pages, page_bytes)[-3:].cpu()
    assert torch.equal(got, last.cpu().flip(0))


def test_a_copy_ends_while_the_streams_of_the_engine_are_blocked(copier):
    """The engine's compute streams, the default one among them, wait for a flag that is set only afterwards."""
    import torch

    data = numbers(512 * 4096)
    source = on_gpu(data)
    flag, result = PinnedBlock(64, 0), PinnedBlock(data.nbytes, 0)
    _host_view(flag)[:] = 0
    side = torch.cuda.Stream(0)
    streams = [torch.cuda.default_stream(0), side]
    try:
        with on_device(0):
            for stream in streams:
                call("cuStreamWaitValue32", stream.cuda_stream, flag.address, 1, 0)
        pairs = [(page, 511 - page) for page in range(512)]
        packed = DeviceBlock(data.nbytes, 0)
        to_slot = make_batch((source.data_ptr(), 0), (packed.address, 0), [4096], [4096], pairs)
        assert copier.copy(to_slot, lambda: False)
        assert copier.copy(
            make_batch((packed.address, 0), (result.address, 0), [data.nbytes], [data.nbytes], [(0, 0)]), lambda: False
        )
        assert np.array_equal(_host_view(result), data.reshape(512, 4096)[::-1].reshape(-1))
        assert not any(stream.query() for stream in streams)
    finally:
        _host_view(flag)[:] = 1
        for stream in streams:
            stream.synchronize()
    packed.close()
    flag.close()
    result.close()


def test_copies_that_were_prepared_arrive_in_any_order_and_forgotten_ones_cost_nothing(copier):
    num_pages, page_bytes = 64, 4096
    data = numbers(num_pages * page_bytes)
    source = on_gpu(data)
    targets = [on_gpu(np.zeros_like(data)) for _ in range(30)]
    pairs = [(page, num_pages - 1 - page) for page in range(num_pages)]
    batches = [
        make_batch((source.data_ptr(), 0), (target.data_ptr(), 0), [page_bytes], [page_bytes], pairs)
        for target in targets
    ]
    for _ in range(3):
        prepared = [copier.prepare(batch) for batch in batches]
        for one in [*prepared[1::2]][::-1]:
            one.start().wait()
        del prepared, one
    wanted = data.reshape(num_pages, page_bytes)[::-1].reshape(-1)
    for number, target in enumerate(targets):
        assert np.array_equal(target.cpu().numpy(), wanted if number % 2 else np.zeros_like(data))
    assert copier.copy(batches[0], lambda: False)
    assert np.array_equal(targets[0].cpu().numpy(), wanted)


def test_a_stop_before_the_launch_copies_nothing(copier):
    data = numbers(4096)
    source, target = on_gpu(data), on_gpu(np.zeros_like(data))
    batch = make_batch((source.data_ptr(), 0), (target.data_ptr(), 0), [4096], [4096], [(0, 0)])
    assert not copier.copy(batch, lambda: True)
    assert not target.cpu().numpy().any()


def test_host_memory_is_no_device_memory(copier):
    data = numbers(4096)
    with pytest.raises(RegionError, match="no memory of device 0"):
        find_allocation(data.ctypes.data, 0)


@pytest.mark.parametrize("device", [0, 1])
def test_memory_of_torch_is_found_in_its_allocation(copier, device):
    import torch

    device = min(device, torch.cuda.device_count() - 1)
    tensors = [torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}") for nbytes in (64, 4096, 64 << 20)]
    for tensor in tensors:
        found = find_allocation(tensor.data_ptr(), device)
        assert found.start <= tensor.data_ptr()
        assert tensor.data_ptr() + tensor.numel() <= found.stop


def test_closing_twice_is_fine():
    made = DeviceCopier(0)
    made.close()
    made.close()


def _host_view(block):
    return np.ctypeslib.as_array((ctypes.c_ubyte * block.nbytes).from_address(block.address))
