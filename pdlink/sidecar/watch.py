"""Owns what a sidecar tells probes and scrapers: of its transports, and of the processes of its engines, whose metrics
it shows as one. It starts and ends none of them.

A process of an engine counts into files that this one reads (`shared_metrics`), so that what it had counted is shown
after it was killed, too; how it stands is asked when somebody probes or scrapes.
"""

from __future__ import annotations

import glob
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from pdlink.address import Address
from pdlink.errors import DeadlineExceeded
from pdlink.events import Events
from pdlink.health import Health
from pdlink.observability.http import Answer
from pdlink.observability.shared_metrics import SharedMetrics
from pdlink.observability.watch import Watch
from pdlink.testing.child import Child, ChildEnded
from pdlink.threads import SupervisedThread
from pdlink.v1 import sidecar_pb2 as pb
from pdlink.v1 import sidecar_pb2_grpc as rpc

log = logging.getLogger("pdlink.sidecar")

ASK_TIMEOUT_S = 2.0
"""For a process of an engine to say how it stands."""
FRESH_S = 0.25
"""What was heard stays good for so long, for a probe: a scrape asks, and then looks at health and readiness too."""
TRIAL_TIMEOUT_S = 60.0
LEAST_RETRY_S, MOST_RETRY_S = 2.0, 60.0
UNTRIED = "the transports are being tried"


@dataclass(slots=True, eq=False)
class _Seen:
    """One process of an engine. `said` is its newest answer, or why there is none."""

    pid: int
    channel: grpc.Channel
    said: pb.StandResponse | str


class SidecarWatch:
    """The probes and metrics of one sidecar. `close` twice is fine. Thread-safe."""

    def __init__(self, path: Path, bind: str, settings: Mapping[str, object], events: Events) -> None:
        """`path` is the sidecar's socket, beside which the counts lie; nobody else serves there. `settings` are those
        of its engines' processes. Raises as `Watch` does."""
        for old in path.parent.glob(f"{glob.escape(path.name)}.*.metrics"):
            shutil.rmtree(old, ignore_errors=True)
        folder = path.with_name(f"{path.name}.{secrets.token_hex(6)}.metrics")
        folder.mkdir(mode=0o700)
        self._events = events
        self._settings = dict(settings)
        self._health = Health(events)
        self._health.add("sidecar")
        self._shared = SharedMetrics(folder)
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._heard_at = 0.0
        self._engines: dict[int, _Seen] = {}
        """By slot."""
        self._transports = UNTRIED
        self._trial: Child | None = None
        self._closed = threading.Event()
        self._thread = SupervisedThread(
            self._try_transports, "pdlink-sidecar-trial", "sidecar", events=events, was_asked=lambda: self._is_settled
        )
        try:
            self._watch = Watch(bind, events, self.healthy, self.ready, self.tell_levels, self._shared.among)
        except BaseException:
            self._remove()
            raise
        self._thread.start()

    @property
    def address(self) -> Address:
        return self._watch.address

    def take_slot(self) -> tuple[int, dict[str, object]]:
        """For a process that is about to start: its slot, and what it must be told of it."""
        slot = self._shared.take_slot()
        return slot, {"folder": str(self._shared.folder), "slot": slot}

    def add(self, slot: int, pid: int, socket: Path) -> None:
        """The process of a slot serves at `socket`."""
        channel = grpc.insecure_channel(f"unix:{socket}")
        with self._lock:
            self._engines[slot] = _Seen(pid, channel, "it has not been asked yet")
            self._heard_at = 0.0
        self._events.emit("sidecar.engine_started")

    def remove(self, slot: int, code: int) -> None:
        """The process of a slot has ended, with that exit code."""
        with self._lock:
            seen = self._engines.pop(slot, None)
        if seen:
            seen.channel.close()
            self._events.emit("sidecar.engine_ended", how="failed" if code else "in_order")
        self._shared.free(slot)

    def healthy(self) -> Answer:
        """Whether this process and every engine's has all its threads, and answers."""
        report = self._health.report()
        return self._joined(report.reasons, report.parts, "health")

    def ready(self) -> Answer:
        """Whether engines can be served: the transports are there, and whatever an engine has registered is."""
        report = self._health.report()
        with self._lock:
            transports = self._transports
        reasons = (*report.reasons, *([f"transports: {transports}"] if transports else []))
        return self._joined(reasons, {**report.parts, "transports": transports}, "readiness")

    def tell_levels(self) -> None:
        """Have every process tell what gauges are set to."""
        self._ask(fresh_s=0.0)
        with self._lock:
            num_engines = len(self._engines)
        self._events.emit("sidecar.levels", num_engines=num_engines)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            trial = self._trial
        if trial:
            trial.kill()
        self._thread.join(TRIAL_TIMEOUT_S)
        self._watch.close()
        with self._lock:
            engines, self._engines = list(self._engines.values()), {}
        for one in engines:
            one.channel.close()
        self._remove()

    # --- engines ------------------------------------------------------------------------------------

    def _joined(self, own: tuple[str, ...], parts: Mapping[str, str], what: str) -> Answer:
        """What is said of this process, with what every engine's says."""
        self._ask()
        reasons, told = list(own), dict(parts)
        with self._lock:
            engines = [(one.pid, one.said) for one in self._engines.values()]
        for pid, said in engines:
            name = f"engine process {pid}"
            if isinstance(said, str):
                found = [said]
            else:
                standing: pb.Standing = getattr(said, what)
                found = list(standing.reasons)
                told |= {f"{name}: {part}": text for part, text in standing.parts.items()}
            told[name] = "; ".join(found)
            reasons += [f"{name}: {text}" for text in found]
        return Answer(not reasons, tuple(reasons), told)

    def _ask(self, fresh_s: float = FRESH_S) -> None:
        """Ask all processes at once, unless that was done in the last `fresh_s`."""
        with self._asking:
            with self._lock:
                engines = list(self._engines.values())
                is_fresh = time.monotonic() - self._heard_at < fresh_s
            if is_fresh or not engines:
                return
            for one, call in [(one, _begin(one)) for one in engines]:
                one.said = _said(call)
            with self._lock:
                self._heard_at = time.monotonic()

    # --- transports ---------------------------------------------------------------------------------

    @property
    def _is_settled(self) -> bool:
        return self._closed.is_set() or not self._transports

    def _try_transports(self) -> None:
        """Until they are there: what is missing may be installed, or freed, meanwhile."""
        delay_s = LEAST_RETRY_S
        while not self._closed.is_set():
            text = self._try_once()
            if text and text != self._transports and not self._closed.is_set():
                log.warning("this sidecar is not ready: %s", text)
            with self._lock:
                self._transports = text
            if not text or self._closed.wait(delay_s):
                return
            delay_s = min(MOST_RETRY_S, 2 * delay_s)

    def _try_once(self) -> str:
        """What is wrong with them, or ""."""
        with Child("the trial of the transports", "pdlink.sidecar.trial") as child:
            with self._lock:
                self._trial = child
            try:
                if self._closed.is_set():
                    return UNTRIED
                child.say({"settings": self._settings})
                said = child.hear(TRIAL_TIMEOUT_S)
            except (ChildEnded, DeadlineExceeded) as error:
                child.kill()
                return str(error)
            finally:
                with self._lock:
                    self._trial = None
        if "error" in said:
            return str(said["error"])
        log.info("transports of this sidecar: %s", ", ".join(said["backends"]))
        return ""

    def _remove(self) -> None:
        self._health.close()
        with suppress(OSError):
            shutil.rmtree(self._shared.folder)


def _begin(seen: _Seen) -> grpc.Future[pb.StandResponse] | None:
    """Ask a process how it stands; None where it has ended meanwhile."""
    try:
        stub = rpc.SidecarEngineStub(seen.channel)
        call: grpc.Future[pb.StandResponse] = stub.Stand.future(pb.StandRequest(), timeout=ASK_TIMEOUT_S)
    except ValueError:  # gRPC's own, of a channel that was closed
        return None
    return call


def _said(call: grpc.Future[pb.StandResponse] | None) -> pb.StandResponse | str:
    """The answer, or why there is none."""
    try:
        if call is not None:
            return call.result(timeout=2 * ASK_TIMEOUT_S)  # gRPC itself gives up before
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"it has not answered for {ASK_TIMEOUT_S:g} s"
    except (grpc.FutureCancelledError, grpc.FutureTimeoutError):
        pass  # its channel was closed
    return "it does not answer: it is ending, or was killed"
