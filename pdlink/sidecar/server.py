"""Owns the sidecar's own process: the socket that engines come to, and a process for each of them. It moves no page.

It starts, counts and reaps; all else is in `engine_process`. It holds no state of an engine, so that engines come back
by themselves when it was restarted.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdlink.address import Address, advertised
from pdlink.backends import shm
from pdlink.bootstrap import error_wire
from pdlink.config import Settings
from pdlink.errors import (
    ConfigError,
    DeadlineExceeded,
    FrameError,
    InvalidInput,
    LimitReached,
    PdlinkError,
    StateError,
)
from pdlink.events import Events
from pdlink.sidecar.engine_process import OPTIONS
from pdlink.sidecar.healthy import Healthy
from pdlink.sidecar.sockets import Place, private_files, remove
from pdlink.sidecar.watch import SidecarWatch
from pdlink.sidecar.wire import PROTOCOL
from pdlink.testing.child import Child, ChildEnded
from pdlink.threads import SupervisedThread, handler_threads
from pdlink.v1 import common_pb2
from pdlink.v1 import sidecar_pb2 as pb
from pdlink.v1 import sidecar_pb2_grpc as rpc

log = logging.getLogger("pdlink.sidecar")

MAX_ENGINES = 64
START_TIMEOUT_S = 60.0
"""For a process to be there with all its transports: a slow and busy machine takes a while."""
END_TIMEOUT_S = 25.0
STOP_GRACE_S = 1.0
NUM_THREADS = 4
SERVICE = pb.DESCRIPTOR.services_by_name["Sidecar"].full_name


@dataclass(frozen=True, slots=True, eq=False)
class _Engine:
    child: Child
    paths: tuple[Path, ...]
    """As `sockets.ENDS` has them."""
    slot: int
    """Of its counts, where there are any."""


class SidecarServer(rpc.SidecarServicer):
    """A sidecar that serves engines at one socket, with gRPC's own health and reflection beside. `close` twice is fine;
    it ends every engine's process in order."""

    def __init__(self, path: Path, settings: Settings, events: Events | None = None) -> None:
        """Call `start` instead."""
        if settings.way == "direct":
            raise ConfigError("PDLINK_WAY=direct: a sidecar moves pages staged or mapped; use auto or staged")
        self.path = path.absolute()
        self._settings = settings
        self._events = events
        self._lock = threading.Lock()
        self._watch: SidecarWatch | None = None
        self._engines: dict[_Engine, SupervisedThread] = {}
        """Each with the thread that waits for its end."""
        self._num_starting = 0
        self._closed = False
        self._place = Place(self.path)
        self._server = grpc.server(handler_threads("pdlink-sidecar", NUM_THREADS), options=OPTIONS)
        rpc.add_SidecarServicer_to_server(self, self._server)
        self._healthy = Healthy()
        health_pb2_grpc.add_HealthServicer_to_server(self._healthy, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            with private_files():
                self._server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:  # its text is about gRPC's own debugging
            self._place.close()
            raise InvalidInput(f"the sidecar cannot listen at {self.path}; give another path") from error

    @classmethod
    def start(cls, path: Path, settings: Settings, events: Events | None = None) -> SidecarServer:
        """Serve at `path`. Raises `InvalidInput` for a path that will not do, `ConfigError` for such settings, and
        `AddressError` for a wildcard `bind_host` without `advertise_host`."""
        advertised(Address(settings.bind_host, 0), settings.advertise_host)  # not first when an engine attaches a rank
        server = cls(path, settings, events)
        try:
            if settings.http_bind:
                told = (server.path, settings.http_bind, _told(settings), events or Events())
                server._watch = SidecarWatch(*told)
        except BaseException:
            server.close()
            raise
        server._server.start()
        for name in ("", SERVICE):
            server._healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        return server

    @property
    def http_address(self) -> Address | None:
        """Where `/healthz`, `/readyz` and `/metrics` are, with `http_bind` set."""
        return self._watch.address if self._watch else None

    def Open(self, request: pb.OpenRequest, context: grpc.ServicerContext) -> pb.OpenResponse:
        try:
            return pb.OpenResponse(opened=self._open(request))
        except PdlinkError as error:
            log.warning("an engine was refused: %s", error)
            return pb.OpenResponse(error=error_wire.pack_error(error))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            engines = dict(self._engines)
        self._healthy.enter_graceful_shutdown()
        self._server.stop(STOP_GRACE_S).wait(STOP_GRACE_S)
        for one in engines:
            one.child.close_input()
        for one, reaper in engines.items():
            one.child.end(END_TIMEOUT_S)
            reaper.join(END_TIMEOUT_S)
        if self._watch:
            self._watch.close()
        self._place.close()

    def __enter__(self) -> SidecarServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- engines ------------------------------------------------------------------------------------

    def _open(self, request: pb.OpenRequest) -> pb.Opened:
        if request.protocol != PROTOCOL:
            raise FrameError(
                f"the engine speaks sidecar protocol {request.protocol}, this sidecar {PROTOCOL}; install one version "
                "of pdlink for both"
            )
        with self._lock:
            if self._closed:
                raise StateError("this sidecar is ending")
            if len(self._engines) + self._num_starting >= MAX_ENGINES:
                raise LimitReached(f"{MAX_ENGINES} engines are served by this sidecar, which is the most")
            self._num_starting += 1
        try:
            return self._start()
        finally:
            with self._lock:
                self._num_starting -= 1

    def _start(self) -> pb.Opened:
        paths = self._place.engine_paths()
        slot, counts = self._watch.take_slot() if self._watch else (0, None)
        engine = _Engine(Child("the process of an engine", "pdlink.sidecar.engine_process"), paths, slot)
        try:
            sockets = dict(zip(("rpc", "lifeline", "handover"), map(str, paths), strict=True))
            engine.child.say({"settings": _told(self._settings), **sockets, "counts": counts})
            said = engine.child.hear(START_TIMEOUT_S)
        except (ChildEnded, DeadlineExceeded) as error:
            self._give_up(engine)
            raise PdlinkError(f"the sidecar could not start a process for the engine: {error}") from error
        except BaseException:
            self._give_up(engine)
            raise
        if "error" in said:
            self._give_up(engine)
            raise error_wire.unpack_error(common_pb2.ErrorDetail.FromString(bytes.fromhex(said["error"])))
        name = "pdlink-sidecar-reaper"
        reaper = SupervisedThread(lambda: self._reap(engine), name, "sidecar", events=self._events)
        if self._watch:
            self._watch.add(slot, engine.child.pid, paths[0])
        with self._lock:
            is_late = self._closed
            if not is_late:
                self._engines[engine] = reaper
                reaper.start()
        if is_late:
            self._give_up(engine)
            raise StateError("this sidecar is ending")
        rpc_path, life_path, fds_path = map(str, paths)
        return pb.Opened(socket=rpc_path, lifeline=life_path, handover=fds_path, backends=said["backends"])

    def _reap(self, engine: _Engine) -> None:
        """Wait for the end of a process, and remove what it leaves where it was killed."""
        for line in engine.child.listen():
            log.warning("the process of an engine says %s, which means nothing", json.dumps(line)[:200])
        code = engine.child.close(END_TIMEOUT_S)
        log.log(logging.WARNING if code else logging.INFO, "the process of an engine has ended with code %d", code)
        self._bury(engine, code)
        shm.sweep_stale()  # where the process did not see its engine die, too

    def _bury(self, engine: _Engine, code: int) -> None:
        if self._watch:
            self._watch.remove(engine.slot, code)
        with self._lock:
            self._engines.pop(engine, None)
        for path in engine.paths:
            remove(path)

    def _give_up(self, engine: _Engine) -> None:
        engine.child.kill()
        self._bury(engine, engine.child.close())


def _told(settings: Settings) -> dict[str, object]:
    """The settings for an engine's process, over a pipe of its own. Health and metrics are served by the sidecar."""
    told: dict[str, object] = settings.model_dump(exclude_unset=True)
    if settings.token is not None:
        told["token"] = settings.token.get_secret_value()
    told.pop("http_bind", None)
    return told
