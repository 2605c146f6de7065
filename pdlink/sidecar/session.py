"""Owns what one engine has at its sidecar: its pools as mapped here, its workers and its live requests, and what each
message of the engine does to them. It owns no socket, and decides nothing that a `Node` does not.

Messages come in on one thread, in the engine's order; what may take long runs on threads of its own. What is told goes
out through `tell`, which must not block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from pdlink.address import parse_address
from pdlink.backends.base import Backend
from pdlink.backends.cuda_driver import gpu_name
from pdlink.backends.cuda_imports import ImportedEvent
from pdlink.bootstrap import error_wire
from pdlink.bootstrap import wire as shared
from pdlink.decode.receiver import Receiver
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import DuplicateTransfer, FrameError, InvalidInput, PdlinkError, StateError
from pdlink.layout.regions import Region
from pdlink.prefill.sender import Sender
from pdlink.prefill.worker import PrefillWorker
from pdlink.runtime.node import Node
from pdlink.sidecar import wire
from pdlink.sidecar.attach import AttachedPool
from pdlink.sidecar.staged_only import StagedOnly
from pdlink.threads import Pool
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.v1 import sidecar_pb2 as pb

log = logging.getLogger("pdlink.sidecar")

SLOW_THREADS = 8
SLOW = ("attach_prefill", "attach_decode", "detach", "await_registered")


class Session:
    """One engine's. `end` twice is fine."""

    def __init__(
        self,
        node: Node,
        tell: Callable[[pb.SidecarMessage], None],
        take: Callable[[bytes, int], Sequence[int]] = lambda ticket, count: (),
    ) -> None:
        """`node` has no worker yet, and is closed by `end`. `take` has file descriptors of the engine by ticket."""
        self._node = node
        self._tell = tell
        self._take = take
        self._gpu: bytes | None = None
        """The device of all pools here, by UUID; empty: host memory; None before the first one."""
        self._lock = threading.Lock()
        self._ended = False
        self._pools: dict[int, AttachedPool] = {}
        self._prefill: dict[int, PrefillWorker] = {}
        self._decode: dict[int, DecodeWorker] = {}
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._slow = Pool("pdlink-sidecar", "sidecar", SLOW_THREADS, node.events)
        for name, backend in node.backends.items():
            if not backend.capabilities.gathers:
                node.backends[name] = StagedOnly(backend, self._is_engines)

    def hear(self, message: pb.EngineMessage) -> None:
        """Do what the engine says. Never raises: what cannot be done is answered, or ends the request it is about."""
        kind = message.WhichOneof("body") or ""
        if kind in SLOW:
            try:
                self._slow.submit(lambda: self._do(kind, message))
            except StateError as error:
                self._refuse(message, error)
            return
        self._do(kind, message)

    def stand(self) -> pb.StandResponse:
        """How the engine's process stands; gauges are set to it, too. Any thread."""
        self._node.tell_levels()
        health, readiness = wire.standing(self._node.health()), wire.standing(self._node.standing())
        return pb.StandResponse(health=health, readiness=readiness)

    def end(self, text: str) -> bool:
        """End every request with `text`, tell the peers, close the workers and unmap the engine's memory. Returns
        whether nothing can land in it any more, which the end of the process makes sure of otherwise."""
        with self._lock:
            if self._ended:
                return True
            self._ended = True
            senders, receivers = list(self._senders.values()), list(self._receivers.values())
        for sender in senders:
            sender.fail(Failure(FailureReason.PEER_GONE, text, fix="retry the request"))
        for receiver in receivers:
            receiver.abort(text)
        self._slow.close()
        for prefill in self._prefill.values():
            prefill.close()
        for decode in self._decode.values():
            decode.close()
        is_quiet = all(worker.is_quiet for worker in self._decode.values())
        for pool in self._pools.values() if is_quiet else ():  # before transports end, which takes a while
            pool.close()
        self._node.close()
        return is_quiet

    # --- messages: a method for each kind, by its name ---------------------------------------------

    def _do(self, kind: str, message: pb.EngineMessage) -> None:
        answer = pb.Answer(call=message.call)
        try:
            if not kind:
                raise FrameError("a message of a kind that this sidecar does not know")
            getattr(self, f"_{kind}")(getattr(message, kind), answer)
        except PdlinkError as error:
            self._refuse(message, error)
            return
        except Exception as error:  # a bug of ours must end neither the stream nor the other requests
            log.exception("the engine's %s could not be carried out", kind)
            self._refuse(message, PdlinkError(f"the sidecar failed inside: {type(error).__name__}: {error}"))
            return
        if answer.call:
            self._tell(pb.SidecarMessage(answer=answer))

    def _refuse(self, message: pb.EngineMessage, error: PdlinkError) -> None:
        if message.call:
            answer = pb.Answer(call=message.call, error=error_wire.pack_error(error))
            self._tell(pb.SidecarMessage(answer=answer))
        elif message.HasField("publish") and (sender := self._senders.get(message.publish.sender)):
            sender.fail(Failure(FailureReason.ABORTED, f"what the engine published was refused: {error}"))
        else:
            log.warning("a message of the engine was of no use: %s", error)

    def _attach_prefill(self, message: pb.AttachPrefill, answer: pb.Answer) -> None:
        bootstraps = [parse_address(one) for one in message.bootstraps]
        pool = self._add_pool(message.worker, message.pool)
        try:
            rank = wire.unpack_prefill(message, pool.regions)
            worker = self._node.prefill(rank, bootstraps, self._transports(pool))
        except BaseException:
            self._drop_pool(message.worker)
            raise
        self._prefill[message.worker] = worker

    def _attach_decode(self, message: pb.AttachDecode, answer: pb.Answer) -> None:
        protocol, place = shared.unpack_protocol(message.protocol), wire.unpack_place(message)
        layout = shared.unpack_layout(message.layout)
        pool = self._add_pool(message.worker, message.pool)
        try:
            worker = self._node.decode(message.instance, layout, pool.regions, protocol, place)
        except BaseException:
            self._drop_pool(message.worker)
            raise
        self._decode[message.worker] = worker

    def _detach(self, message: pb.Detach, answer: pb.Answer) -> None:
        """The worker stays among the node's, closed: an engine attaches few."""
        answer.quiet = True
        if prefill := self._prefill.get(message.worker):
            prefill.close()
        elif decode := self._decode.get(message.worker):
            decode.close()
            answer.quiet = decode.is_quiet
        else:
            raise StateError(f"worker {message.worker} is not attached")
        if answer.quiet:
            self._drop_pool(message.worker)

    def _await_registered(self, message: pb.AwaitRegistered, answer: pb.Answer) -> None:
        self._prefill_worker(message.worker).wait_registered(message.timeout_s)

    def _open(self, message: pb.OpenSender, answer: pb.Answer) -> None:
        number = message.sender
        if number in self._senders:
            raise DuplicateTransfer(f"sender {number} is there already")
        sender = self._senders[number] = self._prefill_worker(message.worker).open(message.transfer_id)
        sender.watch(lambda changed: self._tell_sender(number, changed))

    def _publish(self, message: pb.PublishPages, answer: pb.Answer) -> None:
        sender = self._senders.get(message.sender)
        if sender is None:
            return  # it has ended, and the engine hears of it
        sender.publish(
            wire.unpack_pages(message.page_ids),
            group=message.group,
            start_page=message.start_page if message.HasField("start_page") else None,
            layers=shared.unpack_layers(message.layers.sets) if message.HasField("layers") else None,
            last=message.last,
            aux=message.aux if message.HasField("aux") else None,
            ready=self._event(message) if message.HasField("event") else None,
        )

    def _withdraw(self, message: pb.WithdrawPages, answer: pb.Answer) -> None:
        if sender := self._senders.get(message.sender):
            sender.withdraw(wire.unpack_pages(message.page_ids).tolist(), group=message.group)

    def _abort_sender(self, message: pb.AbortSender, answer: pb.Answer) -> None:
        if sender := self._senders.get(message.sender):
            sender.abort(shared.clip(message.text))

    def _receive(self, message: pb.Receive, answer: pb.Answer) -> None:
        number = message.receiver
        if number in self._receivers:
            raise DuplicateTransfer(f"receiver {number} is there already")
        receiver = self._decode_worker(message.worker).receive(
            message.transfer_id,
            wire.unpack_instance(message.prefill),
            {one.group: wire.unpack_pages(one.page_ids) for one in message.pages},
            message.num_tokens,
            prefix_tokens=message.prefix_tokens,
            readers=wire.unpack_readers(message),
            dp=message.dp,
            expect_aux=message.expect_aux,
            trace_parent=message.trace_parent,
        )
        answer.attempt = receiver.attempt
        self._receivers[number] = receiver
        self._tell(pb.SidecarMessage(answer=answer))  # before any update, which is about what the answer brings
        answer.call = 0
        receiver.watch(lambda changed: self._tell_receiver(number, changed))

    def _abort_receive(self, message: pb.AbortReceive, answer: pb.Answer) -> None:
        if receiver := self._receivers.get(message.receiver):
            receiver.abort(shared.clip(message.text))

    def _ask_waits(self, message: pb.AskWaits, answer: pb.Answer) -> None:
        if receiver := self._receivers.get(message.receiver):
            answer.names.extend(receiver.waits_for())

    def _explain(self, message: pb.Explain, answer: pb.Answer) -> None:
        answer.texts.update(self._decode_worker(message.worker).explain(wire.unpack_instance(message.prefill)))

    # --- telling: under locks of the workers --------------------------------------------------------

    def _tell_sender(self, number: int, sender: Sender) -> None:
        state = sender.poll()
        if state.is_final:
            self._senders.pop(number, None)
        self._tell(wire.sender_update(number, state, sender.failure, sender.first_pages()))

    def _tell_receiver(self, number: int, receiver: Receiver) -> None:
        if receiver.state.is_final:
            self._receivers.pop(number, None)
        self._tell(wire.receiver_update(number, receiver))

    # --- inside -------------------------------------------------------------------------------------

    def _add_pool(self, worker: int, message: pb.Pool) -> AttachedPool:
        """Map the pool of a worker that is to be: before it registers regions, of which it is asked whose they are."""
        pool = wire.unpack_pool(message, self._take)
        with self._lock:
            is_free = not self._ended and worker not in self._pools
            is_here = self._gpu in (None, pool.gpu)
            if is_free and is_here:
                self._pools[worker], self._gpu = pool, pool.gpu
        if not (is_free and is_here):
            pool.close()
        if not is_free:
            raise InvalidInput(f"worker {worker} is attached already, or this session ends")
        if not is_here:
            ours, theirs = (gpu_name(one.hex()) if one else "the host" for one in (self._gpu or b"", pool.gpu))
            raise InvalidInput(
                f"this process serves pools of {ours}, and worker {worker}'s is of {theirs}; ask for another"
            )
        return pool

    def _event(self, message: pb.PublishPages) -> ImportedEvent:
        pool = self._pools.get(message.worker)
        if pool is None or message.event >= len(pool.events):
            raise InvalidInput(f"worker {message.worker} has no event {message.event}")
        return pool.events[message.event]

    def _transports(self, pool: AttachedPool) -> dict[str, Backend]:
        """Over what a prefill rank's pages may be read: where others cannot map them, staged over every transport."""
        if pool.can_be_shown:
            return self._node.backends
        return {
            name: one if isinstance(one, StagedOnly) else StagedOnly(one, self._is_engines)
            for name, one in self._node.backends.items()
        }

    def _drop_pool(self, worker: int) -> None:
        with self._lock:
            pool = self._pools.pop(worker, None)
        if pool:
            pool.close()

    def _is_engines(self, region: Region) -> bool:
        with self._lock:
            return any(pool.holds(region) for pool in self._pools.values())

    def _prefill_worker(self, number: int) -> PrefillWorker:
        if number not in self._prefill:
            raise StateError(f"worker {number} is no prefill worker that is attached")
        return self._prefill[number]

    def _decode_worker(self, number: int) -> DecodeWorker:
        if number not in self._decode:
            raise StateError(f"worker {number} is no decode worker that is attached")
        return self._decode[number]
