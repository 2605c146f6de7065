"""Owns copies of pages by kernels of one device: from its own memory, another device's, or pinned host memory.

It checks no range.
What packs and unpacks device slots, and what pulls pages over a mapping of the owner's memory.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdlink.backends.copiers import Copier, Prepared
from pdlink.backends.cuda_driver import DeviceBlock, PinnedBlock, call, num_multiprocessors, on_device
from pdlink.backends.cuda_kernels import CHUNK_BYTES, NUM_THREADS, WORD_BYTES, load_gather
from pdlink.backends.cuda_stream import Mark, Stream
from pdlink.transfer.descriptors import GroupMove, Int64Array, LayerTable, PageRuns, PullBatch
from pdlink.transfer.kept import Kept

LAYER_COLUMNS = 8
MAX_TEMPLATES = 256
NUM_TABLES = 12
KEPT_TABLES = 4
"""Tables that prepared copies leave for those that are started at once."""
TABLE_BYTES = 1 << 20
"""What one launch may read of page pairs and layers: room for about 65,000 pairs. A larger move takes several."""

NUM_ARGUMENTS = 5
"""Of a kernel, 8 bytes each."""


class Copying:
    """A batch whose kernels have been launched. Its addresses stay in use until `is_over`."""

    def __init__(self, marks: list[Mark]) -> None:
        self._marks = marks

    @property
    def is_over(self) -> bool:
        """Whether nothing of it moves any more."""
        return all(mark.is_over for mark in self._marks)

    def wait(self) -> None:
        """Return once every byte is in place and visible. Raises `BackendError` when the device has failed."""
        for mark in self._marks:
            mark.wait()


class DeviceCopier(Copier):
    """Copies on a stream of its own, one device. Thread-safe; `close` twice is fine, and waits for what is launched.

    Everything that a copy needs is made here, because making device memory may wait for work that an engine has
    launched. Raises `BackendUnavailable`.
    """

    wants_runs = False

    def __init__(self, device: int) -> None:
        self.device = device
        self._kernels = load_gather(device)
        self._num_blocks = num_multiprocessors(device)
        self._stream = Stream(device)
        self._tables = deque(_Table(device) for _ in range(NUM_TABLES))
        """Those that no prepared copy holds, the one that has been free for longest first."""
        self._templates: Kept[LayerTable, LayerRows] = Kept(MAX_TEMPLATES)
        self._lock = threading.Condition()
        self._closed = False

    def start(self, batch: PullBatch) -> Copying:
        """Launch the copies of `batch`, whose addresses the device can reach. Waits only where many are under way.

        The caller vouches for the addresses, that nobody writes the source meanwhile or that it notices, and that
        nobody reads or writes the destination before this is over.
        """
        with on_device(self.device):
            return Copying([self._launch(self._fill(piece)) for piece in _pieces(batch)])

    def prepare(self, batch: PullBatch) -> Prepared:
        """As the base says: what the kernels read is on the device already when it is started, while tables last."""
        pieces = list(_pieces(batch))
        with self._lock:
            if len(self._tables) < len(pieces) + KEPT_TABLES:
                return super().prepare(batch)
        with on_device(self.device):
            return _Filled(self, [self._fill(piece) for piece in pieces])

    def copy(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        """Copy every row of `batch`; False when `stop` said so before anything was launched. Quiet on return."""
        if stop():
            return False
        self.start(batch).wait()
        return True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stream.close()
            for table in self._tables:
                table.close()

    def _fill(self, move: GroupMove) -> _Launch:
        """Take a table, and put into it what the kernel reads of `move`. On the device."""
        source, destination = move.runs.source_pages(), move.runs.destination_pages()
        template = self._templates.of(move.layers, lambda: LayerRows.of(move.layers))
        layers, num_units = template.rows_of(len(source))
        with self._lock:
            self._lock.wait_for(lambda: bool(self._tables))
            table = self._tables.popleft()
            try:
                if table.mark:
                    table.mark.wait()
                    table.mark = None
                places = table.fill((source, destination, layers.reshape(-1)), self._stream)
            except BaseException:  # or whoever comes when none is left would wait for it for ever
                self._take_back(table)
                raise
        table.set_arguments(*places, len(layers), num_units)
        return _Launch(table, self._kernels[template.word_bytes], min(num_units, self._num_blocks))

    def _launch(self, filled: _Launch) -> Mark:
        """On the device."""
        table = filled.table
        with self._lock:
            shape = (filled.num_blocks, 1, 1, NUM_THREADS, 1, 1, 0)
            try:
                call("cuLaunchKernel", filled.kernel, *shape, self._stream.handle, table.arguments, 0)
                table.mark = self._stream.mark()
            finally:
                self._take_back(table)
            return table.mark

    def _take_back(self, table: _Table) -> None:
        """A table that is launched, or was filled for nothing: one stream fills it, reads it, and fills it anew."""
        with self._lock:
            if self._closed:
                table.close()
            self._tables.append(table)
            self._lock.notify()


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """A kernel, and the table that it reads."""

    table: _Table
    kernel: Any
    num_blocks: int


class _Filled:
    """A copy whose tables are filled, and its own until it is started or forgotten."""

    def __init__(self, copier: DeviceCopier, launches: list[_Launch]) -> None:
        self._copier = copier
        self._launches = launches

    def start(self) -> Copying:
        marks = []
        with on_device(self._copier.device):
            while self._launches:  # what is left when one fails goes back as if forgotten
                marks.append(self._copier._launch(self._launches.pop(0)))
        return Copying(marks)

    def __del__(self) -> None:
        for one in self._launches:
            self._copier._take_back(one.table)


class _Table:
    """What one launch reads: page ids and layer rows, written here and copied to the device ahead of the kernel, whose
    arguments lie here too."""

    def __init__(self, device: int) -> None:
        self.mark: Mark | None = None
        """Until it is over, the table is in use."""
        self._there = DeviceBlock(TABLE_BYTES, device)
        self._here = PinnedBlock(TABLE_BYTES, device)
        self._view: Int64Array = np.ctypeslib.as_array(
            (ctypes.c_int64 * (TABLE_BYTES // 8)).from_address(self._here.address)
        )
        self._arguments = (ctypes.c_int64 * NUM_ARGUMENTS)()
        first = ctypes.addressof(self._arguments)
        self._pointers = (ctypes.c_void_p * NUM_ARGUMENTS)(*range(first, first + 8 * NUM_ARGUMENTS, 8))
        self.arguments = ctypes.addressof(self._pointers)
        """Where the driver, which reads them during the launch, finds pointers to them."""

    def fill(self, columns: tuple[Int64Array, ...], stream: Stream) -> tuple[int, ...]:
        """Copy the columns over, in the stream's order; returns where each lies on the device."""
        at, places = 0, []
        for column in columns:
            places.append(self._there.address + 8 * at)
            at += len(column)
        np.concatenate(columns, out=self._view[:at])
        call("cuMemcpyHtoDAsync", self._there.address, self._here.address, 8 * at, stream.handle)
        return tuple(places)

    def set_arguments(self, *values: int) -> None:
        self._arguments[:] = list(values)

    def close(self) -> None:
        self._there.close()
        self._here.close()


def _pieces(batch: PullBatch) -> Iterator[GroupMove]:
    return (piece for move in batch.moves if move.nbytes for piece in fitting(move))


def fitting(move: GroupMove) -> Iterator[GroupMove]:
    """The move in pieces of which each fits one table: by layers where there are very many, then by pages."""
    max_layers = TABLE_BYTES // 2 // (8 * LAYER_COLUMNS)
    if 8 * LAYER_COLUMNS * move.layers.num_layers + 16 * move.runs.num_pages <= TABLE_BYTES // 2:
        yield move  # nearly every one; the wire waits for it
        return
    for first in range(0, move.layers.num_layers, max_layers):
        rows = np.arange(first, min(first + max_layers, move.layers.num_layers), dtype=np.int64)
        layers = move.layers if len(rows) == move.layers.num_layers else move.layers.take(rows)
        max_pages = (TABLE_BYTES - 8 * LAYER_COLUMNS * len(rows)) // 16
        if move.runs.num_pages <= max_pages:
            yield GroupMove(move.group, move.runs, layers)
            continue
        pairs = move.runs.split()
        for at in range(0, pairs.num_runs, max_pages):
            piece = slice(at, at + max_pages)
            runs = PageRuns(pairs.source[piece], pairs.destination[piece], pairs.count[piece])
            yield GroupMove(move.group, runs, layers)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """The kernel's rows of some layers, but for the number of pages, which their last column is multiplied with.

    `rows`: int64 [layers, 8]. A page of more than `CHUNK_BYTES` is cut into units of about equal size, which are
    multiples of 16 bytes; `units` is how many a page has in all layers. `word_bytes`: the widest word of a kernel that
    divides every address and size.
    """

    rows: Int64Array
    units: int
    word_bytes: int

    @classmethod
    def of(cls, layers: LayerTable) -> LayerRows:
        units_per_page = -(-layers.page_bytes // CHUNK_BYTES)
        unit_bytes = (layers.page_bytes + 16 * units_per_page - 1) // (16 * units_per_page) * 16
        places = (layers.source_base, layers.source_stride, layers.destination_base, layers.destination_stride)
        before = np.cumsum(units_per_page) - units_per_page
        columns = (*places, layers.page_bytes, unit_bytes, units_per_page, before)
        common = math.gcd(*(int(np.gcd.reduce(one)) for one in (*places, layers.page_bytes)))
        word = next(word for word in WORD_BYTES if common % word == 0)
        return cls(np.stack(columns, axis=1), int(units_per_page.sum()), word)

    def rows_of(self, num_pages: int) -> tuple[Int64Array, int]:
        """The rows for a move of `num_pages` pages, and into how many units it is cut."""
        rows = self.rows.copy()
        rows[:, -1] *= num_pages
        return rows, self.units * num_pages
