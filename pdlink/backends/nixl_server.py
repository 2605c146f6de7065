"""Owns the serving side of the nixl backend: the agent whose memory peers read, and the thread that drives it.

Over tcp a read moves only while the owner's agent is driven too. The thread looks every `BUSY_S` while requests may be
read, and every `IDLE_S` otherwise, for connections that come and go.
"""

from __future__ import annotations

import logging
import threading

from pdlink.backends.nixl_endpoint import RegionTable, pack
from pdlink.backends.nixl_engine import Agent
from pdlink.backends.nixl_memory import NixlMemory
from pdlink.errors import BackendError, RegionError
from pdlink.threads import OnDeath, SupervisedThread

log = logging.getLogger("pdlink.backends")

BUSY_S = 200e-6
IDLE_S = 0.25
JOIN_TIMEOUT_S = 5.0


class NixlServer:
    """Serves regions to peers. `close` twice is fine."""

    def __init__(self, on_death: OnDeath) -> None:
        """Start the engine. Raises `BackendUnavailable` with the reason. `on_death` is told when the thread dies, on
        it: what peers read may not come any further then."""
        self._on_death = on_death
        self.agent = Agent()
        self._lock = threading.Lock()
        self._memory = NixlMemory(self.agent)
        self._read_owners: set[str] = set()
        self._busy = threading.Event()
        self._closing = threading.Event()
        self._thread: SupervisedThread | None = None

    def endpoint(self, table: RegionTable) -> bytes:
        """Register the regions at once, and describe them and the agent."""
        with self._lock:
            if self._thread is None and table.cuda_device is not None:
                # What UCX knows of devices is what it saw when the agent was made; nobody has heard of this one yet.
                self.agent.destroy()
                self.agent = Agent(table.cuda_device)
                self._memory = NixlMemory(self.agent)
            self._memory.add(table)
            self._memory.keep_only(table)
            blob = pack(self.agent.metadata(), table)
            if self._thread is None:
                thread = SupervisedThread(
                    self._drive,
                    "pdlink-nixl-serve",
                    "backend nixl",
                    on_death=self._on_death,
                    was_asked=self._closing.is_set,
                )
                thread.start()
                self._thread = thread
            elif self._thread.death:
                raise RegionError(f"backend nixl serves nothing any more: {self._thread.death.text}")
            return blob

    def keep_only(self, table: RegionTable) -> None:
        """Take back what is registered and not in the table."""
        with self._lock:
            if not self.agent.is_destroyed:
                self._memory.keep_only(table)

    def serve(self, owner: str, num_readers: int) -> None:
        with self._lock:
            if num_readers:
                self._read_owners.add(owner)
                self._busy.set()
            else:
                self._read_owners.discard(owner)
                if not self._read_owners and not self._closing.is_set():
                    self._busy.clear()

    def close(self) -> None:
        self._closing.set()
        self._busy.set()
        if self._thread:
            self._thread.join(JOIN_TIMEOUT_S)
        with self._lock:
            self.agent.destroy()

    def _drive(self) -> None:
        while not self._closing.wait(BUSY_S):
            try:
                self.agent.call("make progress", lambda nixl: nixl.get_new_notifs())
            except BackendError as error:  # a reader that went away is its own loss
                log.debug("nixl: %s", error)
            if not self._busy.is_set():
                self._busy.wait(IDLE_S)
