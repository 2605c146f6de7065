"""Sidecars beside engines with pools on GPUs: what is mapped, what is refused, when pages may be read, who dies."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlink.errors import RegionError, StateError
from pdlink.sidecar.engine_prefill import NUM_EVENTS
from pdlink.testing.child import Child
from pdlink.transfer.states import SenderState
from tests import processes
from tests.backends.needs import nixl_missing
from tests.gpu.sidecar_site import DeviceRig
from tests.gpu.test_link_gpu import blocked_streams
from tests.processes import PATIENCE_S, wait_until
from tests.sidecar.rig import PAGE_SIZE, REPO, folder_for_sockets, is_gone, kill, serve, serve_at_last

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

ON_PATH = {"PYTHONPATH": os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])}
SOURCE, TARGET = [4, 0, 9], [1, 12, 7]
CASES = [
    # backend, form of what is beside a sidecar, which sides are, PDLINK_WAY, the way that it must be
    ("ipc", "descriptor", "prefill", "staged", "staged"),
    ("ipc", "descriptor", "decode", "auto", "mapped"),
    ("ipc", "descriptor", "both", "staged", "staged"),
    ("ipc", "handle", "decode", "auto", "mapped"),
    ("ipc", "handle", "both", "auto", "mapped"),
    ("ipc", "tensor", "both", "auto", "mapped"),
    ("nixl", "descriptor", "prefill", "auto", "staged"),
    ("nixl", "descriptor", "decode", "auto", "staged"),
    ("nixl", "descriptor", "both", "auto", "staged"),
    ("nixl", "handle", "both", "auto", "staged"),
]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_for_sockets() as folder:
        yield Path(folder)


@pytest.mark.parametrize(("backend", "form", "side", "asked", "way"), CASES)
def test_requests_between_device_pools_go_by_the_only_way_there_is(
    stack: contextlib.ExitStack, folder: Path, backend: str, form: str, side: str, asked: str, way: str
) -> None:
    if backend == "nixl" and (reason := nixl_missing()):
        pytest.skip(reason)
    rig = DeviceRig(stack, folder, backend, form if side != "decode" else "handle", asked)
    prefill = rig.prefill(rig.connect(rig.sidecar("pre.sock")) if side != "decode" else rig.node())
    rig.form = form if side != "prefill" else "handle"
    decode = rig.decode(rig.connect(rig.sidecar("dec.sock")) if side != "prefill" else rig.node())
    for number in range(3):
        serve(rig, prefill, decode, f"request-{number}", SOURCE, TARGET)
        (told,) = decode.worker.explain(rig.instance).values()
        assert told.startswith(f"{way}: ")
    print(f"{backend}, {form} beside {side}: {told}")


def refusal(script: str, **environment: str) -> str:
    """What `show` says in an engine of its own, with such settings of PyTorch's."""
    whole = f"""
import torch
from pdlink.layout.regions import MemoryKind, Region
from pdlink.sidecar.device_blocks import show
{script}
try:
    show([Region("latent", 0, at.data_ptr(), 4096, 4096, at.nbytes // 4096, MemoryKind.CUDA, 0)])
    print("shown")
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
    done = processes.run([sys.executable, "-c", whole], env={**os.environ, **ON_PATH, **environment}, check=True)
    print(done.stdout)
    return done.stdout


LARGE = "at = torch.zeros(64 << 20, dtype=torch.uint8, device='cuda:0')"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_the_setting_to_change(name: str) -> None:
    said = refusal(LARGE, **{name: "expandable_segments:True"})
    assert said.startswith("RegionError: 'latent' layer 0 lies in PyTorch's expandable segments")
    assert "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF" in said


def test_the_pool_of_the_driver_is_refused_with_the_setting_to_change() -> None:
    said = refusal(LARGE, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert said.startswith("RegionError: 'latent' layer 0 lies in a memory pool of the driver")
    assert "unset backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF" in said


def test_memory_of_another_allocator_by_handle_is_refused_with_what_to_change() -> None:
    script = """
from pdlink.backends import cuda_vmm
from pdlink.memory.allocate import allocate
block = allocate(8 << 20, 0)
cuda_vmm._BLOCKS.clear()  # as if somebody else had made it
at = block.tensor
"""
    said = refusal(script)
    assert said.startswith("RegionError: 'latent' layer 0 lies in memory that another allocator maps by cuMemMap")
    assert "pdlink.memory.allocate" in said


def test_a_block_that_holds_other_tensors_is_refused_and_one_of_its_own_is_not() -> None:
    said = refusal("at = torch.zeros(1 << 20, dtype=torch.uint8, device='cuda:0')")
    assert "lies in a block of" in said
    assert "give the pool tensors that have a block each" in said
    assert refusal(LARGE) == "shown\n"


def test_a_tensor_over_shared_memory_is_no_copy() -> None:
    import torch

    from pdlink.memory.allocate import allocate

    block = allocate(3 << 20, 0)
    tensor = block.tensor
    assert (tensor.data_ptr(), tensor.nbytes, tensor.device) == (block.address, 3 << 20, torch.device("cuda", 0))
    assert not tensor.any()
    tensor[5:].view(torch.uint8)[:8].fill_(7)
    assert int(block.tensor.sum()) == 56
    del tensor
    free = torch.cuda.mem_get_info(0)[0]
    block.close()
    block.close()
    assert torch.cuda.mem_get_info(0)[0] > free


def test_a_sidecar_that_does_not_see_the_gpu_says_which(
    stack: contextlib.ExitStack, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdlink.backends import cuda_driver

    rig = DeviceRig(stack, folder, "ipc", "descriptor", "staged")
    path = rig.sidecar("a.sock")
    name = cuda_driver.gpu_name(cuda_driver.device_uuid(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    node = rig.connect(path)
    monkeypatch.undo()
    with pytest.raises(RegionError, match=f"{name}.*CUDA_VISIBLE_DEVICES"):
        rig.decode(node)


@pytest.mark.gpu(2)
def test_gpus_that_both_sides_count_otherwise_are_the_same_ones(
    stack: contextlib.ExitStack, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DeviceRig(stack, folder, "ipc", "descriptor", "staged", device=1)
    path = rig.sidecar("a.sock")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    prefill, decode = rig.prefill(rig.connect(path)), rig.decode(rig.connect(path))
    monkeypatch.undo()
    serve(rig, prefill, decode, "request", SOURCE, TARGET)


@pytest.mark.gpu(2)
def test_an_engine_with_pools_on_two_gpus_is_served_by_a_process_for_each(
    stack: contextlib.ExitStack, folder: Path
) -> None:
    rig = DeviceRig(stack, folder, "ipc", "handle")
    node = rig.connect(rig.sidecar("a.sock"))
    prefill = rig.prefill(node)
    rig.device = 1
    decode = rig.decode(node)
    assert len(set(node.pids)) == 2
    serve(rig, prefill, decode, "request", SOURCE, TARGET)
    rig.decode(node, "third")
    assert len(node.pids) == 2


@pytest.mark.parametrize("form", ["descriptor", "handle"])
def test_nothing_is_read_before_the_event_of_a_publication_which_the_sidecar_looks_at_itself(
    stack: contextlib.ExitStack, folder: Path, form: str
) -> None:
    """More publications than there are events in a ring: what has none waits in the engine."""
    import torch

    rig = DeviceRig(stack, folder, "ipc", form, "staged" if form == "descriptor" else "auto")
    path = rig.sidecar("a.sock")
    prefill, decode = rig.prefill(rig.connect(path)), rig.decode(rig.connect(path))
    serve(rig, prefill, decode, "warm", SOURCE, TARGET)
    names = [f"t{number}" for number in range(NUM_EVENTS + 3)]
    told = {name: (number % 8, 8 + number % 8) for number, name in enumerate(names)}
    checked = (names[0], names[-1])
    for name in checked:
        prefill.pool.fill(name, {"kv": told[name][:1]})
    senders = {name: prefill.worker.open(name) for name in names}
    receivers = {
        name: decode.worker.receive(name, rig.instance, {"kv": [target]}, PAGE_SIZE)
        for name, (_, target) in told.items()
    }
    with blocked_streams() as streams:
        for name, sender in senders.items():
            event = torch.cuda.Event()
            event.record(streams[1])
            sender.publish([told[name][0]], last=True, ready=event)
        assert [name for name, sender in senders.items() if sender._waiting] == names[NUM_EVENTS:]
        for name in checked:
            with pytest.raises(TimeoutError):
                receivers[name].wait(0.3)
    for receiver in receivers.values():
        receiver.wait(PATIENCE_S)
    # Of pages that several requests came to, the last one's bytes are there.
    assert decode.pool.find_wrong(names[-1], {"kv": [told[names[-1]][1]]}) is None
    assert wait_until(lambda: all(one.poll() is SenderState.RELEASED for one in senders.values()))


def test_a_sidecars_death_is_survived_by_pools_on_devices(stack: contextlib.ExitStack, folder: Path) -> None:
    rig = DeviceRig(stack, folder, "ipc", "descriptor", "staged")
    path = rig.sidecar("a.sock")
    prefill, decode = rig.prefill(rig.connect(path)), rig.decode(rig.connect(path))
    serve(rig, prefill, decode, "first", SOURCE, TARGET)
    pid = prefill.node.pid
    kill(pid)
    assert wait_until(lambda: prefill.node.pid not in (0, pid) and prefill.node.health().ok)
    assert is_gone(pid)
    prefill.worker.wait_registered(PATIENCE_S)
    serve_at_last(rig, prefill, decode, "second", SOURCE, TARGET)


def test_an_engine_that_is_started_again_after_a_crash_finds_its_memory(
    stack: contextlib.ExitStack, folder: Path
) -> None:
    """More than half of what is free, twice for each form. How long it takes is printed; it should be within 2 s."""
    import torch

    for number, form in enumerate(("descriptor", "handle") * 2):
        rig = DeviceRig(stack, folder, "ipc", form, "staged" if form == "descriptor" else "auto")
        path = rig.sidecar(f"{number}.sock")
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(0)[0]
        nbytes = free * 6 // 10 >> 21 << 21
        engine = Child("an engine", "tests.gpu.sidecar_engine", env=ON_PATH)
        stack.callback(engine.close)
        port, instance = rig.bootstrap.address.port, f"instance-{number}"
        engine.say({"form": form, "nbytes": nbytes, "socket": str(path), "port": port, "instance": instance})
        pid = int(engine.hear(PATIENCE_S)["pid"])
        # Other tests may take and give memory meanwhile, but little of it.
        assert torch.cuda.mem_get_info(0)[0] < free - nbytes // 2
        os.kill(engine.pid, signal.SIGKILL)
        killed = time.monotonic()
        engine.wait(PATIENCE_S)
        assert wait_until(lambda free=free, nbytes=nbytes: torch.cuda.mem_get_info(0)[0] > free - nbytes // 2)
        print(f"{form}: {nbytes >> 20} MiB are free {time.monotonic() - killed:.2f} s after the engine's death")
        assert wait_until(lambda pid=pid: is_gone(pid))


def test_all_of_the_memory_is_back_when_a_worker_is_detached(stack: contextlib.ExitStack, folder: Path) -> None:
    import torch

    rig = DeviceRig(stack, folder, "ipc", "descriptor", "staged")
    node = rig.connect(rig.sidecar("a.sock"))
    free = []
    for name in ("first", "again"):  # what the first one leaves is the sidecar's own
        decode = rig.decode(node, name)
        decode.worker.close()
        decode.pool.close()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info(0)[0])
    assert free[1] >= free[0]
    with pytest.raises(StateError):
        decode.worker.explain(rig.instance)
