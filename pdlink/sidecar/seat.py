"""Owns one process of a sidecar as an engine has it: the stream to it, the workers attached over that, and the way back
when the sidecar was away. There is one for each GPU whose memory the engine's pools are in.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from pdlink.errors import PdlinkError
from pdlink.sidecar.engine_worker import EngineWorker
from pdlink.sidecar.stream import EngineStream, SidecarGone
from pdlink.threads import SupervisedThread

log = logging.getLogger("pdlink.sidecar")

LEAVE_TIMEOUT_S = 30.0
LEAST_RETRY_S, MOST_RETRY_S = 0.05, 1.0


class Seat:
    """One process. `close` twice is fine, after that of the workers."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Reach it (blocks). Raises as `EngineStream`."""
        self.gpu: bytes | None = None
        """Whose pools it serves, by UUID; empty: the host's; None until a first worker comes."""
        self._path = path
        self._timeout_s = timeout_s
        self._stream: EngineStream | None = EngineStream(path, timeout_s)
        self.backends = self._stream.backends
        self._workers: list[EngineWorker] = []
        self._lock = threading.Lock()
        """Held while workers are attached: to a stream, all of them or none."""
        self._closed = threading.Event()
        self._keeper = SupervisedThread(self._keep, "pdlink-sidecar-keeper", "sidecar client")
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none, or where it cannot be seen."""
        stream = self._stream
        return stream.pid if stream and not stream.is_over else 0

    @property
    def is_there(self) -> bool:
        stream = self._stream
        return stream is not None and not stream.is_over

    def add(self, worker: EngineWorker) -> None:
        """Attach it, now and whenever the sidecar was away. Raises what the sidecar refuses with."""
        with self._lock:
            if self._stream is None or self._closed.is_set():
                raise SidecarGone(f"no sidecar answers at {self._path} now; the client goes back by itself")
            worker.attach(self._stream)
            self._workers.append(worker)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            stream = self._stream
        if stream:
            stream.leave(LEAVE_TIMEOUT_S)
        self._keeper.join(self._timeout_s + LEAVE_TIMEOUT_S)

    # --- inside -------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Be attached: go back to the sidecar whenever it was away."""
        while True:
            stream = self._stream
            assert stream is not None
            stream.wait_ended()
            if self._closed.is_set():
                return
            log.warning("the sidecar at %s is away (%s); requests fail until it is back", self._path, stream.reason)
            with self._lock:
                self._stream = None
            if not self._go_back():
                return

    def _go_back(self) -> bool:
        """Whether it was found, before `close`."""
        delay_s = LEAST_RETRY_S
        said = ""
        while not self._closed.wait(delay_s):
            delay_s = min(MOST_RETRY_S, 2 * delay_s)
            try:
                stream = EngineStream(self._path, self._timeout_s)
            except PdlinkError as error:
                if str(error) != said:
                    log.warning("%s", error)
                said = str(error)
                continue
            with self._lock:
                is_closed = self._closed.is_set()
                if not is_closed:
                    self._attach_all(stream)
                    self._stream = stream
            if is_closed:
                stream.leave(LEAVE_TIMEOUT_S)
            return not is_closed
        return False

    def _attach_all(self, stream: EngineStream) -> None:
        for worker in self._workers:
            try:
                worker.attach(stream)
            except SidecarGone:
                return  # this stream has ended too, which is seen next
            except PdlinkError as error:
                log.error("%s cannot be attached to the sidecar again: %s", worker.name, error)
        log.warning("back at the sidecar at %s", self._path)
