"""Owns which memory is registered with one nixl agent, kept in step with a table of regions. It moves nothing.

Only differences are registered and taken back: peers hold keys of what stays, and a prepared list points into it.
"""

from __future__ import annotations

from pdlink.backends.nixl_endpoint import RegionTable
from pdlink.backends.nixl_engine import Agent
from pdlink.layout.regions import MemoryKind

Row = tuple[int, int, MemoryKind, int]


class NixlMemory:
    """The registrations of one agent. The caller serialises calls."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._held: set[Row] = set()

    def add(self, table: RegionTable) -> None:
        """Register what the table has and the agent has not, at once."""
        new = rows_of(table) - self._held
        if new:
            self._agent.register(sorted(new))
            self._held |= new

    def keep_only(self, table: RegionTable) -> None:
        """Take back what the table has not (any more)."""
        old = self._held - rows_of(table)
        if old:
            self._held -= old
            self._agent.deregister(sorted(old))


def rows_of(table: RegionTable) -> set[Row]:
    """(first address, past-the-end address, memory kind, device) of every region."""
    return {(first, end, table.memory, table.device) for first, end in table.spans.tolist()}
