"""Owns one scheduler process's share of pdlink: the node, its prefill or decode worker, and what requests need of it.

It is sglang's KV manager. What a request does is in `sender` and `receiver`; what sglang's scheduler reads of a manager
beyond the abstract class is marked below, and a test holds that list to the installed sglang.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager, KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.server_args import ServerArgs

from pdlink.address import parse_address
from pdlink.decode.links import PrefillInstance
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import InvalidInput, StateError
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import PlanKind
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.worker import PrefillWorker
from pdlink.runtime.node import Node
from pdlink.threads import Death, Pool, announce
from pdlink_engines.sglang import hooks
from pdlink_engines.sglang.aux_rows import AuxRows
from pdlink_engines.sglang.components import INDEX_PAGES, KV_PAGES, translate
from pdlink_engines.sglang.draining import Draining
from pdlink_engines.sglang.http_answers import PrefillFacts
from pdlink_engines.sglang.layer_ids import LayerIds, PoolFacts
from pdlink_engines.sglang.offers import offered
from pdlink_engines.sglang.place import bootstrap_address, place_of, with_draft_of_last_rank
from pdlink_engines.sglang.prefill_servers import HTTP_THREADS, PrefillServers
from pdlink_engines.sglang.publisher import Publisher
from pdlink_engines.sglang.recompute import request_recompute
from pdlink_engines.sglang.settings import check_served, process_settings

log = logging.getLogger("pdlink.sglang")

PART = "sglang manager"
DP_QUERY_THREADS = 8
"""Apart from the others: sglang takes their answers on the scheduler's thread."""
RECOMPUTE_THREADS = 16
"""Apart from the others: each waits until prefill has computed a request."""


class PdlinkKVManager(BaseKVManager):
    """The manager that sglang's prefill and decode queues make, one in each scheduler process.

    Memory rule: the buffers of `KVArgs` stay mapped until `close`, or until sglang gives its memory back through
    `deregister_buffer_to_engine`. Raises `PdlinkError` naming what cannot be served; the scheduler ends with it.
    """

    # Read by the scheduler: what failed on another rank keeps its pages until nothing can land in them any more.
    enable_deferred_decode_kv_release = True
    supports_deferred_decode_kv_release = True
    # Read by the scheduler: every CP rank publishes what it owns, so none only looks on.
    is_dummy_cp_rank = False
    enable_all_cp_ranks_for_transfer = True

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        hooks.check_applied()
        self.kv_args = args
        self.server_args = server_args
        self.disaggregation_mode = disaggregation_mode
        self.is_prefill = disaggregation_mode is DisaggregationMode.PREFILL
        self.place = place_of(args, bool(is_mla_backend))
        self.settings = process_settings()
        check_served(get_server_args(), self.settings)
        self.pool = _pool_facts(args)
        self.cache = translate(args, self.pool.model, memory=self.pool.memory)
        self.aux = AuxRows(self.cache.aux, self.settings.max_aux_bytes)
        self.waiting_timeout_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        self.bootstrap_timeout_s = float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        # Read by the scheduler (role switching, health reports).
        self.attn_cp_rank, self.attn_cp_size = get_parallel().attn_cp_rank, get_parallel().attn_cp_size
        self._http = ThreadPoolExecutor(HTTP_THREADS, thread_name_prefix="pdlink-http")
        self._background = Pool("pdlink-background", PART, HTTP_THREADS)
        self._dp_queries = ThreadPoolExecutor(DP_QUERY_THREADS, thread_name_prefix="pdlink-dp-query")
        self._recomputing = Pool("pdlink-recompute", PART, RECOMPUTE_THREADS)
        self._servers = PrefillServers(self._http, self.settings.resolve_timeout_s)
        self._draining = Draining()
        self._node: Node | None = None
        self._worker: PrefillWorker | DecodeWorker | None = None
        self.publisher = Publisher(self.settings.transfer_timeout_s, self._on_death)
        self.register_buffer_to_engine()

    # --- for senders and receivers ------------------------------------------------------------------

    @property
    def layout(self) -> CacheLayout:
        return self.cache.layout

    @property
    def has_index_pages(self) -> bool:
        """Whether requests have a page list for index keys beside that of the KV."""
        return any(group.name == INDEX_PAGES for group in self.layout.page_groups)

    @property
    def page_size(self) -> int:
        """In tokens."""
        return self.layout.page_group(KV_PAGES).page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers that this rank has."""
        return sum(region.page_bytes for region in self.cache.regions)

    @property
    def prefill_worker(self) -> PrefillWorker:
        if not isinstance(self._worker, PrefillWorker):
            raise StateError("this rank does not serve prefill requests (now)")
        return self._worker

    @property
    def decode_worker(self) -> DecodeWorker:
        if not isinstance(self._worker, DecodeWorker):
            raise StateError("this rank does not receive requests (now)")
        return self._worker

    def prefill_instance(self, bootstrap_addr: str) -> PrefillInstance:
        """The prefill ranks behind sglang's `host:port` text that this rank pulls from."""
        return PrefillInstance(self.place.instance, (parse_address(bootstrap_addr),))

    def in_background(self, call: Any, *arguments: Any) -> None:
        """Run a call that may block, away from the scheduler's thread."""
        try:
            self._background.submit(partial(call, *arguments))
        except StateError as error:
            log.debug("%s is not called: %s", call, error)

    def hold(self, room: int, receiver: Any) -> None:
        """Remember a receiver until it is quiet, for `is_abort_release_safe`."""
        self._draining.hold(room, receiver)

    def let_go(self, room: int, receiver: Any) -> None:
        self._draining.let_go(room, receiver)

    def doubt(self, bootstrap_addr: str) -> None:
        """A transfer from there failed in a way that may mean another server: ask again before the next request."""
        self._servers.forget(bootstrap_addr)

    def refusal_of(self, bootstrap_addr: str) -> str | None:
        """Why requests to that prefill server cannot work, where that is known."""
        return self._servers.refusal(bootstrap_addr)

    def trouble_of(self, bootstrap_addr: str) -> str | None:
        """Why that prefill server is not known (yet), where it was asked and that failed."""
        return self._servers.trouble(bootstrap_addr)

    # --- read or called by sglang's scheduler -------------------------------------------------------

    @property
    def prefill_info_table(self) -> dict[str, PrefillFacts]:
        """Bootstrap address -> what is known of the prefill server; the scheduler only reads it."""
        return self._servers.known

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill server is known. If not, it is asked in the background, and sglang tries again."""
        return self._servers.look(bootstrap_addr)

    def register_to_bootstrap(self) -> None:
        """Nothing: a prefill worker registers by itself, and again whenever the directory has forgotten it."""

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing can land in the pages of that room any more."""
        return self._draining.is_quiet(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Nothing: a receiver says itself whether it is quiet."""

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """Have the prefill server compute a retracted request again; one decode rank of a deployment asks."""
        if self.place.is_leader:
            told = (kv_receiver, self.prefill_info_table, payload, self.waiting_timeout_s)
            self._recomputing.submit(
                partial(request_recompute, *told), lambda death: kv_receiver.fail(f"not recomputed: {death.text}")
            )

    def _ensure_prefill_recompute_executor(self) -> ThreadPoolExecutor:
        """Threads for the scheduler's own questions about DP ranks, on which nothing else runs."""
        return self._dp_queries

    def deregister_buffer_to_engine(self) -> None:
        """sglang is about to give its KV memory back: end everything that may read or write it."""
        node, self._node, self._worker = self._node, None, None
        if node:
            node.close()

    def register_buffer_to_engine(self) -> None:
        """(Again) serve the buffers of `KVArgs`. Prefill ranks register anew, as another incarnation."""
        if self._node:
            return
        node = Node(self.settings)
        try:
            self._worker = self._start(node)
        except BaseException:
            node.close()
            raise
        self._node = node
        log.info(
            "pdlink serves %s rank %s over %s: %d regions, layers %s",
            "prefill" if self.is_prefill else "decode",
            self.place.rank,
            ", ".join(offered(node.backends) if self.is_prefill else node.backends),
            len(self.cache.regions),
            {name: len(layers) for name, layers in self.cache.owned.items()},
        )

    def _on_death(self, death: Death) -> None:
        """A publishing thread has died: the node's health must show it, and whoever listens to its events."""
        if node := self._node:
            announce(death, node.events)

    def teardown(self) -> None:
        self.close()

    def close(self) -> None:
        """End every request and thread. Twice is fine."""
        self.publisher.close()
        for pool in (self._background, self._recomputing):
            pool.close()
        for threads in (self._http, self._dp_queries):
            threads.shutdown(wait=False, cancel_futures=True)
        self.deregister_buffer_to_engine()

    def _start(self, node: Node) -> PrefillWorker | DecodeWorker:
        if not self.is_prefill:
            return node.decode(self.place.readers.decode_instance, self.layout, self.cache.regions)
        kind = PlanKind.SPLIT if self.pool.is_split else PlanKind.REPLICATED
        kinds = {one.name: kind for one in self.layout.components}
        rank = PrefillRank(
            self.place.instance,
            self.layout,
            self.place.sizes,
            self.place.rank,
            kinds,
            self.cache.owned,
            self.cache.regions,
        )
        return node.prefill(rank, [bootstrap_address()])


def _pool_facts(args: KVArgs) -> PoolFacts:
    ids = args.kv_layer_ids
    if not isinstance(ids, LayerIds):
        raise InvalidInput(
            f"kv_layer_ids is a plain {type(ids).__name__}: sglang's build_kv_layer_ids did not ask pdlink, so this "
            "rank's pool is unknown"
        )
    return PoolFacts(with_draft_of_last_rank(ids.facts.model, ids.facts.is_split), ids.facts.memory, ids.facts.is_split)
