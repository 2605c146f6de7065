"""Owns the engine's end of the stream to its sidecar: calls and their answers, updates to whom they are about, and the
proof that the other end runs no more. It knows no request.

Memory rule: the sidecar's process writes into the engine's pools. So nothing is told of the end of a stream before that
process has ended, by itself or by force: whoever is told may use the pages again.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from pdlink.bootstrap import error_wire
from pdlink.errors import PdlinkError, PeerGone
from pdlink.sidecar import lifeline
from pdlink.sidecar.sockets import check_socket
from pdlink.sidecar.wire import MAX_MESSAGE_BYTES, PROTOCOL
from pdlink.threads import SupervisedThread
from pdlink.v1 import sidecar_pb2 as pb
from pdlink.v1 import sidecar_pb2_grpc as rpc

log = logging.getLogger("pdlink.sidecar")

ANSWER_TIMEOUT_S = 30.0
"""For a verb that takes no time. A sidecar that is so late is as good as dead, and is ended."""
KILL_AFTER_S = 5.0
"""For the sidecar's process to end by itself, once its stream has."""
COMPLAIN_S = 10.0
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit another one's back-off
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 8_000),
    ("grpc.keepalive_timeout_ms", 12_000),
)


class SidecarGone(PdlinkError):
    """The sidecar is not there (any more). Its client goes back to it by itself; until then requests are refused."""


class Listener(Protocol):
    """Whom updates of one number are about. Called on the stream's thread: quick, and no calls of the stream."""

    def on_update(self, message: pb.SidecarMessage) -> None: ...

    def on_gone(self, reason: str) -> None:
        """No update comes any more, and nothing of the sidecar touches the engine's pools."""


@dataclass(slots=True, eq=False)
class _Call:
    on_answer: Callable[[pb.Answer], None] | None
    done: threading.Event = field(default_factory=threading.Event)
    answer: pb.Answer | None = None


class EngineStream:
    """One process of the sidecar, for as long as it serves. Thread-safe."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Ask the sidecar at `path` for a process, and reach it (blocks).

        Raises `SidecarGone` where nothing answers, `InvalidInput` or `AccessDenied` where that may not be trusted, and
        what the sidecar refuses with.
        """
        opened = _open(path, timeout_s)
        self.backends = tuple(opened.backends)
        self.handover = Path(opened.handover)
        """Where file descriptors are handed over to the other end."""
        self.ended = threading.Event()
        """Set when everybody has been told of the end."""
        self.reason = ""
        check_socket(Path(opened.socket))
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._is_over = self._is_leaving = False
        self._calls: dict[int, _Call] = {}
        self._listeners: dict[int, Listener] = {}
        self._out: queue.SimpleQueue[pb.EngineMessage | None] = queue.SimpleQueue()
        try:
            self._other = lifeline.connect(Path(opened.lifeline), timeout_s)
        except PeerGone as error:
            raise SidecarGone(str(error)) from error
        self._channel = grpc.insecure_channel(f"unix:{opened.socket}", OPTIONS)
        self._responses = rpc.SidecarEngineStub(self._channel).Run(iter(self._out.get, None))
        self._thread = SupervisedThread(self._read, "pdlink-sidecar-client", "sidecar client")
        try:
            self._thread.start()
        except BaseException:
            self._channel.close()
            self._other.close()
            raise

    @property
    def pid(self) -> int:
        """Of the sidecar's process for this engine; 0 where it cannot be seen from here."""
        return self._other.pid

    @property
    def is_over(self) -> bool:
        return self._is_over

    def send(self, message: pb.EngineMessage) -> None:
        """Say something that is not answered. After the end of the stream it goes nowhere."""
        self._out.put(message)

    def call(
        self,
        message: pb.EngineMessage,
        on_answer: Callable[[pb.Answer], None] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> pb.Answer:
        """Say something and wait for the answer. `on_answer` gets it on the stream's thread, before later updates.

        Raises what the sidecar refuses with, and `SidecarGone` once the sidecar's process has ended. Not on the
        stream's own thread.
        """
        call = _Call(on_answer)
        with self._lock:
            if self._is_over:
                raise SidecarGone(self._gone_text())
            message.call = next(self._numbers)
            self._calls[message.call] = call
        self._out.put(message)
        if not call.done.wait(timeout_s):
            self.break_off(f"it has not answered for {timeout_s:g} s")
            self.wait_ended()
        if call.answer is None:
            raise SidecarGone(self._gone_text())
        if call.answer.HasField("error"):
            raise error_wire.unpack_error(call.answer.error)
        return call.answer

    def expect(self, number: int, listener: Listener) -> None:
        """Give updates about `number` to `listener`, until `forget`. Raises `SidecarGone` at the end of the stream."""
        with self._lock:
            if self._is_over:
                raise SidecarGone(self._gone_text())
            self._listeners[number] = listener

    def forget(self, number: int) -> None:
        with self._lock:
            self._listeners.pop(number, None)

    def break_off(self, reason: str) -> None:
        """End the stream because the other end is of no use any more. Returns at once."""
        self.reason = self.reason or reason
        self._responses.cancel()

    def wait_ended(self) -> None:
        """Wait for the end of the stream, and so of the other process. Once the stream is over that ends by itself, or
        by force; where it cannot be seen from here, it is complained of until it has been ended."""
        self.ended.wait()

    def leave(self, timeout_s: float) -> None:
        """Say goodbye, where nothing is live any more, and wait for the end of the stream."""
        self._is_leaving = True
        self._out.put(pb.EngineMessage(goodbye=pb.Goodbye()))
        self._out.put(None)
        if not self.ended.wait(timeout_s):
            self.break_off(f"it has not let go for {timeout_s:g} s")
            self.wait_ended()
        self._thread.join(timeout_s)

    # --- inside -------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            for message in self._responses:
                self._dispatch(message)
        except grpc.RpcError as error:
            said = error.details() if isinstance(error, grpc.Call) else str(error)
            self.reason = self.reason or f"the stream broke ({said})"
        finally:
            self._end(self.reason or "it ended")

    def _dispatch(self, message: pb.SidecarMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "answer":
            with self._lock:
                call = self._calls.pop(message.answer.call, None)
            if call:
                if call.on_answer and not message.answer.HasField("error"):
                    call.on_answer(message.answer)
                call.answer = message.answer
                call.done.set()
        elif kind:
            number = message.sender.sender if kind == "sender" else message.receiver.receiver
            if listener := self._listeners.get(number):
                listener.on_update(message)

    def _end(self, reason: str) -> None:
        """Nobody hears of the end before the other process has ended, too."""
        with self._lock:
            self._is_over = True
            self.reason = reason
            is_done = self._is_leaving and not self._listeners and not self._calls
        self._out.put(None)
        self._channel.close()
        if not is_done:
            self._see_it_end()
        self._other.close()
        with self._lock:
            calls, self._calls = self._calls, {}
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_gone(self._gone_text())
        self.ended.set()
        for call in calls.values():
            call.done.set()

    def _see_it_end(self) -> None:
        other = self._other
        other.hang_up()
        if other.wait_ended(KILL_AFTER_S):
            return
        log.error("the sidecar's process %d for this engine does not end; it is killed", other.pid)
        other.kill()
        while not other.wait_ended(COMPLAIN_S):
            log.error(
                "the sidecar's process for this engine runs on, and may still write into its pools; requests stay as "
                "they are until it ends: end it by hand"
            )

    def _gone_text(self) -> str:
        return f"the sidecar's process for this engine is gone: {self.reason}"


def _open(path: Path, timeout_s: float) -> pb.Opened:
    check_socket(path)
    with grpc.insecure_channel(f"unix:{path}", OPTIONS) as channel:
        try:
            answer = rpc.SidecarStub(channel).Open(pb.OpenRequest(protocol=PROTOCOL), timeout=timeout_s)
        except grpc.RpcError as error:
            said = error.details() if isinstance(error, grpc.Call) else str(error)
            raise SidecarGone(
                f"no sidecar answers at {path} ({said}); start one: pdlink sidecar --socket {path}"
            ) from error
    if answer.WhichOneof("answer") == "error":
        raise error_wire.unpack_error(answer.error)
    opened: pb.Opened = answer.opened
    return opened
