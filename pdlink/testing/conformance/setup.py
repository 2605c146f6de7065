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


@dataclass(frozen=True, slots=True)
class Setup:
    """A backend under test.

    `backend` is a name that the registry knows (a built-in one or an entry point), or `module:callable` for one that
    is not installed. `env` is set in every process of the suite before anything is imported. `fence_timeout_s` bounds
    how long `fence` may take, `watch_s` how long pages are watched for bytes that land late, and `idle_s` how long a
    link is left alone before it must still work. `num_thread_peers` is the number of threads that pull at once.
    `owners_may_end` says of an engine that it is known to end an owner's process whose reader went away in the middle
    of a pull.
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

    def __post_init__(self) -> None:
        if not self.backend:
            raise InvalidInput("a conformance setup needs the name of a backend, or module:callable")
        if min(self.fence_timeout_s, self.watch_s) <= 0 or self.idle_s < 0 or self.num_thread_peers < 1:
            raise InvalidInput(f"conformance setup {self.title!r} has a time or a count below its least value")

    @property
    def title(self) -> str:
        return self.label or self.backend

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setup:
        values = json.loads(text)
        return cls(**{**values, "memory": MemorySource(values["memory"])})

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
