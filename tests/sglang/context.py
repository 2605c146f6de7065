"""Owns sglang's process-wide context in a test process: arguments, ranks and gloo groups, as its launcher has them."""

from __future__ import annotations

import os
from typing import Any

HOST = "127.0.0.1"
PAGE_SIZE = 64


def enter(rank: int, num_ranks: int, gloo_port: int, mode: str, backend: str, bootstrap_port: int) -> Any:
    """Publish the context of rank `rank` of `num_ranks` and make its groups; returns sglang's parallel context.

    Ranks of prefill are context parallel, with split layers, and those of decode are tensor parallel.

    One context for the life of the process. All ranks must call it, and each waits for the others.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="dummy")
    arguments.resolve_once()
    stated = {
        "tp_size": num_ranks,
        "attn_cp_size": num_ranks if mode == "prefill" else 1,
        "device": "cpu",
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": backend,
        "disaggregation_bootstrap_port": bootstrap_port,
        "enable_dsa_cache_layer_split": num_ranks > 1 and mode == "prefill" and "WHOLE_CACHE" not in os.environ,
        "host": HOST,
        "page_size": PAGE_SIZE,
    }
    declare_resolution(arguments, "test", **stated)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    parallel_state.init_distributed_environment(
        world_size=num_ranks,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://{HOST}:{gloo_port}",
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    parallel = get_parallel()
    # On CPU this is an NCCL communicator that cannot work, and sglang's pool would use whatever is there.
    parallel.attn_cp_group.pynccl_comm = None
    return parallel
