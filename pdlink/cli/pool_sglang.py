"""Owns sglang's own layer-split pool as a row of the pool benches, where sglang is installed. Only its pool is used.

sglang imports its kernels' packages on the way to the pool, which then uses none of them: those that are not installed
are replaced by empty ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pdlink.errors import BackendUnavailable

LATENT_RANK, ROPE_DIMS, LATENT_BYTES, KEY_DIMS = 512, 64, 656, 128
KERNELS = (
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "sgl_deep_gemm",
    "tilelang",
    "flash_mla",
    "deep_ep",
    "cutlass",
    "quack",
    "flash_attn",
    "xgrammar",
)


class SglangPool:
    """Reads of sglang 0.5.23's `LayerSplitDSATokenToKVPool`, packed fp8 latent rows and indexer keys, on this GPU.

    Making it is collective: sglang forms its groups on the default process group. `fill` writes owned layers as it does
    those of the other readers. Raises `BackendUnavailable` without sglang.
    """

    has_pages = True

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_layers: int,
        num_tokens: int,
        page_size: int,
        fill: Callable[[torch.Tensor, str, int], None],
    ) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise BackendUnavailable("--reader sglang needs sglang 0.5.23: pip install --no-deps sglang==0.5.23")
        _stub_kernels()
        shard_rank = _start_sglang(rank, num_ranks, page_size)
        # sglang adds a page of padding to the size that it is given.
        self._pool = _srt("mem_cache.dsa_cache_layer_split").LayerSplitDSATokenToKVPool(
            num_tokens - page_size,
            page_size=page_size,
            dtype=torch.float8_e4m3fn,
            kv_lora_rank=LATENT_RANK,
            qk_rope_head_dim=ROPE_DIMS,
            layer_num=num_layers,
            device="cuda",
            kv_cache_dim=LATENT_BYTES,
            enable_memory_saver=False,
            start_layer=0,
            end_layer=num_layers - 1,
            index_head_dim=KEY_DIMS,
            layer_shard_rank=shard_rank,
            layer_shard_size=num_ranks,
        )
        self._page_size = page_size
        self.nbytes_moved = self.num_reads = 0
        for layer in range(num_layers):
            if self._pool._is_layer_owned(layer):
                fill(self._pages(self._pool.kv_buffer[layer]), "latent", layer)
                fill(self._pages(self._pool.index_key_cache.buffer[layer]), "index_k", layer)

    def read(self, component: str, layer: int) -> torch.Tensor:
        """The layer, uint8 [num_pages, page_bytes], on all ranks. Collective."""
        found: torch.Tensor = (
            self._pool.get_key_buffer(layer) if component == "latent" else self._pool.index_key_cache.get_buffer(layer)
        )
        self.nbytes_moved += found.nbytes
        self.num_reads += 1
        return self._pages(found)

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """Rows by token become pages; the indexer's buffer has those already."""
        rows = buffer.view(torch.uint8).reshape(len(buffer), -1)
        return rows if rows.shape[1] != LATENT_BYTES else rows.reshape(len(rows) // self._page_size, -1)


def _start_sglang(rank: int, num_ranks: int, page_size: int) -> int:
    """What a scheduler process does before it makes its pool; returns the rank that sglang gives this one."""
    parallel_state, context = _srt("distributed.parallel_state"), _srt("runtime_context")
    args = _srt("server_args").ServerArgs(model_path="dummy")
    args.resolve_once()
    _srt("arg_groups.overrides").declare_resolution(
        args,
        "pdlink bench",
        tp_size=num_ranks,
        attn_cp_size=num_ranks,
        pp_size=1,
        device="cuda",
        disaggregation_mode="prefill",
        enable_dsa_cache_layer_split=True,
        host="127.0.0.1",
        page_size=page_size,
    )
    context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        world_size=num_ranks, rank=rank, local_rank=rank, distributed_init_method="env://", backend="nccl"
    )
    parallel_state.initialize_model_parallel(backend="nccl")
    return int(context.get_parallel().attn_cp_rank)


def _srt(module: str) -> Any:
    return importlib.import_module(f"sglang.srt.{module}")


class _AnyClass(type):
    """Whose attributes are things that can be called, subclassed and annotated with."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __or__(cls, other: object) -> Any:
        return object

    def __ror__(cls, other: object) -> Any:
        return object


class Anything(metaclass=_AnyClass):
    """Stands for whatever a package of kernels offers; used as a decorator it leaves alone what it is given."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    @classmethod
    def __get_pydantic_core_schema__(cls, *args: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Empty(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - as packages have it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = name.split(".")[0] in KERNELS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _stub_kernels() -> None:
    """Behind the finders of installed packages, so that only what is missing is replaced."""
    sys.meta_path.append(_Finder())
