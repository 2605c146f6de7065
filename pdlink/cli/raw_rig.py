"""Owns the baseline of one link: the processes that drive its library directly, and the search for its best settings.

The processes know nothing of pdlink (see `raw_process`); this one starts them and asks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pdlink.cli.exits import WrongRun
from pdlink.cli.transfer_case import CUDA, Case, environment
from pdlink.cli.transfer_talk import answer, ask
from pdlink.testing.child import Child

SCRIPT = Path(__file__).with_name("raw_process.py")
ASK_TIMEOUT_S = 120.0
TRIES = 3
BETTER = 0.97
"""What is tried first stays unless something else is clearly quicker."""
PAGES, ONE_POST, LAYERS, RANGE = "pages", "one_post", "layers", "range"
"""What is measured of a library: the same ranges as pdlink, the same in one post where the quickest way may be another,
one range a layer, and the best of large ranges."""

Places: TypeAlias = Mapping[str, Sequence[int] | Sequence[str]]
"""The `devices` and `paths` of the memory, each the owner's and the reader's."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to set the library up: variables of its processes, and what `raw_process` passes on."""

    name: str
    told: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Read:
    """One way to read: "pages" as they lie, as many of each of the "layers" as one range, or as many bytes in so many
    "ranges".

    `batch` go into a post (0: all); with a `window`, each is a post and so many are in flight.
    """

    cut: str
    num_ranges: int = 0
    batch: int = 0
    window: int = 0

    @property
    def key(self) -> str:
        return f"{self.cut}.{self.num_ranges}.{self.batch}.{self.window}"

    def told(self) -> dict[str, object]:
        return {"cut": self.cut, "num_ranges": self.num_ranges, "batch": self.batch, "window": self.window}

    def serves(self, backend: str) -> tuple[str, ...]:
        """What it may be the measure of."""
        if self.cut != "pages":
            return (LAYERS, RANGE) if self.cut == "layers" else (RANGE,)
        return (PAGES, ONE_POST) if backend == "nixl" and not self.batch else (PAGES,)

    def __str__(self) -> str:
        cut = {"pages": "pages", "layers": "a range a layer", "ranges": f"{self.num_ranges} range(s)"}[self.cut]
        if self.window:
            return f"{cut}, {self.window} in flight"
        return f"{cut}, {self.batch} a post" if self.batch else f"{cut}, one post"


@dataclass(frozen=True, slots=True)
class Taken:
    """What a search found quickest."""

    option: Option
    read: Read

    def __str__(self) -> str:
        return f"{self.option.name}: {self.read}" if self.option.name else str(self.read)


def options_of(case: Case) -> tuple[Option, ...]:
    """Every set-up of the library that is tried."""
    if case.backend == "nixl":
        quiet = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
        every = (
            ("driven with pauses", False, 50e-6),
            ("driven all the time", False, 0.0),
            ("progress thread", True, 50e-6),
        )
        return tuple(Option(name, {"progress_thread": on, "pause_s": pause_s}, quiet) for name, on, pause_s in every)
    if case.backend == "mooncake":
        quiet = {"MC_LOG_LEVEL": "ERROR"}
        told = {"protocol": case.transport}
        if case.device == CUDA:
            return (Option("", told, quiet),)
        lanes = [Option(f"{n} lanes", told, {**quiet, "MC_TCP_LANES_PER_PEER": str(n)}) for n in (4, 16)]
        return tuple(lanes)
    if case.device == CUDA:
        return Option("by the driver", {"by": "driver"}), Option("by torch", {"by": "torch"})
    return (Option(""),)


def reads_of(case: Case) -> tuple[Read, ...]:
    """Every way to read that is tried, pages first. mooncake fails with a few thousand ranges at once."""
    if case.backend == "ipc":
        return Read("pages"), Read("layers"), Read("ranges", 1)
    large = Read("layers"), Read("ranges", 1), Read("ranges", 32)
    if case.backend == "nixl":
        return (Read("pages"), Read("pages", batch=1024), *large)
    batches = (Read("pages", batch=1024), Read("pages", batch=128), *large)
    # Between GPUs, the state of a read is what the call for a whole batch returns.
    return batches if case.device == CUDA else (*batches, Read("pages", window=256), Read("ranges", 32, window=32))


class Pair:
    """The two processes of one option; a library that copies by itself has a reader only. Use it with `with`."""

    def __init__(self, case: Case, option: Option, filler: Child | None) -> None:
        """`filler` fills the owner's memory, where that is not for the pair to do."""
        self.option = option
        library = case.backend if case.backend != "ipc" else "peer_copy" if case.device == CUDA else "memmove"
        env = {**environment(case.backend, case.transport, case.device), **option.env}
        with ExitStack() as starting:
            self.owner = None
            if case.backend != "ipc":
                self.owner = starting.enter_context(
                    Child(f"the owner of raw {library}", SCRIPT, [library, "owner"], env)
                )
            self.reader = starting.enter_context(Child(f"raw {library}", SCRIPT, [library, "reader"], env))
            self._filler = filler or self.owner or self.reader
            self._stack = starting.pop_all()

    def open(self, case: Case, places: Places, reads: tuple[Read, ...]) -> None:
        told: Any = None
        rest = {"shape": case.shape, **places, "option": dict(self.option.told)}
        if self.owner:
            told = ask(self.owner, ASK_TIMEOUT_S, "open", **rest, told=None)
        ask(self.reader, ASK_TIMEOUT_S, "open", **rest, told=told)
        for read in reads:
            self.reader.say({"do": "prepare", "key": read.key, **read.told()})
            self.reader.hear(ASK_TIMEOUT_S)

    def read_s(self, read: Read, number: int, damage: bool = False) -> float:
        """Seconds of one read of fill `number`. Raises `WrongRun` when other bytes came."""
        ask(self.reader, ASK_TIMEOUT_S, "wipe")
        self.fill(number, damage)
        if self.owner:
            self.owner.say({"do": "serve"})
        told = ask(self.reader, ASK_TIMEOUT_S, "read", key=read.key, number=number, cut=read.cut)
        if self.owner:
            self.owner.say({"do": "rest"})
        if told["wrong"]:
            raise WrongRun(f"{self.reader.name} brought other bytes than its owner holds: {told['wrong']}")
        return float(told["took_s"])

    def fill(self, number: int, damage: bool) -> None:
        """Write fill `number` into the owner's memory."""
        ask(self._filler, ASK_TIMEOUT_S, "fill", number=number, damage=damage)

    def close_case(self) -> None:
        for child in (self.reader, self.owner):
            if child:
                child.say({"do": "close"})
        for child in (self.reader, self.owner):
            if child:
                answer(child, ASK_TIMEOUT_S)

    def close(self) -> None:
        self._stack.close()


class RawRig:
    """The baseline of one link, for one case after another. `close` twice is fine."""

    def __init__(self, filler: Child | None = None) -> None:
        """`filler` has the memory that owners are to read from, and fills it; without, each pair has its own."""
        self._filler = filler
        self._places: Places = {}
        self._pairs: dict[str, Pair] = {}
        self._stack = ExitStack()
        self._number = 0
        self._found: dict[tuple[int, int, int, bool, int, int], dict[str, Taken]] = {}
        self.taken: dict[str, Taken] = {}
        """What is measured of the case that is open, in order."""

    def open(self, case: Case, places: Places) -> None:
        """Make the quickest set-ups and ways to read ready to measure; they are looked for once for a shape."""
        self._places = places
        if case.shape not in self._found:
            self._found[case.shape] = self._search(case)
        self.taken = self._found[case.shape]
        for name in self._in_use():
            mine = tuple(one.read for one in self.taken.values() if one.option.name == name)
            self._pairs[name].open(case, self._places, tuple(dict.fromkeys(mine)))

    def first_like(self, what: str) -> str:
        """The first that is measured by the very same read: once is enough."""
        return next(other for other, taken in self.taken.items() if taken == self.taken[what])

    def read_s(self, what: str, damage: bool = False) -> float:
        """Seconds of one read of `what`, bytes checked."""
        taken = self.taken[what]
        return self._pairs[taken.option.name].read_s(taken.read, self._next(), damage)

    def close_case(self) -> None:
        for name in self._in_use():
            self._pairs[name].close_case()
        self.taken = {}

    def close(self) -> None:
        self._stack.close()

    def _search(self, case: Case) -> dict[str, Taken]:
        """Try every set-up and every way to read."""
        best: dict[str, tuple[float, Taken]] = {}
        reads = reads_of(case)
        options = options_of(case)
        for option in options:
            pair = self._pair(case, option)
            pair.open(case, self._places, reads)
            for read in reads:
                took_s = statistics.median(pair.read_s(read, self._next()) for _ in range(TRIES))
                for what in read.serves(case.backend):
                    if what not in best or took_s < BETTER * best[what][0]:
                        best[what] = took_s, Taken(option, read)
            pair.close_case()
        return {what: taken for what, (_, taken) in best.items()}

    def _pair(self, case: Case, option: Option) -> Pair:
        if option.name not in self._pairs:
            pair = self._pairs[option.name] = Pair(case, option, self._filler)
            self._stack.callback(pair.close)
        return self._pairs[option.name]

    def _in_use(self) -> set[str]:
        return {one.option.name for one in self.taken.values()}

    def _next(self) -> int:
        self._number += 1
        return self._number
