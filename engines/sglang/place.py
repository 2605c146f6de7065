"""Owns where this scheduler process stands: its instance, rank, readers and bootstrap address, in pdlink's words.

sglang keeps all of it in its process-wide runtime context, which is read once, when a manager is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving
from sglang.srt.utils.network import NetworkAddress

from pdlink.address import Address
from pdlink.errors import LayoutError
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.readers import ReaderSet
from pdlink_engines.sglang.components import DsaModel, Model
from pdlink_engines.sglang.settings import own_host

MAX_DRAFT_LAYERS = 62
"""A draft's layers travel between ranks as bits of one integer."""


@dataclass(frozen=True, slots=True)
class Place:
    """One scheduler process.

    `instance` is what prefill registers as and decode asks for. A bootstrap server belongs to one deployment, so that
    the name says no more than which heads are meant: `kv` where every tensor-parallel rank caches the same (MLA), and
    `kv.tp1of2` where rank 1 of 2 caches heads of its own, so that only equal splits find each other.
    """

    instance: str
    sizes: ParallelSizes
    rank: RankCoordinates
    readers: ReaderSet
    is_leader: bool


def place_of(kv_args: Any, is_mla: bool) -> Place:
    """Where this process stands."""
    parallel = get_parallel()
    in_replicas = parallel.dp_size > 1
    dp = (kv_args.system_dp_rank or 0) if in_replicas else parallel.attn_dp_rank
    tp, num_tp = parallel.attn_tp_rank, parallel.attn_tp_size
    sizes = ParallelSizes(parallel.num_dp_ranks, 1, parallel.attn_cp_size, num_tp)
    rank = RankCoordinates(dp, 0, parallel.attn_cp_rank, tp)
    readers = ReaderSet(f"decode-{_own_name()}/dp{dp}", tp, num_tp)
    instance = "kv"
    if not is_mla:
        instance = f"kv.tp{tp}of{num_tp}"
        sizes, rank, readers = replace(sizes, tp=1), replace(rank, tp=0), ReaderSet(readers.decode_instance)
        readers = replace(readers, decode_instance=f"{readers.decode_instance}.tp{tp}")
    return Place(instance, sizes, rank, readers, tp == 0 and parallel.attn_cp_rank == 0)


def bootstrap_address() -> Address:
    """Where the ranks of this prefill deployment register: the node that `--dist-init-addr` names, or this one."""
    parallel, port = get_parallel(), get_disagg().disaggregation_bootstrap_port
    if parallel.dist_init_addr:
        return Address(NetworkAddress.parse(parallel.dist_init_addr).resolved().host, port)
    host = get_serving().host
    if Address(host, 0).is_wildcard:
        host = "::1" if ":" in host else "127.0.0.1"
    return Address(host, port)


def with_draft_of_last_rank(model: Model, is_split: bool) -> Model:
    """The model with the draft that the last CP rank has, which alone hands its draft's buffers to PD transfer.

    All CP ranks of a layer-split instance must call it, and each waits for the others.
    """
    parallel = get_parallel()
    if not is_split or parallel.attn_cp_size == 1 or not isinstance(model, DsaModel):
        return model
    if model.num_draft_layers > MAX_DRAFT_LAYERS or model.draft_dtype not in ("", model.dtype):
        raise LayoutError(
            f"a draft of {model.num_draft_layers} layers of dtype {model.draft_dtype} cannot be split beside a model "
            f"of dtype {model.dtype}; at most {MAX_DRAFT_LAYERS} layers of the model's own dtype"
        )
    bits = sum(1 << layer for layer in model.draft_index_layers)
    told = torch.tensor([model.num_draft_layers, model.draft_latent_bytes_per_token, bits], dtype=torch.int64)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=parallel.attn_cp_group.cpu_group)
    num_layers, nbytes, bits = told.tolist()
    layers = tuple(layer for layer in range(num_layers) if bits >> layer & 1)
    return replace(
        model,
        num_draft_layers=num_layers,
        draft_latent_bytes_per_token=nbytes,
        draft_index_layers=layers,
        draft_dtype=model.dtype if num_layers else "",
    )


def _own_name() -> str:
    """A name that all ranks of this deployment share and no other deployment has."""
    first = get_parallel().dist_init_addr
    return f"{first or own_host()}:{get_serving().port}"
