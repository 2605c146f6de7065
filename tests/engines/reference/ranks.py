"""Owns the rank processes of the tests: started once, given jobs as JSON, ended with the session."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdlink.layout.components import CacheLayout
from pdlink.memory.sharded_pool import LayerShardedPool
from tests import processes

ROOT = Path(__file__).parents[3]
# The groups that a job may name: one to four of the four world ranks, in an order of their own.
GROUPS = ((2,), (3, 1), (0, 2, 3), (0, 1, 2, 3), (3, 2, 1), (0,), (3,), (1, 0), (2, 3), (1, 0, 2, 3))
ANSWER_TIMEOUT_S = processes.PATIENCE_S


class Ranks:
    """`size` processes in one gloo world."""

    def __init__(self, size: int, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        self._end = contextlib.ExitStack()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
        with contextlib.ExitStack() as starting:
            starting.callback(self._end.close)
            self._processes = [self._start(rank, size, environment) for rank in range(size)]
            starting.pop_all()

    def _start(self, rank: int, size: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.engines.reference.rank", str(rank), str(size)]
        with (self._folder / f"rank{rank}.stderr").open("w") as stderr:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
            command.append(str(self._folder / "store"))
            return self._end.enter_context(processes.started(command, cwd=ROOT, env=environment, **pipes))

    def run(self, ranks: tuple[int, ...], *, plan: str = "split", **job: Any) -> Run:
        """Run one job on a group of these world ranks, stage by stage; the answers come in group order."""
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        folder.mkdir()
        line = json.dumps(job | {"ranks": ranks, "plan": plan, "folder": str(folder)}).encode() + b"\n"
        for rank in ranks:
            stream = self._processes[rank].stdin
            assert stream is not None
            stream.write(line)
            stream.flush()
        return Run(folder, [self._answer(rank) for rank in ranks])

    def _answer(self, rank: int) -> dict[str, Any]:
        stream = self._processes[rank].stdout
        assert stream is not None
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                ready = selector.select(deadline - time.monotonic())
                piece = os.read(stream.fileno(), 1 << 20) if ready else b""
                if not piece:
                    stderr = (self._folder / f"rank{rank}.stderr").read_text()
                    raise AssertionError(f"rank {rank} gave no answer ({'ended' if ready else 'silent'}): {stderr}")
                text += piece
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        """End them as they are: nothing of theirs is needed any more, and an orderly end of so much takes long."""
        self._end.close()


@dataclass(frozen=True)
class Run:
    """What the ranks of one job answered, and the folder with their bytes."""

    folder: Path
    answers: list[dict[str, Any]]

    def results(self, request_id: str) -> list[dict[str, Any]]:
        """The result of one request on every rank."""
        return [next(one for one in answer["results"] if one["id"] == request_id) for answer in self.answers]

    def told(self, request_id: str, rank: int = 0) -> list[dict[str, Any]]:
        return [one for one in self.answers[rank]["told"] if one["id"] == request_id]

    def logits(self, request_id: str, rank: int = 0) -> torch.Tensor:
        return torch.from_numpy(np.fromfile(self.folder / f"{request_id}.{rank}.logits", dtype=np.float32))

    def bytes(self, request_id: str, rank: int) -> dict[tuple[str, int], bytes]:
        """The page bytes of every cell that a rank of the group owns."""
        cells = [(name, layer) for name, layer in self.results(request_id)[rank]["cells"]]
        stem = f"{request_id}.{rank}"
        return {(name, layer): (self.folder / f"{stem}.{name}.{layer}.pages").read_bytes() for name, layer in cells}

    def merged(self, request_id: str) -> dict[tuple[str, int], bytes]:
        """The page bytes of every cell, each from its owner; no cell has two owners."""
        every: dict[tuple[str, int], bytes] = {}
        for rank in range(len(self.answers)):
            mine = self.bytes(request_id, rank)
            assert not every.keys() & mine.keys()
            every |= mine
        return every

    @contextlib.contextmanager
    def pulled(
        self, request_id: str, layout: CacheLayout, page_ids: list[int], num_pages: int
    ) -> Iterator[LayerShardedPool]:
        """A decode pool whose `page_ids` hold the request; all other pages are full of 0xEE."""
        data = self.merged(request_id)
        assert set(data) == set(layout.cells())
        pool = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, num_pages)
        try:
            for (name, layer), pages in data.items():
                region = pool.region_tensor(name, layer)
                region.fill_(0xEE)
                rows = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8).copy()).view(-1, region.shape[1])
                region[torch.tensor(page_ids[: len(rows)])] = rows
            yield pool
        finally:
            pool.close()
