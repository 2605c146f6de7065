"""Owns one rank of `pdlink bench read` and `pdlink bench loop`, as a process of its own. It sums nothing up.

Started with its rank, a folder to meet in and the case; rank 0 says which reader a pool would pick, and then what each
round took. Readers take turns in every round, and each checks the live rows that it read, outside the time taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from pdlink.cli.pool_baseline import PlainCopy, WholePool
from pdlink.cli.pool_case import INDEX_BYTES, LATENT_BYTES, PAGE_SIZE, PoolCase
from pdlink.cli.pool_clock import Clock
from pdlink.cli.pool_sglang import SglangPool
from pdlink.errors import IntegrityError
from pdlink.layout import CacheLayout, LayerPlan, ParallelSizes, PlanKind, RankCoordinates
from pdlink.layout.components import index_k, latent
from pdlink.layout.regions import MemoryKind
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.communicator import GroupCommunicator
from pdlink.memory.layer_reader import LayerReader
from pdlink.memory.open_reader import exchange_facts, layer_token_bytes
from pdlink.memory.owners import ShardOwners
from pdlink.memory.peer_reader import PeerReader
from pdlink.memory.pool_device import PoolDevice
from pdlink.memory.reader_choice import choose_reader
from pdlink.memory.sharded_pool import LayerShardedPool, ReadSpan
from pdlink.testing.parent import Parent

KEY_BYTES = 128


def fill(target: torch.Tensor, component: str, layer: int) -> None:
    """Bytes that tell pages, layers and components apart."""
    pages = torch.arange(len(target), dtype=torch.int64, device=target.device)
    target.copy_(((pages * 7 + layer * 31 + len(component)) % 251).to(torch.uint8)[:, None].expand_as(target))


class Bench:
    """The readers of one case on one rank, and what each of them reads from."""

    def __init__(self, case: PoolCase, rank: int) -> None:
        self.case, self.rank = case, rank
        self._close: list[Callable[[], None]] = []
        self.device = self._open_device()
        self.clock = Clock(self.device)
        self.layout = CacheLayout(
            case.layers,
            (
                latent(PAGE_SIZE, range(case.layers), bytes_per_token=LATENT_BYTES),
                index_k(PAGE_SIZE, range(case.layers), key_bytes=KEY_BYTES, scale_bytes=INDEX_BYTES - KEY_BYTES),
            ),
        )
        self.place = RankCoordinates(cp=rank)
        self.sizes = ParallelSizes(cp=case.ranks)
        self.order = [(name, layer) for layer in range(case.layers) for name in ("index_k", "latent")]
        pages = np.random.default_rng(1).permutation(case.num_pages)
        table = pages[: -(-(case.live_tokens + case.chunk_tokens) // PAGE_SIZE)]
        self.span = ReadSpan(table.tolist(), case.live_tokens)
        self.full = torch.from_numpy(np.sort(table[: case.live_tokens // PAGE_SIZE])).to(self.device)
        tokens = np.arange(case.live_tokens, case.live_tokens + case.chunk_tokens)
        self.chunk_slots = torch.from_numpy(table[tokens // PAGE_SIZE] * PAGE_SIZE + tokens % PAGE_SIZE).to(self.device)
        width, kind = case.product_width, torch.float32 if self.pool_device is None else torch.bfloat16
        self.activations = torch.ones((max(1, case.chunk_tokens), width), dtype=kind, device=self.device)
        self.weight = torch.eye(width, dtype=kind, device=self.device)
        self.new_rows = {
            one.name: {
                field.name: torch.zeros((case.chunk_tokens, field.token_bytes), dtype=torch.uint8, device=self.device)
                for field in one.fields
            }
            for one in self.layout.components
        }
        self.pools = {one: self._pool(one) for one in case.readers if one in ("none", "broadcast", "peer")}
        self.others = {one: self._other(one) for one in case.readers if one not in self.pools}

    def close(self) -> None:
        for one in reversed(self._close):
            one()

    def run(self, reader: str) -> tuple[float, int]:
        """One round: milliseconds (of a layer, or of the loop), and the bytes that one layer of another rank took."""
        pool = self.pools.get(reader)
        moved_before, layers_before = self._moved(reader)
        taken: list[float] = []
        on_cuda = self.pool_device is not None
        meet()
        started = self.clock.now()
        if pool is not None:
            pool.begin_forward([self.span], self.order)
        for layer in range(self.case.layers):
            if not self.case.loop:
                meet()
                self.clock.lead()
            at = self.clock.now()
            read = [self.read(reader, name, layer) for name in ("index_k", "latent")]
            if not self.case.loop:
                taken.append(self.clock.since(at))
            if self.case.loop:
                self.compute(pool, layer)
            else:
                self._check(reader, read, layer)
        if self.case.loop and not on_cuda:
            self._check(reader, read, self.case.layers - 1)
        if self.case.loop and on_cuda:
            # The device's own time from begin to the last product; bytes are checked outside it.
            taken.append(self.clock.since(started))
            self._check(reader, read, self.case.layers - 1)
        if pool is not None:
            pool.end_forward()
        if self.case.loop and not on_cuda:
            taken.append(self.clock.since(started))
        times = torch.tensor(taken, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        moved, layers = self._moved(reader)
        return float(times.median()) * 1e3, (moved - moved_before) // max(1, layers - layers_before)

    def read(self, reader: str, component: str, layer: int) -> torch.Tensor:
        """One component of one layer, as `reader` reads it."""
        pool = self.pools.get(reader)
        if pool is not None:
            return pool.read(component, layer)
        return self.others[reader].read(component, layer)

    def compute(self, pool: LayerShardedPool | None, layer: int) -> None:
        """What a layer does besides: matrix products, and its chunk's rows written."""
        for _ in range(self.case.products):
            self.activations = self.activations @ self.weight
        if pool is not None and self.case.chunk_tokens:
            for component, rows in self.new_rows.items():
                pool.write(component, layer, self.chunk_slots, rows)

    def _check(self, reader: str, read: list[torch.Tensor], layer: int) -> None:
        if reader not in self.pools and not self.others[reader].has_pages:
            return
        for component, tensor in zip(("index_k", "latent"), read, strict=True):
            want = torch.empty_like(tensor[self.full])
            want.copy_(((self.full * 7 + layer * 31 + len(component)) % 251).to(torch.uint8)[:, None].expand_as(want))
            if not torch.equal(tensor[self.full], want):
                raise IntegrityError(f"{reader}: rank {self.rank} read wrong bytes of {component!r} layer {layer}")

    def _moved(self, reader: str) -> tuple[int, int]:
        """Bytes moved so far, and how many layers that was."""
        if reader in self.others:
            other = self.others[reader]
            return other.nbytes_moved, other.num_reads // len(self.layout.components)
        stats = self.pools[reader].stats
        return stats.nbytes_moved, stats.fetches // len(self.layout.components)

    def _pool(self, reader: str) -> LayerShardedPool:
        kind = PlanKind.REPLICATED if reader == "none" else PlanKind.SPLIT
        plan = LayerPlan.balanced(self.layout, self.sizes, kind)
        made: LayerReader | None = None
        if reader != "none":
            maker: type[BroadcastReader | PeerReader] = PeerReader if reader == "peer" else BroadcastReader
            owners = ShardOwners.of(self.layout, plan, self.place)
            made = maker.open(owners, range(self.case.ranks), timeout_s=self.case.readers_wait_s)
            self._close.append(made.close)
        pool = LayerShardedPool(
            self.layout,
            plan.owned[self.place],
            self.case.num_pages,
            reader=made,
            prefetch=self.case.ahead,
            device=self.pool_device,
        )
        self._close.append(pool.close)
        for name, layers in pool.owned.items():
            for layer in layers:
                fill(pool.region_tensor(name, layer), name, layer)
        for name in pool.owned:
            for buffer in pool.scratch_buffers(name):
                buffer.zero_()
        return pool

    def _other(self, reader: str) -> WholePool | PlainCopy | SglangPool:
        plan = LayerPlan.balanced(self.layout, self.sizes)
        table = dict(ShardOwners.of(self.layout, plan, self.place).table)
        page_bytes = {one.name: one.page_bytes for one in self.layout.components}
        if reader == "copy":
            live = {name: nbytes * -(-self.case.live_tokens // PAGE_SIZE) for name, nbytes in page_bytes.items()}
            return PlainCopy(table, self.rank, live, self.device)
        if reader == "sglang":
            return SglangPool(self.rank, self.case.ranks, self.case.layers, self.case.pool_tokens, PAGE_SIZE, fill)
        whole = WholePool(table, self.rank, self.case.num_pages, page_bytes, self.device)
        for (name, layer), tensor in whole.owned.items():
            fill(tensor, name, layer)
        return whole

    def _open_device(self) -> torch.device:
        """Where tensors go; on GPUs also the pools' device, which is closed last."""
        self.pool_device: PoolDevice | None = None
        if self.case.device == "cpu":
            return torch.device("cpu")
        from pdlink.memory.cuda_device import CudaDevice

        index = self.rank % max(1, torch.cuda.device_count())
        self.pool_device = CudaDevice(index, num_blocks=self.case.copy_blocks or None)
        self._close.append(self.pool_device.close)
        torch.cuda.set_device(index)
        return self.pool_device.torch_device


def join(case: PoolCase, rank: int, folder: str) -> None:
    """Be `rank` of the world that meets in `folder`, on a GPU of its own where the case is for those. Collective."""
    torch.set_num_threads(1)
    on_cuda = case.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank % max(1, torch.cuda.device_count()))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=case.wait_s),
    )


def meet() -> None:
    """Every rank is here, and its device idle."""
    dist.all_reduce(torch.zeros(1))
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def pick(bench: Bench) -> str:
    """What a pool would choose here, and why. Collective."""
    communicator = GroupCommunicator(range(bench.case.ranks), timeout_s=bench.case.wait_s)
    try:
        facts = exchange_facts(communicator, bench.pool_device)
    finally:
        communicator.close()
    memory = MemoryKind.HOST if bench.pool_device is None else bench.pool_device.memory
    return choose_reader(memory, facts, layer_token_bytes(bench.layout), live_tokens=bench.case.live_tokens).reason


def main() -> None:
    parent = Parent()
    rank, folder, case = int(sys.argv[1]), sys.argv[2], PoolCase.from_json(sys.argv[3])
    join(case, rank, folder)
    bench = Bench(case, rank)
    try:
        picked = pick(bench)
        if rank == 0:
            parent.say(picked)
        for number in range(-1, case.rounds):
            for reader in case.readers:
                ms, nbytes = bench.run(reader)
                moved = torch.tensor([nbytes], dtype=torch.int64)
                dist.all_reduce(moved, dist.ReduceOp.MAX)
                # The first round touches memory and counts for nothing.
                if rank == 0 and number >= 0:
                    parent.say([reader, ms, int(moved)])
        meet()
    finally:
        bench.close()
    if rank == 0:
        parent.say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
