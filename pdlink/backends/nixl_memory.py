"""Owns which memory is registered with one nixl agent, kept in step with a table of regions. It moves nothing.

Only differences are registered and taken back: peers hold keys of what stays, and a prepared list points into it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from pdlink.backends.nixl_endpoint import RegionTable, memory_of
from pdlink.backends.nixl_engine import Agent
from pdlink.errors import BackendError, RegionError
from pdlink.layout.regions import MemoryKind

Row = tuple[int, int, MemoryKind, int]


class NixlMemory:
    """The registrations of one agent. The caller serialises calls."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._held: set[Row] = set()
        self._table: RegionTable | None = None
        """The table that is registered and nothing else, where that is known."""

    def add(self, table: RegionTable) -> None:
        """Register what the table has and the agent has not, all of a kind at once. Raises `RegionError`."""
        if table is self._table:
            return
        self._table = None
        for memory, new in _by_kind(rows_of(table) - self._held):
            try:
                self._agent.register(new)
            except BackendError as error:
                if memory is not MemoryKind.CUDA:
                    raise
                raise RegionError(
                    f"nixl refuses memory of CUDA device {new[0][3]}: {error}; UCX_TLS (now "
                    f"{os.environ.get('UCX_TLS', 'all')}) must let cuda_copy and cuda_ipc in, and the memory must come "
                    "from cudaMalloc (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"
                ) from error
            self._held.update(new)

    def keep_only(self, table: RegionTable) -> None:
        """Take back what the table has not (any more)."""
        if table is self._table:
            return
        for _, old in _by_kind(self._held - rows_of(table)):
            self._held.difference_update(old)
            self._agent.deregister(old)
        self._table = table if self._held == rows_of(table) else None


def _by_kind(rows: set[Row]) -> Iterator[tuple[MemoryKind, list[Row]]]:
    for memory in MemoryKind:
        alike = sorted(row for row in rows if row[2] is memory)
        if alike:
            yield memory, alike


def rows_of(table: RegionTable) -> set[Row]:
    """(first address, past-the-end address, memory kind, device) of every region."""
    columns = (*table.spans.T.tolist(), table.kind.tolist(), table.device.tolist())
    return {(first, end, memory_of(kind), device) for first, end, kind, device in zip(*columns, strict=True)}
