"""Owns the values of the conformance suite: what is tested (`Setup`) and what came out (`Result`). It runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import import_module

from pdlink.backends.base import Backend
from pdlink.backends.registry import factory
from pdlink.errors import InvalidInput


class MemorySource(StrEnum):
    """Where the pages of a scenario lie."""

    SHARED = "shared"
    """Segments of `pdlink.backends.shm`, which other processes can map."""
    PRIVATE = "private"
    """Anonymous memory of the process, as an engine's own tensors are."""
    CUDA = "cuda"
    """Tensors on a GPU."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A backend under test.

    `backend` is a name that the registry knows (a built-in one or an entry point), or `module:callable` for one that
    is not installed. `env` is set in every process of the suite before anything is imported. `fence_timeout_s` bounds
    how long `fence` may take, `watch_s` how long pages are watched for bytes that land late, and `idle_s` how long a
    link is left alone before it must still work. `num_thread_peers` is the number of threads that pull at once.
    `owners_may_end` says of an engine that it is known to end an owner's process whose reader went away in the middle
    of a pull. `big_pages` is how many pages of 64 KiB of each of two layers take long enough to be met in the middle.
    `devices` are the GPUs of owner and reader, for memory that lies on one. `start_timeout_s` bounds the start of an
    owner's process, `scenario_timeout_s` a whole scenario. `leaves_out` names scenarios that make no sense for this
    backend or memory, each with the reason; they are reported as skipped.
    """

    backend: str
    label: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    memory: MemorySource = MemorySource.PRIVATE
    fence_timeout_s: float = 20.0
    watch_s: float = 2.0
    idle_s: float = 6.0
    num_thread_peers: int = 16
    owners_may_end: bool = False
    big_pages: int = 1024
    devices: tuple[int, int] = (0, 0)
    start_timeout_s: float = 60.0
    scenario_timeout_s: float = 55.0
    leaves_out: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.backend:
            raise InvalidInput("a conformance setup needs the name of a backend, or module:callable")
        times = (self.fence_timeout_s, self.watch_s, self.start_timeout_s, self.scenario_timeout_s)
        counts = (self.num_thread_peers, self.big_pages)
        if min(times) <= 0 or self.idle_s < 0 or min(counts) < 1 or min(self.devices) < 0:
            raise InvalidInput(
                f"conformance setup {self.title!r} has a time, a count or a device below its least value"
            )

    @property
    def title(self) -> str:
        return self.label or self.backend

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setup:
        values = json.loads(text)
        devices = values["devices"][0], values["devices"][1]
        return cls(**{**values, "memory": MemorySource(values["memory"]), "devices": devices})

    def make(self) -> Backend:
        """A new instance of the backend, in this process."""
        if ":" not in self.backend:
            return factory(self.backend)()
        module, _, attribute = self.backend.partition(":")
        made: Callable[[], Backend] = getattr(import_module(module), attribute)
        return made()


@dataclass(frozen=True, slots=True)
class Result:
    """How one scenario ended: `passed`, `failed` or `skipped`, with the reason of the last two."""

    scenario: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"
