"""Owns a cluster of real processes: bootstraps, prefill ranks, readers, a man in the middle; told and heard in lines.

Processes are asked by name. One that was killed is started again under the same name, at the same address. What is to
be received, and what comes of it, is `load`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlink.testing.child import Child, ChildEnded
from tests.faults.hosts import Hosts
from tests.faults.shape import NUM_PAGES, SETTINGS
from tests.link.transports import Transport

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 40.0
END_TIMEOUT_S = 40.0
PORTS = range(20_000, 32_000)
"""Below those that Linux gives to whoever asks for any, and above those of mooncake."""
MOONCAKE_LANES = "1"
DAY_SIGNALS = {1: signal.SIGUSR1, -1: signal.SIGUSR2}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cluster consists of. `settings` are every rank's and reader's, on top of `SETTINGS`."""

    transport: Transport
    way: str = "direct"
    num_ranks: int = 2
    num_readers: int = 1
    num_bootstraps: int = 2
    middleman: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of the processes that may be harmed."""
        return [*self.bootstraps, *self.ranks, *self.readers]

    @property
    def ranks(self) -> list[str]:
        return [f"rank{number}" for number in range(self.num_ranks)]

    @property
    def readers(self) -> list[str]:
        return [f"reader{number}" for number in range(self.num_readers)]

    @property
    def bootstraps(self) -> list[str]:
        return [f"bootstrap{number}" for number in range(self.num_bootstraps)]

    @property
    def hosts(self) -> list[str]:
        """All prefill ranks share one, all readers another; each bootstrap has its own."""
        return ["prefill", "decode", *self.bootstraps]


def host_of(name: str) -> str:
    """On which host a process runs."""
    if name.startswith("bootstrap"):
        return name
    return "decode" if name.startswith("reader") else "prefill"


@dataclass
class Process:
    """One process, in one life of it."""

    child: Child
    is_stopped: bool = False
    ready: dict[str, Any] | None = None
    has_ended: bool = False
    must_live: bool = True


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process that nobody asked for. `code` is negative for a signal; `at` is of `time.monotonic`."""

    name: str
    code: int
    at: float


OnSaid = Callable[[str, dict[str, Any]], None]
OnDied = Callable[[str], None]


class Cluster:
    """`on_said` gets every line that answers no question, `on_died` the name of a process that ended; both come from
    `pump`, on the caller's thread. Use one thread."""

    def __init__(self, plan: Plan, hosts: Hosts, stack: contextlib.ExitStack, log: Path | None = None) -> None:
        self.plan, self.hosts, self.log = plan, hosts, log
        self.on_said: OnSaid = lambda name, said: None
        self.on_died: OnDied = lambda name: None
        self.processes: dict[str, Process] = {}
        self.unexpected: list[Death] = []
        """Who died though nobody killed it, since the list was last emptied."""
        self._lines: queue.SimpleQueue[tuple[str, Process, str | None]] = queue.SimpleQueue()
        self._answers: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count()
        self._ports: dict[str, int] = {}
        for name in [*plan.names, *(f"middle of {one}" for one in plan.ranks)]:
            self.move(name)
        self._threads: list[threading.Thread] = []
        self.exit_codes: dict[str, int] = {}
        """Of those that were there to be ended, once closed."""
        self._pids: set[int] = set()
        self._replaced: list[Process] = []
        """Processes that live on though another has taken their name."""
        stack.callback(self.close)

    @property
    def bootstrap_addresses(self) -> list[str]:
        return [f"{self.hosts[name].address}:{self._ports[name]}" for name in self.plan.bootstraps]

    def start(self) -> None:
        """All processes; returns when each is ready."""
        if self.plan.middleman:
            here = self.hosts["prefill"].address
            lanes = [
                (f"{here}:{self._ports[f'middle of {one}']}", f"{here}:{self._ports[one]}") for one in self.plan.ranks
            ]
            self._start("middleman", "prefill", "tests.faults.middleman_process", {"lanes": lanes})
        for name in self.plan.names:
            self.launch(name)
        self.wait_ready(*self.plan.names, *(["middleman"] if self.plan.middleman else []))

    def move(self, name: str) -> None:
        """Its next life is at another port, which no process of this cluster has had."""
        while (port := free_port()) in self._ports.values():
            continue
        self._ports[name] = port

    def launch(self, name: str, env: Mapping[str, str] | None = None) -> None:
        """Start a process (again); returns at once. `env` is set for it alone."""
        settings = {"backends": self.plan.transport.backend, "way": self.plan.way}
        settings |= SETTINGS | dict(self.plan.settings) | {"bind_host": self.hosts[host_of(name)].address}
        who: dict[str, object] = {
            "name": name,
            "bootstraps": self.bootstrap_addresses,
            "num_pages": NUM_PAGES,
            "settings": settings,
            "port": self._ports[name],
            "patience_s": START_TIMEOUT_S,
        }
        if name.startswith("bootstrap"):
            bind = f"{self.hosts[name].address}:{self._ports[name]}"
            self._start(name, name, "pdlink", None, "bootstrap", "--bind", bind, env=env)
        elif name.startswith("reader"):
            self._start(name, "decode", "tests.faults.reader_process", who, env=env)
        else:
            where = f"{self.hosts['prefill'].address}:{self._ports[f'middle of {name}']}"
            who |= {"rank": int(name.removeprefix("rank")), "cp": self.plan.num_ranks}
            self._start(
                name, "prefill", "tests.faults.rank_process", who | {"middleman": where * self.plan.middleman}, env=env
            )

    def wait_ready(self, *names: str, timeout_s: float = START_TIMEOUT_S) -> None:
        def are_ready() -> bool:
            dead = [name for name in names if self.processes[name].has_ended]
            assert not dead, f"{dead} ended before they were ready; see what they wrote"
            return all(self.processes[name].ready for name in names)

        self.wait_for(are_ready, timeout_s, f"{names} are not ready")

    def wait_for(self, holds: Callable[[], bool], timeout_s: float, text: str) -> None:
        give_up = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < give_up, f"{text} after {timeout_s:g} s"
            self.pump()

    def can_answer(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and bool(process.ready) and not process.has_ended and not process.is_stopped

    def tell(self, name: str, **told: Any) -> int:
        """Say something and wait for nothing; a process that is not there does not hear it."""
        number = next(self._numbers)
        with contextlib.suppress(ChildEnded):
            if not self.processes[name].has_ended:
                self.processes[name].child.say({**told, "n": number})
        return number

    def ask(self, name: str, **told: Any) -> dict[str, Any] | None:
        """The answer, or None where the process ends, or is stopped, before it comes."""
        if not self.can_answer(name):
            return None
        number, process = self.tell(name, **told), self.processes[name]
        give_up = time.monotonic() + ANSWER_TIMEOUT_S
        while number not in self._answers:
            self.pump()
            if process.has_ended or self.processes[name] is not process:
                return None
            assert time.monotonic() < give_up, f"{name} does not answer {told['do']} within {ANSWER_TIMEOUT_S:g} s"
        return self._answers.pop(number)

    def pump(self, timeout_s: float = 0.01) -> None:
        """Hand on what processes have said; waits a moment where they say nothing."""
        with contextlib.suppress(queue.Empty):
            while True:
                name, process, line = self._lines.get(timeout=timeout_s)
                timeout_s = 0.0
                self._hear(name, process, line)

    def wait_a_moment(self, seconds: float = 0.2) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.pump()

    # --- what is done to processes ----------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Without a goodbye. Returns when all that it had said is heard."""
        process = self.processes[name]
        process.must_live = False
        process.child.kill()
        self.wait_for(lambda: process.has_ended, END_TIMEOUT_S, f"{name} lives on")

    def exit(self, name: str) -> None:
        """It leaves in the middle of what it does, as an engine that gives up."""
        process = self.processes[name]
        process.must_live = False
        if name.startswith("bootstrap"):
            os.kill(process.child.pid, signal.SIGTERM)
        else:
            self.tell(name, do="exit")
        try:
            self.wait_for(lambda: process.has_ended, END_TIMEOUT_S, f"{name} does not exit")
        finally:
            process.child.kill()

    def stop(self, name: str) -> None:
        self.processes[name].is_stopped = True
        self.processes[name].child.stop()

    def resume(self, name: str) -> None:
        self.processes[name].child.resume()
        self.processes[name].is_stopped = False

    def jump_clock(self, name: str, days: int) -> None:
        os.kill(self.processes[name].child.pid, DAY_SIGNALS[days])

    def revive(self) -> list[str]:
        """Start whoever has ended, and wait for it; their names."""
        dead = [name for name in self.plan.names if self.processes[name].has_ended]
        for name in dead:
            self.processes[name].child.close()
            self.launch(name)
        if dead:
            self.wait_ready(*dead)
        return dead

    def kill_all(self) -> None:
        """At once and out of order, for when a test has failed; `close` does the rest."""
        for process in (*self._replaced, *self.processes.values()):
            process.must_live = False
            process.child.kill()

    def close(self) -> None:
        """End everything in order; twice is fine."""
        for process in self._replaced:
            process.must_live = False
            process.child.close()
        for name, process in self.processes.items():
            process.must_live = False
            if process.is_stopped:
                process.child.kill()
            elif name.startswith("bootstrap") and process.child.is_alive:
                os.kill(process.child.pid, signal.SIGTERM)
            else:
                process.child.close_input()
        for name, process in self.processes.items():
            code = process.child.end(END_TIMEOUT_S)
            if not (process.is_stopped or process.has_ended) and name not in self.exit_codes:
                self.exit_codes[name] = code
        for thread in self._threads:
            thread.join(END_TIMEOUT_S)
        for process in self.processes.values():
            process.child.close()
        self._threads.clear()

    def left_segments(self) -> list[str]:
        """Shared memory of ours that is still there though every process has ended."""
        named = [path.name for path in Path("/dev/shm").glob("pdlink-*")]
        return sorted(name for name in named if name.split("-")[1].isdigit() and int(name.split("-")[1]) in self._pids)

    # --- lines --------------------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        host: str,
        module: str,
        who: dict[str, object] | None,
        *arguments: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        lease = {"PDLINK_REGISTRATION_LEASE_S": str(SETTINGS["registration_lease_s"])} if who is None else {}
        env = {"PYTHONPATH": str(ROOT), **self.plan.transport.env, **lease, **(env or {})}
        if self.hosts.can_cut and self.plan.transport.backend == "nixl":
            env["UCX_NET_DEVICES"] = self.hosts.device
        if self.plan.transport.backend == "mooncake":  # it opens as many as it likes, and when it likes
            env["MC_TCP_LANES_PER_PEER"] = MOONCAKE_LANES
        log = self.log / f"{name}.{time.monotonic_ns()}.log" if self.log else None
        holder = str(self.hosts[host].holder)
        child = Child(name, "tests.faults.launch", [holder, module, *arguments], env, log=log)
        if name in self.processes and not self.processes[name].has_ended:
            self._replaced.append(self.processes[name])
        process = self.processes[name] = Process(child)
        self._pids.add(child.pid)
        if who is not None:
            child.say(who)
        thread = threading.Thread(target=self._listen, args=(name, process), name=f"hears {name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _listen(self, name: str, process: Process) -> None:
        for line in process.child.listen():
            self._lines.put((name, process, line))
        self._lines.put((name, process, None))

    def _hear(self, name: str, process: Process, line: str | None) -> None:
        if line is None:
            process.has_ended = True
            if process.must_live:
                self.unexpected.append(Death(name, process.child.wait(END_TIMEOUT_S), time.monotonic()))
            self.on_died(name)
        elif name.startswith("bootstrap"):
            if line.startswith("bootstrap serves"):
                process.ready = {"ready": process.child.pid}
        else:
            said = json.loads(line)
            if "ready" in said:
                process.ready = said
            elif "re" in said:
                self._answers[said["re"]] = said
            else:
                self.on_said(name, said)


def free_port() -> int:
    """A port that nobody has right now, and that the kernel gives to nobody: it is used again and again."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running(plan: Plan, hosts: Hosts, log: Path | None = None) -> Iterator[Cluster]:
    """A cluster that has started."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(plan, hosts, stack, log)
        try:
            try:
                cluster.start()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{said(log) if log else ''}") from error
            yield cluster
        except BaseException:
            cluster.kill_all()
            raise


def said(logs: Path) -> str:
    """The last lines that processes wrote to standard error."""
    tails = [
        (path.name, path.read_text(encoding="utf-8", errors="replace")[-800:]) for path in sorted(logs.glob("*.log"))
    ]
    return "\n".join(f"--- {name}\n{text}" for name, text in tails if text)
