"""Owns one prefill rank, and its requests, as an engine has them whose link is in a sidecar. It serves no reader.

The verbs and memory rules are those of `prefill/sender.py`. Publishing is said and not answered: what the sidecar
refuses ends the request, which `poll` shows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pdlink.address import Address
from pdlink.backends.event_ring import EventRing
from pdlink.bootstrap import wire as shared
from pdlink.errors import StateError, TransferFailed
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.ready_watch import DeviceEvent, ReadyWatch
from pdlink.sidecar import wire
from pdlink.sidecar.engine_worker import EngineWorker
from pdlink.sidecar.stream import ANSWER_TIMEOUT_S, EngineStream, SidecarGone
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from pdlink.v1 import sidecar_pb2 as pb

ANSWER_SLACK_S = 10.0
NUM_EVENTS = 32
"""Publications of one rank whose work on the device is not over, beyond which the engine looks at events itself."""


class SidecarSender:
    """One request on one rank: `SenderVerbs`. Made by `SidecarPrefill.open`."""

    def __init__(
        self,
        transfer_id: str,
        worker: int,
        number: int,
        stream: EngineStream,
        watch: Callable[[SidecarSender], None],
        record: Callable[[DeviceEvent], int | None] = lambda ready: None,
    ) -> None:
        """`watch` has somebody call `look_ready` until that says no; `record` has an event of the sidecar's recorded
        behind the engine's own, where that can be."""
        self.transfer_id = transfer_id
        self.failure: Failure | None = None
        self._worker = worker
        self._number = number
        self._stream = stream
        self._watch = watch
        self._record = record
        self._state = SenderState.OPEN
        self._first_pages: Mapping[str, int] | None = None
        self._publishing = threading.Lock()
        self._said_last = False
        self._waiting: deque[tuple[pb.PublishPages, DeviceEvent | None]] = deque()
        """Publications that wait for a device, or behind one that does; in their order."""

    def poll(self) -> SenderState:
        """The state as the sidecar has told; never blocks."""
        return self._state

    def first_pages(self) -> Mapping[str, int] | None:
        """As `Sender.first_pages`."""
        return self._first_pages

    def raise_failure(self) -> None:
        """Raise `TransferFailed` with the first cause when the request ended badly."""
        if self.failure:
            raise TransferFailed(str(self.failure))

    def publish(
        self,
        page_ids: Sequence[int] | Int64Array = (),
        *,
        group: str = "kv",
        start_page: int | None = None,
        layers: Mapping[str, Iterable[int]] | None = None,
        last: bool = False,
        aux: bytes | None = None,
        ready: DeviceEvent | None = None,
    ) -> None:
        """As `Sender.publish`, and returns at once. Raises `InvalidInput` for page ids that are no integers and
        `StateError` after the last one; everything else that cannot be published ends the request."""
        message = pb.PublishPages(
            worker=self._worker,
            sender=self._number,
            group=group,
            page_ids=wire.pack_pages(page_ids),
            start_page=start_page,
            last=last,
            aux=aux,
        )
        if layers is not None:
            message.layers.sets.extend(shared.pack_layers({name: tuple(ids) for name, ids in layers.items()}))
            message.layers.SetInParent()
        with self._publishing:
            if self._state.is_final:
                return
            if self._said_last:
                raise StateError(f"transfer {self.transfer_id!r} was published to its end already")
            self._said_last = last
            try:
                if not self._waiting and self._may_say(message, ready):
                    self._stream.send(pb.EngineMessage(publish=message))
                    return
            except Exception as error:  # noqa: BLE001 - the engine's own object; whatever it raises is why
                broken = f"the device event of a publication could not be asked: {type(error).__name__}: {error}"
            else:
                broken = ""
                self._waiting.append((message, ready))
        if broken:
            self.abort(broken)
        else:
            self._watch(self)

    def withdraw(self, page_ids: Iterable[int], *, group: str = "kv") -> None:
        """As `Sender.withdraw`; waits for the sidecar's answer."""
        wanted = wire.pack_pages(page_ids)
        with self._publishing:
            ids = wire.unpack_pages(wanted)
            waits = any(
                one.group == group and np.isin(wire.unpack_pages(one.page_ids), ids).any() for one, _ in self._waiting
            )
        if waits:
            self.abort(f"{len(ids)} published pages were withdrawn by the prefill engine")
            return
        self._end(pb.EngineMessage(withdraw=pb.WithdrawPages(sender=self._number, group=group, page_ids=wanted)))

    def abort(self, text: str = "aborted by the prefill engine") -> None:
        """As `Sender.abort`; waits for the sidecar's answer."""
        with self._publishing:
            self._waiting.clear()
        self._end(pb.EngineMessage(abort_sender=pb.AbortSender(sender=self._number, text=text)))

    # --- for the watch of device events -------------------------------------------------------------

    def look_ready(self) -> bool:
        """Publish what is computed; whether something still waits."""
        with self._publishing:
            if self._state.is_final:
                self._waiting.clear()
            while self._waiting and self._may_say(*self._waiting[0]):
                self._stream.send(pb.EngineMessage(publish=self._waiting.popleft()[0]))
            return bool(self._waiting)

    def fail(self, cause: Failure) -> None:
        self.abort(str(cause))

    # --- called by the stream -----------------------------------------------------------------------

    def on_update(self, message: pb.SidecarMessage) -> None:
        update = message.sender
        self._first_pages = dict(update.first_pages) if update.has_first_pages else None
        if update.HasField("failure"):
            self.failure = wire.unpack_cause(update.failure)
        state = SenderState(update.state)
        if state.is_final:
            self._stream.forget(self._number)
        self._state = state

    def on_gone(self, reason: str) -> None:
        self.failure = gone_failure(reason)
        self._state = SenderState.ABORTED

    def _may_say(self, message: pb.PublishPages, ready: DeviceEvent | None) -> bool:
        """Whether the sidecar may hear of a publication: it is computed, or names the event that says when it is."""
        if ready is None:
            return True
        slot = self._record(ready)
        if slot is not None:
            message.event = slot
            return True
        return ready.query()

    def _end(self, message: pb.EngineMessage) -> None:
        """The pages may be reused when this returns: the sidecar has said so, or its process is no more."""
        if self._state.is_final:
            return
        try:
            self._stream.call(message)
        except SidecarGone:
            self._stream.wait_ended()


class SidecarPrefill(EngineWorker):
    """One prefill rank: `PrefillVerbs`. `close` twice is fine."""

    def __init__(self, number: int, rank: PrefillRank, bootstraps: Sequence[Address], engine_pid: int) -> None:
        super().__init__(number, rank.regions, engine_pid)
        self._rank = rank
        self._bootstraps = tuple(bootstraps)
        self._watch = ReadyWatch(rank.worker_id)
        self._ring: EventRing | None = None
        """On the pool's device, where it is on one; made when it is first attached."""

    @property
    def rank(self) -> PrefillRank:
        return self._rank

    @property
    def name(self) -> str:
        return f"prefill {self._rank.worker_id}"

    def message(self, told: wire.PoolTold) -> pb.EngineMessage:
        said = wire.pack_prefill(self.number, self._rank, self._bootstraps, told)
        return pb.EngineMessage(attach_prefill=said)

    def event_handles(self) -> Sequence[bytes]:
        if self.gpu and self._ring is None:
            self._ring = EventRing(self._rank.regions[0].device, NUM_EVENTS)
        return self._ring.handles if self._ring else ()

    def open(self, transfer_id: str) -> SidecarSender:
        """As `PrefillWorker.open`, and `SidecarGone` while the sidecar is away. One round trip."""
        stream = self.stream()
        number = self.next_number()
        sender = SidecarSender(transfer_id, self.number, number, stream, self._watch.add, self._record)
        stream.expect(number, sender)
        told = pb.OpenSender(worker=self.number, sender=number, transfer_id=transfer_id)
        try:
            stream.call(pb.EngineMessage(open=told))
        except BaseException:
            stream.forget(number)
            raise
        return sender

    def wait_registered(self, timeout_s: float) -> None:
        """As `PrefillWorker.wait_registered`, by the sidecar."""
        told = pb.AwaitRegistered(worker=self.number, timeout_s=timeout_s)
        wait_s = max(ANSWER_TIMEOUT_S, timeout_s + ANSWER_SLACK_S)
        self.stream().call(pb.EngineMessage(await_registered=told), timeout_s=wait_s)

    def close(self) -> None:
        """End every request of this rank, as `PrefillWorker.close`; the sidecar reads the pool no more."""
        self._watch.close()
        self.detach()
        if self._ring:
            self._ring.close()

    def _record(self, ready: DeviceEvent) -> int | None:
        """Behind an event of CUDA's, such as PyTorch's. None where it is no such, or the ring is all in use."""
        event = getattr(ready, "cuda_event", None)
        return self._ring.record_behind(int(event)) if self._ring and event else None


def gone_failure(reason: str) -> Failure:
    return Failure(
        FailureReason.PEER_GONE, reason, fix="retry the request; the engine goes back to its sidecar by itself"
    )
