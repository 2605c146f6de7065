"""Owns how the metrics of several processes come to one page: each counts into files of its own in one folder, and what
is shown is their sum. That is prometheus-client's multiprocess mode; nothing of a process that was killed is lost.

Files are named by slots, of which no two running processes have the same, instead of process ids: a process that takes
the slot of one that has ended counts on where that stopped, so that there are never more files than processes at once.
Counters and histograms are sums over all there have been, gauges over those that run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.observability.metrics import Families

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus-client's own name of the folder."""


def count_into(folder: Path, slot: int) -> None:
    """Have every metric that this process makes from now on count into files of `slot`. Before the first of them."""
    os.environ[VARIABLE] = str(folder)
    from prometheus_client import values

    values.ValueClass = values.MultiProcessValue(lambda: slot)  # type: ignore[no-untyped-call]


class SharedMetrics:
    """The metrics of all processes that count into `folder`, which is empty now and this one's to fill. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    def take_slot(self) -> int:
        """The least one that is free: for a process that is about to start."""
        with self._lock:
            slot = next(one for one in range(len(self._taken) + 1) if one not in self._taken)
            self._taken.add(slot)
            return slot

    def free(self, slot: int) -> None:
        """Its process has ended: its gauges are gone, its counts stay. Twice is fine."""
        from prometheus_client.multiprocess import mark_process_dead

        with self._lock:
            if slot in self._taken:
                mark_process_dead(slot, str(self.folder))  # type: ignore[no-untyped-call]
                self._taken.discard(slot)

    def among(self, own: Families) -> Families:
        """The sum of what these processes and `own` have counted."""
        from prometheus_client.multiprocess import MultiProcessCollector

        return _Sum((own, MultiProcessCollector(None, path=str(self.folder))))  # type: ignore[no-untyped-call]


class _Sum:
    """Families of the same name as one, with the sum of the samples that have the same labels."""

    def __init__(self, sources: Iterable[Families]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterable[Family]:
        from prometheus_client.metrics_core import Metric as Family

        found: dict[str, Family] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family in (one for source in self._sources for one in source.collect()):
            # The first to name a family describes it: a registry says more of it than files do.
            found.setdefault(family.name, Family(family.name, family.documentation, family.type, family.unit))
            samples = sums.setdefault(family.name, {})
            for one in family.samples:
                if not one.name.endswith("_created"):  # times, of which there is no sum
                    key = (one.name, tuple(sorted(one.labels.items())))
                    samples[key] = samples.get(key, 0.0) + one.value
        for name, family in found.items():
            for (sample, labels), value in sums[name].items():
                family.add_sample(sample, dict(labels), value)
        return found.values()
