"""Owns one process of a baseline of `pdlink bench transfer`: memory, fills, checks and the clock around a library that
is driven directly. It imports nothing of pdlink and is run by path: `python -P raw_process.py LIBRARY owner|reader`.

LIBRARY names a neighbour file `raw_LIBRARY.py` with two classes: `Owner(memory, option)`, and `Reader(memory, option,
told, source)`, where `told` is what the owner's `told()` returned. One JSON line in, one out, until the input ends.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

IDLE_S = 60.0


@dataclass(slots=True)
class Memory:
    """`nbytes` bytes at `address`, touched. `device` is -1 for host memory.

    `block` (see `transfer_bytes`) fills and checks it; `keep` is what holds it.
    """

    address: int
    nbytes: int
    device: int
    block: Any
    keep: Any


def load(name: str) -> ModuleType:
    """The neighbour file `name`.py as a module, though none of its folder can be imported."""
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(bytes_of: ModuleType, shape: Any, device: int, path: str) -> Memory:
    """Memory for a pool: the shared memory at `path`, or one allocation of torch on GPU `device`.

    On the host it is the very memory that the other side of the comparison uses: how quick a copy is depends on where
    the kernel has put its pages, by a fifth and more.
    """
    nbytes = shape.block_bytes
    if device < 0:
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), nbytes)
        array = np.frombuffer(mapped, dtype=np.int64)
        array[:] = 0
        address = int(array.__array_interface__["data"][0])
        return Memory(address, nbytes, device, bytes_of.Block(array, shape), mapped)
    import torch

    where = f"cuda:{device}"
    tensor = torch.zeros(nbytes // 8, dtype=torch.int64, device=where)
    torch.cuda.synchronize(where)
    return Memory(tensor.data_ptr(), nbytes, device, bytes_of.Block(tensor, shape, where), tensor)


def use_device(device: int) -> None:
    """Make a GPU the one that libraries find current; nothing for the host's -1."""
    if device >= 0:
        import torch

        torch.cuda.set_device(device)


class Side:
    """One end of the baseline. `devices` are the GPUs of owner and reader, -1 for the host."""

    def __init__(self, library: ModuleType, role: str) -> None:
        self._library = library
        self._bytes_of = load("transfer_bytes")
        self._is_owner = role == "owner"
        self._memory: Memory | None = None
        self._source: Memory | None = None
        self._end: Any = None

    def open(self, shape: list[Any], devices: list[int], paths: list[str], option: dict[str, Any], told: Any) -> Any:
        """Find the memory and start the library; a reader of a library that needs no owner has both memories.

        `devices` and `paths` are the owner's and the reader's.
        """
        self._shape = self._bytes_of.Shape(*shape)
        use_device(devices[0] if self._is_owner else devices[1])
        if self._is_owner:
            self._memory = find(self._bytes_of, self._shape, devices[0], paths[0])
            self._end = self._library.Owner(self._memory, option)
            return self._end.told()
        self._memory = find(self._bytes_of, self._shape, devices[1], paths[1])
        if told is None:
            self._source = find(self._bytes_of, self._shape, devices[0], paths[0])
        self._end = self._library.Reader(self._memory, option, told, self._source)
        return {}

    def prepare(self, key: str, cut: str, num_ranges: int, batch: int, window: int) -> Any:
        """Hand over the ranges of a read once. `cut` is "pages", "layers" (a range each), or "ranges" of this number.

        `batch` is how many to post at a time (0: all); with a `window`, each is a post and so many are in flight.
        """
        for warm in (True, False):
            rows = self._rows(cut, num_ranges, warm)
            self._end.prepare(_key(key, warm), *rows, batch or len(rows[0]), window)
        return len(rows[0])

    def _rows(self, cut: str, num_ranges: int, warm: bool) -> Any:
        if cut == "pages":
            return self._shape.rows(warm)
        return self._shape.layer_rows(warm) if cut == "layers" else self._shape.range_rows(num_ranges, warm)

    def wipe(self) -> Any:
        assert self._memory is not None
        self._memory.block.wipe()
        return {}

    def fill(self, number: int, damage: bool) -> Any:
        memory = self._source or self._memory
        assert memory is not None
        memory.block.fill(number)
        if damage:
            memory.block.damage()
        return {}

    def read(self, key: str, number: int, cut: str) -> Any:
        """One timed read, its bytes checked against fill `number`, right after one like it that is not timed."""
        self.warm(key)
        return self.read_at(key, number, cut, 0.0)

    def warm(self, key: str) -> Any:
        """The read that is not timed."""
        assert self._memory is not None
        self._end.read(_key(key, True))
        if not self._shape.scattered:
            self._memory.block.wipe()  # the same pages once more
        return {}

    def read_at(self, key: str, number: int, cut: str, start_at: float) -> Any:
        """The timed read, not before `start_at` of the clock that all processes of a host share."""
        assert self._memory is not None
        time.sleep(max(0.0, start_at - time.perf_counter()))
        began = time.perf_counter()
        self._end.read(_key(key, False))
        ended = time.perf_counter()
        block = self._memory.block
        checks = {"pages": block.find_wrong_page, "layers": block.find_wrong_layer, "ranges": block.find_wrong_range}
        return {"took_s": ended - began, "began": began, "ended": ended, "wrong": checks[cut](number)}

    def drive(self) -> bool:
        """Let the owner's library work once; whether it has to be driven at all."""
        return bool(self._end is not None and self._is_owner and self._end.drive())

    def close(self) -> Any:
        end, self._end = self._end, None
        if end:
            end.close()
        is_device = self._memory is not None and self._memory.device >= 0
        self._memory = self._source = None
        if is_device:
            import torch

            torch.cuda.empty_cache()  # the next pool is an allocation of its own too
        return {}


def _key(key: str, warm: bool) -> str:
    """What a library calls the ranges of a read, or of the one that warms up for it."""
    return f"{key}, warm" if warm else key


def lines(side: Side) -> Iterator[dict[str, Any]]:
    """What the parent asks. From `serve` until the next line, `rest` at the latest, the library is driven."""
    held, serving = b"", False
    while True:
        head, newline, rest = held.partition(b"\n")
        if newline:
            held = rest
            message: dict[str, Any] = json.loads(head)
            serving = message["do"] == "serve"
            if message["do"] not in ("serve", "rest"):
                yield message
            continue
        wait_s = 0.0 if serving and side.drive() else IDLE_S
        if select.select([0], [], [], wait_s)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            held += data


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like
    side = Side(load(f"raw_{sys.argv[1]}"), sys.argv[2])
    with suppress(BrokenPipeError):  # the command has gone without a word
        for message in lines(side):
            answer = getattr(side, message.pop("do"))(**message)
            print(json.dumps(answer), file=out, flush=True)
    side.close()
    sys.stderr.flush()
    os._exit(0)  # some libraries do not survive the interpreter's own end


if __name__ == "__main__":
    main()
