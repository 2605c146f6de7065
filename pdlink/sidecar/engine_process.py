"""Owns the process that serves one engine beside its sidecar: its sockets, the stream to the engine, and its end.

Each engine has one, so that no crash and no flood of an engine reaches another. It ends when the engine does, when the
engine says goodbye, or when the sidecar's own process does; what it had mapped and promised ends with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from pdlink.backends import shm
from pdlink.bootstrap import error_wire
from pdlink.config import Settings
from pdlink.errors import AccessDenied, DeadlineExceeded, PdlinkError
from pdlink.limits import raise_soft_limit
from pdlink.observability.logs import set_up
from pdlink.observability.metrics import Metrics
from pdlink.observability.shared_metrics import count_into
from pdlink.observability.span_export import export_spans
from pdlink.runtime.node import Node
from pdlink.sidecar import handover, lifeline
from pdlink.sidecar.session import Session
from pdlink.sidecar.sockets import private_files, remove
from pdlink.sidecar.wire import MAX_MESSAGE_BYTES
from pdlink.testing.parent import Parent
from pdlink.threads import SupervisedThread, handler_threads
from pdlink.v1 import sidecar_pb2 as pb
from pdlink.v1 import sidecar_pb2_grpc as rpc

log = logging.getLogger("pdlink.sidecar")

ENGINE_TIMEOUT_S = 60.0
"""Until the engine that asked for this process has come to it."""
CRASH_END_S = 1.7
"""To tell peers of an engine that has died and to let go of its memory; then by force, which leaves peers to time out.
"""
END_S = 20.0
ENDING_S = 5.0
"""Within which an engine whose stream broke is seen to have ended or hung up, on a slow and busy machine too."""
SWEEP_S = 2.0
"""For a dead engine's memory to be let go of by all who have it still."""
HANDOVER_TIMEOUT_S = 10.0
"""For what the engine has sent before it attaches."""
STOP_GRACE_S = 1.0
SERVICE = "pdlink-sidecar"
"""Whose spans these are, unless OTEL_SERVICE_NAME says otherwise."""
NUM_THREADS = 4
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class Stream(rpc.SidecarEngineServicer):
    """The one stream of the engine. `wake` becomes readable when it has ended; `said_goodbye`: as was meant."""

    def __init__(self, session_of: Session | None = None) -> None:
        self.session = session_of
        self.said_goodbye = False
        self.wake, self._awaken = os.pipe()
        self._out: queue.SimpleQueue[pb.SidecarMessage | None] = queue.SimpleQueue()
        self._is_taken = threading.Lock()

    def tell(self, message: pb.SidecarMessage) -> None:
        self._out.put(message)

    def finish(self) -> None:
        """End the stream, after what was told."""
        self._out.put(None)

    def Run(
        self, request_iterator: Iterator[pb.EngineMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.SidecarMessage]:
        if not self._is_taken.acquire(blocking=False):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this process serves another stream of its engine")
        context.add_callback(self.finish)
        name = "pdlink-sidecar-stream"
        SupervisedThread(lambda: self._read(request_iterator), name, "sidecar", at_end=self._end).start()
        while (message := self._out.get()) is not None:
            yield message

    def Stand(self, request: pb.StandRequest, context: grpc.ServicerContext) -> pb.StandResponse:
        assert self.session is not None
        return self.session.stand()

    def _read(self, messages: Iterator[pb.EngineMessage]) -> None:
        assert self.session is not None
        try:
            for message in messages:
                if message.HasField("goodbye"):
                    self.said_goodbye = True
                else:
                    self.session.hear(message)
        except Exception as error:  # noqa: BLE001 - an RPC boundary: gRPC raises a bare one where a call was cancelled
            log.info("the engine's stream broke: %s", error)

    def _end(self) -> None:
        os.write(self._awaken, b".")


def main() -> None:
    parent = Parent()
    told = json.loads(sys.stdin.readline() or "{}")
    if not told:
        return  # the sidecar ended at once
    settings = Settings.model_validate(told["settings"])
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    set_up(settings.log, settings.log_format)
    raise_soft_limit()
    rpc_path, life_path, fds_path = Path(told["rpc"]), Path(told["lifeline"]), Path(told["handover"])
    with contextlib.ExitStack() as stack:
        stack.callback(remove, rpc_path)
        try:
            # The sockets first: their files get their mode from the umask, which is of the whole process.
            server = grpc.server(handler_threads("pdlink-sidecar-rpc", NUM_THREADS), options=OPTIONS)
            stream = Stream()
            rpc.add_SidecarEngineServicer_to_server(stream, server)
            with private_files():
                server.add_insecure_port(f"unix:{rpc_path}")
            listener = lifeline.Listener(life_path)
            stack.callback(listener.close)
            desk = handover.Desk(fds_path)
            stack.callback(desk.close)
            if settings.tracing:
                stack.callback(export_spans(SERVICE))
            node = Node(settings)
            if counts := told["counts"]:
                count_into(Path(counts["folder"]), counts["slot"])
                Metrics(node.events)
        except PdlinkError as error:
            parent.say({"error": error_wire.pack_error(error).SerializeToString().hex()})
            return
        stream.session = Session(node, stream.tell, lambda ticket, count: desk.take(ticket, count, HANDOVER_TIMEOUT_S))
        server.start()
        parent.say({"backends": list(node.backends)})
        code = _serve(listener, stream, stream.session, server)
    # By force: the interpreter would wait for threads that still ask somebody something, and nobody hears the answer.
    shm.close_all()
    os._exit(code)


def _serve(listener: lifeline.Listener, stream: Stream, session: Session, server: grpc.Server) -> int:
    """Until there is nobody to serve any more. Returns the exit code; where it is not 0, threads may still run."""
    has_died = False
    engine: lifeline.OtherEnd | None = None
    try:
        engine = listener.accept(ENGINE_TIMEOUT_S, sys.stdin.fileno())
        text = "the sidecar is ending"
        if engine:
            log.info("serving engine process %d", engine.pid)
            watched = engine.watched()
            gone = lifeline.wait_any((*watched, sys.stdin.fileno(), stream.wake))
            # The stream of an engine that is killed may break before its process is seen to have ended.
            has_died = bool(gone.intersection(watched))
            if stream.wake in gone and not (has_died or stream.said_goodbye):
                has_died = bool(lifeline.wait_any(watched, ENDING_S))
            if has_died:
                text = f"the engine (process {engine.pid}) has ended"
            elif stream.wake in gone:
                text = "the engine has left its sidecar" if stream.said_goodbye else "the engine's stream broke"
    except (DeadlineExceeded, AccessDenied) as error:
        text = str(error)
    log.log(logging.WARNING if has_died else logging.INFO, "%s", text)
    its_memory = shm.adopted()
    quiet: list[bool] = []
    ending = SupervisedThread(lambda: quiet.append(session.end(text)), "pdlink-sidecar-end", "sidecar")
    ending.start()
    if not ending.join(CRASH_END_S if has_died else END_S) or not quiet:
        log.error("what the engine had here does not end in time; this process ends with it")
        code = 1
    else:
        code = 0 if quiet[0] else 1
    stream.finish()
    if not code:
        server.stop(STOP_GRACE_S).wait(STOP_GRACE_S)
    if has_died:
        shm.sweep_until_gone(its_memory, SWEEP_S)  # nobody else would before the next engine starts
    # The lifeline stays open to the very end: the engine takes its end for the end of all that runs here.
    return code


if __name__ == "__main__":
    main()
