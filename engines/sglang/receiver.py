"""Owns one request on one decode rank as sglang's scheduler sees it: asked for with its pages, landed or failed.

`send_metadata` subscribes to the prefill ranks and gives them nothing but the request's name: this side pulls. Nothing
here waits: resolving, connecting and pulling happen on pdlink's own threads.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from pdlink.decode.receiver import Receiver
from pdlink.errors import PdlinkError
from pdlink.transfer.failure import FailureReason
from pdlink_engines.sglang.components import INDEX_PAGES, KV_PAGES
from pdlink_engines.sglang.manager import PdlinkKVManager
from pdlink_engines.sglang.status import receiver_poll

log = logging.getLogger("pdlink.sglang")

_ASK_AGAIN_AFTER = frozenset(
    {FailureReason.PEER_GONE, FailureReason.STALE, FailureReason.NOT_READY, FailureReason.TIMEOUT}
)


class PdlinkKVReceiver(BaseKVReceiver):
    """One request. All calls come from the scheduler's thread, but `fail`.

    Memory rule: the pages and the metadata row given to `send_metadata` are pdlink's until `poll` says Success or
    Failed, or, where another rank failed first, until the manager's `is_abort_release_safe` says so.
    """

    # Read by the scheduler.
    require_staging = False
    bootstrap_infos: tuple[Any, ...] = ()
    query_prefill_dp_ranks = staticmethod(CommonKVReceiver.query_prefill_dp_ranks)

    def __init__(self, mgr: PdlinkKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.conclude_state: int | None = None
        # Whether the prefill ranks know, or need not know, that this request has ended badly.
        self.abort_notified = False
        # Set by the hook in sglang's queue: the W3C `traceparent` of the request, or empty.
        self.trace_parent = ""
        self._dp: int | None = None
        self._receiver: Receiver | None = None
        self._aux_index: int | None = None
        self._reason: str | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can land in the request's pages (any more)."""
        return self._receiver is None or self._receiver.state.is_final

    def init(self, prefill_dp_rank: int) -> None:
        """The prefill server is known, and `prefill_dp_rank` serves the request."""
        if self.conclude_state is not None:
            return
        refusal = self.kv_mgr.refusal_of(self.bootstrap_addr)
        if refusal:
            self._conclude(refusal)
        self._dp = prefill_dp_rank

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Begin to pull into pages `kv_indices` (int32 [n]), which follow the first `decode_prefix_len` tokens.

        `state_indices` has an entry for each of `KVArgs.state_types`; `aux_index` is the row of the metadata buffers
        that the request's metadata goes to.
        """
        if self.conclude_state is not None:
            return
        if destination is not KVTransferDestination.DEVICE or device_kv_indices is not None:
            self._refuse("pdlink pulls into the KV pool only, not into host pages (HiSparse, host receive)")
            return
        self._aux_index = aux_index
        pages = {KV_PAGES: np.asarray(kv_indices, dtype=np.int64)}
        if self.kv_mgr.has_index_pages:
            pages[INDEX_PAGES] = np.asarray(state_indices[0] if state_indices else (), dtype=np.int64)
        prefix = decode_prefix_len or 0
        if prefix % self.kv_mgr.page_size:
            self._refuse(f"decode_prefix_len={prefix} is not a whole number of pages of {self.kv_mgr.page_size} tokens")
            return
        self._receive(pages, prefix + len(pages[KV_PAGES]) * self.kv_mgr.page_size, prefix)

    def poll(self) -> int:
        """A `KVPoll` value; Success and Failed stay. With Success the request's metadata is in its row."""
        if self.conclude_state is not None:
            return self.conclude_state
        if self._receiver is None:
            return KVPoll.Bootstrapping if self._dp is None else KVPoll.WaitingForInput
        status = receiver_poll(self._receiver.poll())
        if status == KVPoll.Success:
            self._take_aux(self._receiver)
        elif status == KVPoll.Failed:
            failure = self._receiver.failure
            self._conclude(f"{failure or 'no reason was given'} (prefill server {self.bootstrap_addr})")
            if failure and failure.reason in _ASK_AGAIN_AFTER:
                self.kv_mgr.doubt(self.bootstrap_addr)
        return status if self.conclude_state is None else self.conclude_state

    def failure_exception(self) -> None:
        """Raise sglang's `KVTransferError` with the first cause."""
        is_foreign = self._reason is None
        self.ensure_abort_notified()
        raise KVTransferError(
            self.bootstrap_room,
            self._reason or "Failed due to an unknown reason from another rank",
            is_from_another_rank=is_foreign,
        )

    def abort(self) -> None:
        """End the request on both sides. `poll` says Failed once nothing can land any more.

        sglang also calls this when it has tried in vain to reach the prefill server, which then is the reason.
        """
        trouble = self.kv_mgr.trouble_of(self.bootstrap_addr) if self._dp is None else None
        self.fail(trouble or "Aborted by AbortReq.")

    def fail(self, reason: str) -> None:
        """End the request for `reason`. Any thread."""
        if self.conclude_state is not None:
            return
        self.abort_notified = True
        if self._receiver:
            self._receiver.abort(reason)
            return
        self._refuse(reason)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Another rank has failed, or this one: see to it that nothing lands any more, and that prefill knows.

        A reason that is known already is kept.
        """
        if not self.abort_notified and self.conclude_state != KVPoll.Success:
            self.abort_notified = True
            if self._receiver:
                self._receiver.abort("another rank of this decode server failed")
            elif self._dp is not None and self.conclude_state is None:
                self._tell_prefill("another rank of this decode server failed")
        if self.conclude_state is None:
            self.conclude_state = KVPoll.Failed

    def is_abort_release_safe(self) -> bool:
        return self.is_quiet

    def clear(self) -> None:
        """Forget the request."""
        self.ensure_abort_notified()
        if self.bootstrap_room is not None:
            self.kv_mgr.let_go(self.bootstrap_room, self)

    def _receive(self, pages: dict[str, Any], num_tokens: int, prefix_tokens: int) -> None:
        assert self.bootstrap_room is not None
        try:
            receiver = self.kv_mgr.decode_worker.receive(
                str(self.bootstrap_room),
                self.kv_mgr.prefill_instance(self.bootstrap_addr),
                pages,
                num_tokens,
                prefix_tokens=prefix_tokens,
                readers=self.kv_mgr.place.readers,
                dp=self._dp or 0,
                expect_aux=True,
                trace_parent=self.trace_parent,
            )
        except PdlinkError as error:
            self._refuse(str(error))
            return
        self._receiver = receiver
        self.kv_mgr.hold(self.bootstrap_room, self)

    def _refuse(self, reason: str) -> None:
        """End a request before anything was asked of prefill, and tell it."""
        is_first = self.conclude_state is None
        self._conclude(reason)
        if is_first and self._dp is not None:
            self._tell_prefill(reason)

    def _tell_prefill(self, reason: str) -> None:
        """Prefill ranks that wait for this request learn that it will not come: by a receive of nothing, aborted."""
        if self.kv_mgr.refusal_of(self.bootstrap_addr):
            return
        nothing = {group.name: () for group in self.kv_mgr.layout.page_groups}
        self._receive(nothing, 1, 1)
        if self._receiver:
            self._receiver.abort(reason)

    def _take_aux(self, receiver: Receiver) -> None:
        try:
            aux = receiver.result().aux
            if aux is not None and self._aux_index is not None:
                self.kv_mgr.aux.write(self._aux_index, aux)
        except PdlinkError as error:
            self._conclude(str(error))
        else:
            self.conclude_state = KVPoll.Success

    def _conclude(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.conclude_state = KVPoll.Failed
