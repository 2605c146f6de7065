"""Owns one decode rank as an engine has it whose link is in a sidecar. Its receives are `Receiver`s as ever, which are
told by the stream how they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdlink.bootstrap.messages import ProtocolRange
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region
from pdlink.sidecar import wire
from pdlink.sidecar.engine_prefill import gone_failure
from pdlink.sidecar.engine_worker import EngineWorker
from pdlink.sidecar.stream import EngineStream, SidecarGone
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.states import ReceiverState
from pdlink.transfer.trace_parent import clean
from pdlink.v1 import sidecar_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class DecodePool:
    """What an engine says of one decode rank: as the arguments of `Node.decode`."""

    instance: str
    layout: CacheLayout
    regions: tuple[Region, ...]
    protocol: ProtocolRange
    place: DecodePlace | None


@dataclass(frozen=True, slots=True, eq=False)
class _Updates:
    """Takes what the sidecar tells to one receiver. `ended` has its callbacks run, on another thread."""

    number: int
    receiver: Receiver
    stream: EngineStream
    ended: Callable[[Receiver], None]

    def on_update(self, message: pb.SidecarMessage) -> None:
        update = message.receiver
        state = ReceiverState(update.state)
        failure = wire.unpack_cause(update.failure) if update.HasField("failure") else None
        result = wire.unpack_result(update.result) if update.HasField("result") else None
        if state.is_final:
            self.stream.forget(self.number)
        self.receiver.update(state, failure, result)
        if state.is_final:
            self.ended(self.receiver)

    def on_gone(self, reason: str) -> None:
        self.receiver.update(ReceiverState.FAILED, gone_failure(reason), None)
        self.ended(self.receiver)


class SidecarDecode(EngineWorker):
    """One decode rank: `DecodeVerbs`. `close` twice is fine."""

    def __init__(self, number: int, pool: DecodePool, engine_pid: int, ended: Callable[[Receiver], None]) -> None:
        super().__init__(number, pool.regions, engine_pid)
        self._pool = pool
        self._on_end = ended

    @property
    def instance(self) -> str:
        return self._pool.instance

    @property
    def name(self) -> str:
        return f"decode {self._pool.instance}"

    def message(self, told: wire.PoolTold) -> pb.EngineMessage:
        pool = self._pool
        said = (pool.instance, pool.layout, pool.regions, pool.protocol, pool.place, told)
        return pb.EngineMessage(attach_decode=wire.pack_decode(self.number, *said))

    def receive(
        self,
        transfer_id: str,
        prefill: PrefillInstance,
        pages: Mapping[str, Sequence[int] | Int64Array],
        num_tokens: int,
        *,
        prefix_tokens: int = 0,
        readers: ReaderSet | None = None,
        dp: int = 0,
        expect_aux: bool = False,
        trace_parent: str = "",
    ) -> Receiver:
        """As `DecodeWorker.receive`, and `SidecarGone` while the sidecar is away. One round trip."""
        if min(num_tokens, prefix_tokens, dp) < 0:
            raise InvalidInput(f"transfer {transfer_id!r} asks for tokens [{prefix_tokens}, {num_tokens}) of dp {dp}")
        stream, number = self.stream(), self.next_number()
        told = pb.Receive(
            worker=self.number,
            receiver=number,
            transfer_id=transfer_id,
            prefill=wire.pack_instance(prefill),
            pages=[pb.GroupPages(group=name, page_ids=wire.pack_pages(ids)) for name, ids in pages.items()],
            num_tokens=num_tokens,
            prefix_tokens=prefix_tokens,
            readers=wire.pack_readers(readers) if readers else None,
            dp=dp,
            expect_aux=expect_aux,
            trace_parent=clean(trace_parent),
        )
        made: list[Receiver] = []

        def begin(answer: pb.Answer) -> None:
            abort = pb.EngineMessage(abort_receive=pb.AbortReceive(receiver=number))
            made.append(Receiver(transfer_id, answer.attempt, _abort(stream, abort), _waits_for(stream, number)))
            stream.expect(number, _Updates(number, made[0], stream, self._on_end))

        stream.call(pb.EngineMessage(receive=told), begin)
        return made[0]

    def explain(self, prefill: PrefillInstance) -> dict[str, str]:
        """As `DecodeWorker.explain`."""
        told = pb.Explain(worker=self.number, prefill=wire.pack_instance(prefill))
        return dict(self.stream().call(pb.EngineMessage(explain=told)).texts)

    def close(self) -> None:
        """Abort every receive of this rank and wait for its pulls to be quiet, as `DecodeWorker.close`."""
        self.detach()


def _abort(stream: EngineStream, message: pb.EngineMessage) -> Callable[[Receiver, str], None]:
    def abort(receiver: Receiver, text: str) -> None:
        message.abort_receive.text = text
        stream.send(message)

    return abort


def _waits_for(stream: EngineStream, number: int) -> Callable[[Receiver], Sequence[str]]:
    def ask(receiver: Receiver) -> Sequence[str]:
        try:
            return list(stream.call(pb.EngineMessage(ask_waits=pb.AskWaits(receiver=number))).names)
        except SidecarGone:
            return ()

    return ask
