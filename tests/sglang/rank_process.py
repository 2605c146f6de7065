"""Owns one prefill or decode rank of the real sglang, without a model: its real pool, queue, manager, senders and
receivers, driven by commands. It decides nothing about what is right.

    python -m tests.sglang.rank_process ROLE RANK NUM_RANKS NUM_LAYERS GLOO_PORT BOOTSTRAP_PORT BACKEND
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.sglang import context, pools, talk

NUM_AUX_ROWS = 8
POLL_PAUSE_S = 0.002
TIMEOUT_S = 60.0
DRAFT_SEED = 10_000


class Rank:
    """What both roles have: a pool, metadata buffers, and a manager that can be made anew for another transport."""

    def __init__(
        self, role: str, rank: int, num_ranks: int, num_layers: int, ports: tuple[int, int], backend: str
    ) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self.role, self.rank, self.num_ranks = role, rank, num_ranks
        self.parallel = context.enter(rank, num_ranks, ports[0], role, backend, ports[1])
        self.bootstrap_port = ports[1]
        self.backend = backend
        self.num_layers = num_layers
        self.is_foreign = os.environ.get("SGLANG_PLUGINS") == "none"
        # The last layer of several shares the index keys of the one before it.
        shared = (num_layers - 1,) if num_layers > 3 else ()
        num_shards = num_ranks if role == "prefill" and "WHOLE_CACHE" not in os.environ else 1
        page_size = int(os.environ.get("MLA_PAGE_SIZE", "0"))
        self.pool = (
            pools.make_mla_pool(num_layers, page_size)
            if page_size
            else pools.make_pool(num_layers, rank, num_shards, shared)
        )
        draft_layers = int(os.environ.get("DRAFT_LAYERS", "0"))
        self.draft_pool = pools.make_pool(draft_layers) if draft_layers else None
        self.manager: Any = None
        self.bootstrap: Any = None
        self.requests: dict[int, Any] = {}

    def kv_class(self, kind: str) -> Any:
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        return get_kv_class(TransferBackend(self.backend), KVClassType(kind))

    def serve_bootstrap(self) -> int:
        self.bootstrap = self.kv_class("bootstrap_server")(context.HOST, self.bootstrap_port)
        return self.bootstrap_port

    def serve_bootstrap_again(self) -> str:
        """What ends a second server at the same port."""
        try:
            self.kv_class("bootstrap_server")(context.HOST, self.bootstrap_port).close()
        except SystemExit as refused:
            return str(refused)
        return "it serves"

    def start(
        self,
        transports: str = "",
        environ: dict[str, str] | None = None,
        hidden_size: int = 16,
        cache_dtype: str = "bfloat16",
    ) -> dict[str, Any]:
        """Make the manager, over the named transports."""
        self.stop()
        os.environ.update(environ or {})
        if transports:
            os.environ["PDLINK_BACKENDS"] = transports
        if self.is_foreign:
            _start_mooncake()
        self.metadata = _metadata(hidden_size)
        self.manager = self._make_manager(cache_dtype)
        return self._told()

    def stop(self) -> None:
        if self.manager is not None and hasattr(self.manager, "close"):
            self.manager.close()
        self.manager = None
        self.requests.clear()

    def close(self) -> None:
        self.stop()
        if self.bootstrap is not None:
            self.bootstrap.close()

    def poll(self, room: int) -> int:
        return int(self.requests[room].poll())

    def explain(self, room: int) -> str:
        """The text of sglang's own failure path."""
        from sglang.srt.disaggregation.common.conn import KVTransferError

        try:
            self.requests[room].failure_exception()
        except KVTransferError as error:
            return f"{'(another rank) ' if error.is_from_another_rank else ''}{error}"
        return "it raised nothing"

    def abort(self, room: int) -> None:
        self.requests[room].abort()

    def forget(self, room: int) -> None:
        self.requests.pop(room).clear()

    def missing(self, names: list[str], of: str, room: int = 0) -> list[str]:
        """Which of `names` the live object does not have."""
        target = {"manager": self.manager, "bootstrap": self.bootstrap}.get(of) or self.requests[room]
        return [name for name in names if not hasattr(target, name)]

    def commands(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in dir(self)
            if not name.startswith("_") and callable(getattr(self, name)) and name not in ("close", "commands")
        }

    def _make_manager(self, cache_dtype: str) -> Any:
        raise AssertionError("a role makes its manager")

    def _told(self) -> dict[str, Any]:
        args = self.manager.kv_args
        return {
            "layer_ids": list(args.kv_layer_ids),
            "num_kv": len(args.kv_data_ptrs),
            "type": type(self.manager).__name__,
        }


def _start_mooncake() -> None:
    """The engine that sglang's own mooncake backend wants to find."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine

    init_mooncake_transfer_engine(hostname=context.HOST, gpu_id=0, ib_device=None)


def _metadata(hidden_size: int) -> Any:
    import torch
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return MetadataBuffers(
        NUM_AUX_ROWS, hidden_size=hidden_size, hidden_states_dtype=torch.float32, max_sampling_mask_tokens=1
    )


class Prefill(Rank):
    """One CP rank of a prefill server."""

    def fill(self, seed: int) -> None:
        pools.fill(self.pool, seed)
        if self.draft_pool is not None:
            pools.fill(self.draft_pool, seed + DRAFT_SEED)

    def open(self, room: int) -> None:
        address = f"{context.HOST}:{self.bootstrap_port}"
        self.requests[room] = self.kv_class("sender")(self.manager, address, room)

    def open_with_dp_ranks(self, room: int, num_dp_ranks: int, method: str) -> None:
        """As on DP rank 0 of several."""
        with self.parallel.override(num_dp_ranks=num_dp_ranks, load_balance_method=method):
            self.open(room)

    def poll_all_until(self, room: int, states: list[int], timeout_s: float = TIMEOUT_S) -> int:
        """What sglang's own collective poll says once it is one of `states`, or after a while. All ranks call it."""
        from sglang.srt.disaggregation.utils import poll_and_all_reduce_attn_cp_tp_group

        groups = (self.parallel.attn_cp_group.cpu_group, self.parallel.attn_tp_group.cpu_group)
        clock = _Clock(timeout_s)
        while True:
            # The ranks must leave this loop together, so the time is agreed on like a request's state.
            polls = poll_and_all_reduce_attn_cp_tp_group([self.requests[room], clock], *groups)
            if polls[0] in states or polls[1] == 0:
                return int(polls[0])
            time.sleep(POLL_PAUSE_S)

    def poll_alone_until(self, room: int, states: list[int], timeout_s: float = TIMEOUT_S) -> int:
        """As above without the other ranks, which may be gone."""
        clock = _Clock(timeout_s)
        while self.poll(room) not in states and clock.poll():
            time.sleep(POLL_PAUSE_S)
        return self.poll(room)

    def give_memory_back(self) -> None:
        """sglang's release and resume of memory occupation."""
        self.manager.deregister_buffer_to_engine()
        self.manager.register_buffer_to_engine()

    def begin(self, room: int, num_pages: int, aux_index: int) -> int:
        """`finalize_bootstrap` of sglang's queue: returns the tokens that decode has."""
        prefix = self.requests[room].pop_decode_prefix_len()
        self.requests[room].init(num_pages, aux_index)
        return int(prefix)

    def send(
        self, room: int, pages: list[int], last: bool, index_pages: list[int] | None = None, aux: int = -1
    ) -> None:
        """`_send_kv_chunk` of sglang's scheduler."""
        if last:
            self.metadata.output_ids[aux, 0] = 4242 + room
            self.metadata.bootstrap_room[aux, 0] = room
        state = [np.array(index_pages, dtype=np.int32)] if last else None
        self.requests[room].send(np.array(pages, dtype=np.int32), state, num_kv_tokens=len(pages) * context.PAGE_SIZE)
        if last:
            # sglang may give the row to the next request as soon as this one is a success.
            self.metadata.output_ids[aux, 0] = -1

    def send_after(self, room: int, pages: list[int], seed: int) -> bool:
        """Send pages whose bytes are written only after `send` has returned, guarded by an event, as early sends of
        cached prefixes are. Returns whether anything was published before."""
        event = _Event()
        pools.blank(self.pool)
        self.requests[room]._early_send_wait_event = event
        self.requests[room].send(np.array(pages, dtype=np.int32), None)
        asked = event.wait_until_asked(TIMEOUT_S)
        pools.fill(self.pool, seed)
        event.happened = True
        return asked

    def metric(self, room: int) -> int:
        return int(self.requests[room].get_transfer_metric().transfer_total_bytes)

    def _make_manager(self, cache_dtype: str) -> Any:
        """Through sglang's own queue, which fills `KVArgs`."""
        from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
        from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator, TransferBackend
        from sglang.srt.runtime_context import get_server_args

        scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(
                    effective_logical_max_total_num_tokens=pools.NUM_TOKENS, kv_cache_dtype_str=cache_dtype
                )
            ),
            kv_shard_widening=1,
            token_to_kv_pool_allocator=SimpleNamespace(page_size=context.PAGE_SIZE),
            rust_server=None,
            model_config=SimpleNamespace(num_hidden_layers=self.num_layers, hf_text_config=SimpleNamespace()),
            server_args=get_server_args(),
            req_to_token_pool=None,
            attn_cp_cpu_group=self.parallel.attn_cp_group.cpu_group,
            attn_tp_cpu_group=self.parallel.attn_tp_group.cpu_group,
        )
        queue = PrefillBootstrapQueue(
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=self.draft_pool,
            req_to_metadata_buffer_idx_allocator=ReqToMetadataIdxAllocator(NUM_AUX_ROWS),
            metadata_buffers=self.metadata,
            gpu_id=0,
            bootstrap_port=self.bootstrap_port,
            max_total_num_tokens=pools.NUM_TOKENS,
            scheduler=scheduler,
            scheduler_stage_metrics=None,
            transfer_backend=TransferBackend(self.backend),
        )
        return queue.kv_manager


class _Clock:
    """Polls 0 once its time is over."""

    def __init__(self, timeout_s: float) -> None:
        self.give_up = time.monotonic() + timeout_s

    def poll(self) -> int:
        return int(time.monotonic() < self.give_up)


class _Event:
    """A CUDA event as the scheduler records one, on a machine without CUDA."""

    def __init__(self) -> None:
        self.happened = False
        self.num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        return self.happened

    def wait_until_asked(self, timeout_s: float) -> bool:
        give_up = time.monotonic() + timeout_s
        while self.num_asked < 3 and time.monotonic() < give_up:
            time.sleep(POLL_PAUSE_S)
        return self.num_asked >= 3


class Decode(Rank):
    """One TP rank of a decode server; each has the whole cache of a DSA model."""

    def blank(self) -> None:
        pools.blank(self.pool)
        if self.draft_pool is not None:
            pools.blank(self.draft_pool)

    def differences(self, seed: int, source: list[int], target: list[int]) -> list[str]:
        wrong = pools.differences(self.pool, seed, source, target)
        if self.draft_pool is not None:
            wrong += [f"draft {one}" for one in pools.differences(self.draft_pool, seed + DRAFT_SEED, source, target)]
        return wrong

    def ensure(self, bootstrap_port: int, num_attempts: int = 100) -> bool:
        """sglang's retry loop around `try_ensure_parallel_info`."""
        for _ in range(num_attempts):
            if self.manager.try_ensure_parallel_info(f"{context.HOST}:{bootstrap_port}"):
                return True
            time.sleep(0.1)
        return False

    def open(self, room: int, bootstrap_port: int) -> int:
        receiver = self.kv_class("receiver")(self.manager, f"{context.HOST}:{bootstrap_port}", room)
        self.requests[room] = receiver
        if receiver.poll() != 1:
            raise AssertionError(f"a new receiver polls {receiver.poll()}")
        receiver.init(0)
        return int(receiver.poll())

    def abort_before_known(self, room: int, bootstrap_port: int) -> int:
        """What sglang does with a request whose prefill server it cannot reach."""
        receiver = self.kv_class("receiver")(self.manager, f"{context.HOST}:{bootstrap_port}", room)
        self.requests[room] = receiver
        receiver.abort()
        return int(receiver.poll())

    def dp_query_beside_blocked_asks(self, timeout_s: float) -> bool:
        """Whether the scheduler's questions are answered while more calls than there are threads wait elsewhere."""
        release = threading.Event()
        try:
            for _ in range(32):
                self.manager.in_background(release.wait, timeout_s)
            asked = self.manager._ensure_prefill_recompute_executor().submit(lambda: not release.is_set())
            return bool(asked.result(timeout_s / 2))
        finally:
            release.set()

    def dp_ranks(self, rooms: list[int], bootstrap_port: int) -> dict[str, int]:
        """What sglang's own code is told of these rooms."""
        address = f"{context.HOST}:{bootstrap_port}"
        return dict(self.kv_class("receiver").query_prefill_dp_ranks(address, rooms))

    def receive(self, room: int, pages: list[int], aux: int, prefix_tokens: int = 0) -> None:
        self.metadata.clear_slot(aux)
        target = np.array(pages, dtype=np.int32)
        self.requests[room].send_metadata(target, aux, [target], decode_prefix_len=prefix_tokens)

    def poll_until_final(self, room: int, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Every state that was seen, in order."""
        seen: list[int] = []
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            now = self.poll(room)
            if not seen or seen[-1] != now:
                seen.append(now)
            if now in (0, 4):
                break
            time.sleep(POLL_PAUSE_S)
        return seen

    def aux(self, index: int) -> dict[str, int]:
        return {
            "room": int(self.metadata.bootstrap_room[index, 0]),
            "token": int(self.metadata.output_ids[index, 0]),
        }

    def quiet_within(self, room: int, timeout_s: float) -> bool:
        clock = _Clock(timeout_s)
        while not self.manager.is_abort_release_safe(room, 1) and clock.poll():
            time.sleep(POLL_PAUSE_S)
        return bool(self.manager.is_abort_release_safe(room, 1))

    def let_another_rank_fail(self, room: int) -> str:
        """What sglang's transfer queue does on this rank when a sibling polls Failed."""
        text = self.explain(room)
        self.requests[room].ensure_abort_notified(force_arm=True)
        return text

    def _make_manager(self, cache_dtype: str) -> Any:
        """As sglang's decode queue fills `KVArgs`."""
        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.utils import (
            DisaggregationMode,
            build_kv_layer_ids,
            get_kv_transfer_buf_infos,
            get_pd_kv_layout,
            setup_state_kv_args,
        )
        from sglang.srt.runtime_context import get_server_args

        args = KVArgs()
        args.engine_rank, args.pp_rank, args.gpu_id = self.rank, 0, 0
        args.system_dp_rank = args.ib_device = None
        args.kv_cache_dtype_str = cache_dtype
        args.kv_layout = get_pd_kv_layout(self.pool)
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(self.pool)
        args.num_draft_entries = 0
        if self.draft_pool is not None:
            ptrs, lens, items = self.draft_pool.get_contiguous_buf_infos()
            args.kv_data_ptrs += ptrs
            args.kv_data_lens += lens
            args.kv_item_lens += items
            args.num_draft_entries = len(ptrs)
        args.kv_layer_ids = build_kv_layer_ids(
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=self.draft_pool,
            num_draft_entries=args.num_draft_entries,
            num_hidden_layers=self.num_layers,
        )
        if self.backend == "nixl":
            # sglang says so of every pool, one on CPU too.
            args.kv_data_mem_kinds = ["VRAM"] * len(args.kv_data_ptrs)
        args.page_size = self.pool.page_size
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        setup_state_kv_args(args, self.pool, self.draft_pool, self.num_layers, req_to_token_pool=None)
        return self.kv_class("manager")(args, DisaggregationMode.DECODE, get_server_args(), True)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    role, backend = sys.argv[1], sys.argv[7]
    rank, num_ranks, num_layers, gloo_port, bootstrap_port = map(int, sys.argv[2:7])
    kind = Prefill if role == "prefill" else Decode
    one = kind(role, rank, num_ranks, num_layers, (gloo_port, bootstrap_port), backend)
    talk.serve(one.commands(), one.close)


if __name__ == "__main__":
    main()
