"""Owns one request on one prefill rank as sglang's scheduler sees it: wanted, sent chunk by chunk, done or failed.

sglang pushes; pdlink publishes, and decode pulls. `send` says that pages are final, and the request is a success once
every reader has released them. Nothing here waits: publishing happens on the manager's threads.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from pdlink.errors import PdlinkError
from pdlink.layout.regions import MemoryKind
from pdlink.prefill.sender import Sender
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.failure import Failure, FailureReason
from pdlink_engines.sglang.components import INDEX_PAGES, KV_PAGES
from pdlink_engines.sglang.manager import PdlinkKVManager
from pdlink_engines.sglang.publisher import PublishJob
from pdlink_engines.sglang.status import sender_poll

log = logging.getLogger("pdlink.sglang")

REGISTER_TIMEOUT_S = 5.0
YIELD_EVERY_S = 100e-6
YIELD_S = 20e-6


class PdlinkKVSender(BaseKVSender):
    """One request. All calls come from the scheduler's thread.

    Memory rule: a page given to `send` stays unchanged until `poll` says Success or Failed, or `failure_exception` or
    `abort` has returned; the metadata row of `init` until the last `send` has returned.
    """

    def __init__(
        self,
        mgr: PdlinkKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_server_url = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.conclude_state: int | None = None
        # Set by the scheduler: an event that the pages of the next chunk wait for.
        self._early_send_wait_event: Any = None
        self._sender: Sender | None = None
        self._publishing = mgr.publisher.order()
        self._reason: str | None = None
        self._started_at = time.monotonic()
        self._first_page = 0
        self._num_sent = 0
        self._aux_index: int | None = None
        self._sent_at: float | None = None
        self._metric = KVTransferMetric()
        try:
            self._sender = mgr.prefill_worker.open(str(bootstrap_room))
        except PdlinkError as error:
            self._fail(str(error))
        else:
            self._tell_dp_rank(req_has_disagg_prefill_dp_rank)

    @property
    def supports_host_tensor_indices(self) -> bool:
        """Whether the scheduler may hand over page ids that a CUDA event guards. On CPU it could not make them."""
        return self.kv_mgr.pool.memory is MemoryKind.CUDA

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """`aux_index` is the row of the metadata buffers that holds the request's metadata when the last chunk is sent.
        How many pages come is left to `send`."""
        self._aux_index = aux_index

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode has already, a whole number of pages."""
        wanted = self._sender.first_pages() if self._sender else None
        self._first_page = wanted.get(KV_PAGES, 0) if wanted else 0
        return self._first_page * self.kv_mgr.page_size

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """Publish the next pages (int32 [n], ids of this rank's pool), which follow those sent before.

        The scheduler gives `state_indices`, an entry for each of `KVArgs.state_types`, with the last chunk only, which
        may have no pages. `kv_indices` is read once `indices_event` has happened, and no byte of the pages before the
        event that the scheduler may have left for them.
        """
        sender = self._sender
        if sender is None or self.conclude_state is not None:
            return
        ready, self._early_send_wait_event = self._early_send_wait_event, None
        is_last = state_indices is not None
        aux = self.kv_mgr.aux.read(self._aux_index) if is_last and self._aux_index is not None else None
        start, index_start = self._first_page + self._num_sent, self._first_page
        self._num_sent += len(kv_indices)
        self._sent_at = self._sent_at or time.monotonic()

        def publish() -> None:
            pages = _pages(kv_indices)
            if not is_last:
                sender.publish(pages, group=KV_PAGES, start_page=start, ready=ready)
            elif not self.kv_mgr.has_index_pages:
                sender.publish(pages, group=KV_PAGES, start_page=start, last=True, aux=aux, ready=ready)
            else:
                sender.publish(pages, group=KV_PAGES, start_page=start, ready=ready)
                index = _pages(state_indices[0] if state_indices else ())
                sender.publish(index, group=INDEX_PAGES, start_page=index_start, last=True, aux=aux)

        self.kv_mgr.publisher.submit(self._publishing, PublishJob(indices_event, publish, sender.fail))

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def get_max_transfer_tokens(self) -> int | None:
        return None

    def mark_prefill_complete(self) -> None:
        """Nothing: decode allocates before prefill computes, the only policy that pdlink serves."""

    def get_transfer_metric(self) -> KVTransferMetric:
        """Bytes that this rank published, as often as readers pull them."""
        copies = len(self._sender.attempts()) if self._sender else 1
        self._metric.transfer_total_bytes = self._num_sent * self.kv_mgr.page_bytes * max(1, copies)
        return self._metric

    def poll(self) -> int:
        """A `KVPoll` value; Success and Failed stay."""
        if self.conclude_state is not None:
            return self.conclude_state
        assert self._sender is not None
        is_wanted = self._sender.first_pages() is not None
        status = sender_poll(self._sender.poll(), is_wanted=is_wanted, has_sent=self._sent_at is not None)
        if status == KVPoll.Bootstrapping:
            status = self._check_overdue()
        if status == KVPoll.Success and self._sent_at is not None:
            self._metric.transfer_latency_s = time.monotonic() - self._sent_at
        if status == KVPoll.Failed:
            self._reason = self._reason or str(self._sender.failure or "the request ended without a reason")
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        elif self._sent_at is not None:
            _give_way()
        return status

    def poll_pp_consensus(self) -> int:
        return self.poll()

    def failure_exception(self) -> None:
        """Raise sglang's `KVTransferError` with the first cause; from then on the pages are the engine's again."""
        self._end("another rank of this prefill instance failed")
        raise KVTransferError(
            self.bootstrap_room,
            self._reason or "Failed due to an unknown reason from another rank",
            is_from_another_rank=self._reason is None,
        )

    def abort(self) -> None:
        """End the request on both sides. The pages may be reused when this returns."""
        self._reason = self._reason or "Aborted by AbortReq."
        self._end("aborted by the prefill server")

    def clear(self) -> None:
        """Forget the request; one that has not ended is ended."""
        self._end("dropped by the prefill server")

    def _end(self, text: str) -> None:
        self.conclude_state = KVPoll.Failed if self.conclude_state is None else self.conclude_state
        if self._sender:
            self._sender.abort(text)

    def _fail(self, reason: str) -> None:
        self._reason, self.conclude_state = reason, KVPoll.Failed
        if self._sender:
            self._sender.fail(Failure(FailureReason.INTERNAL, reason))

    def _check_overdue(self) -> int:
        waited_s, limit_s = time.monotonic() - self._started_at, self.kv_mgr.bootstrap_timeout_s
        if waited_s < limit_s:
            return KVPoll.Bootstrapping
        assert self._sender is not None
        text = f"decode has not asked for request {self.bootstrap_room} in {waited_s:.1f} s"
        fix = "raise SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT if decode may be that busy"
        self._sender.fail(Failure(FailureReason.TIMEOUT, text, fix=fix))
        return KVPoll.Failed

    def _tell_dp_rank(self, is_told: bool) -> None:
        """Where decode cannot know the DP rank of a request, say it to the bootstrap server."""
        parallel = get_parallel()
        if parallel.num_dp_ranks <= 1 or is_told:
            return
        dp, expected = self.kv_mgr.place.rank.dp, self.bootstrap_room % parallel.num_dp_ranks
        by_query = envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get()
        if parallel.load_balance_method != "follow_bootstrap_room" or by_query:
            self.kv_mgr.in_background(_register_dp_rank, self.bootstrap_server_url, self.bootstrap_room, dp)
        elif dp != expected:
            self._fail(
                f"request {self.bootstrap_room} runs on DP rank {dp}, and follow_bootstrap_room means {expected}; set "
                "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to route it by other means"
            )


_gave_way_at = 0.0


def _give_way() -> None:
    """Sleep for a moment, unless this process has just done so.

    The scheduler polls in a loop of pure Python. It would keep the threads that publish from the interpreter for
    milliseconds: 4 ms instead of 20 from the last `send` to success, one page, both schedulers doing nothing but poll.
    """
    global _gave_way_at
    now = time.monotonic()
    if now - _gave_way_at > YIELD_EVERY_S:
        time.sleep(YIELD_S)
        _gave_way_at = time.monotonic()


def _pages(indices: Sequence[int] | Any) -> Int64Array:
    """Page ids of sglang (a list, numpy, or a host tensor) as int64 [n]."""
    return np.asarray(indices, dtype=np.int64).reshape(-1)


def _register_dp_rank(bootstrap_addr: str, room: int, dp_rank: int) -> None:
    """On a background thread. Where it fails decode asks in vain, and says so."""
    body = json.dumps({"bootstrap_room": room, "dp_rank": dp_rank}).encode()
    asked = urllib.request.Request(
        f"http://{bootstrap_addr}/register_dp_rank", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=REGISTER_TIMEOUT_S) as answer:
            answer.read()
    except (OSError, urllib.error.URLError) as error:
        log.error("DP rank %d of request %d could not be registered at %s: %s", dp_rank, room, bootstrap_addr, error)
