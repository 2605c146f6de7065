"""Owns the runs of `pdlink bench transfer` with several owners or readers: their processes, the rounds, and their rows.

Owners are the prefill ranks of one instance, which split its layers. Each reader is a decode rank with a request of its
own, of which it pulls every layer: from all owners at once, in the same moment as the other readers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from pdlink.cli.bench_control import summarise
from pdlink.cli.exits import WrongRun
from pdlink.cli.raw_many import AHEAD_S, ASK_TIMEOUT_S, Link, RawMany, Span
from pdlink.cli.raw_rig import PAGES, RANGE
from pdlink.cli.transfer_case import NVLINK, Case, environment
from pdlink.cli.transfer_gpus import Gpus
from pdlink.cli.transfer_talk import answer, ask
from pdlink.errors import BackendUnavailable, InvalidInput
from pdlink.layout.layer_plan import balanced_ranges
from pdlink.testing.child import Child

WARM_UP = 1
PDLINK, RAW = "pdlink", "raw"
COLUMNS = (
    *("over", "owners x readers", "pages", "lie", "GB/s", "a reader", "raw", "links", "of raw/links"),
    *("p50/p99 ms", "request"),
)
LEFT = 4
LEGEND = (
    "GB/s: all bytes from the first pull's begin to the last one's end; a reader: those of the slowest and quickest; "
    "raw: the library with the same ranges over all links at once; links: one large range, the sum of each link alone."
)


@dataclass(frozen=True, slots=True)
class Group:
    """How many owners and readers; on GPUs owner i has GPU i, and readers have those after them, from 0 on again.

    Raises `InvalidInput` for more owners than layers, `BackendUnavailable` for more owners than GPUs.
    """

    owners: int
    readers: int

    def check(self, cases: Sequence[Case], gpus: Gpus | None) -> None:
        fewest = min(case.num_layers for case in cases)
        if self.owners > fewest:
            raise InvalidInput(
                f"--owners {self.owners} cannot split {fewest} layers, each owner has one; give --layers {self.owners}"
            )
        if gpus and gpus.count < max(2, self.owners):
            raise BackendUnavailable(
                f"--owners {self.owners} --readers {self.readers} need at least {max(2, self.owners)} GPUs, and torch "
                f"finds {gpus.count}; each owner has one of its own, and readers those after them, or the owners'"
            )

    def devices(self, gpus: Gpus | None) -> tuple[list[int], list[int]]:
        """Of the owners, and of the readers; -1 is the host."""
        if gpus is None:
            return [-1] * self.owners, [-1] * self.readers
        return list(range(self.owners)), [(self.owners + one) % gpus.count for one in range(self.readers)]


@dataclass(slots=True)
class Taken:
    """The rounds of one case. Spans are by link; of `alone_s` too, of which there are none without the baseline."""

    pulls: list[dict[Link, Span]] = field(default_factory=list)
    requests_s: list[list[float]] = field(default_factory=list)
    raw: list[dict[Link, Span]] = field(default_factory=list)
    alone_s: list[dict[Link, float]] = field(default_factory=list)
    settings: Mapping[str, str] = field(default_factory=dict)


class ManyRig:
    """pdlink's processes of one case, and its baseline beside them. Use it with `with`; everything ends with it."""

    def __init__(self, case: Case, group: Group, gpus: Gpus | None, *, with_raw: bool) -> None:
        self._case = case
        self._number = 0
        self._cases = split(case, group.owners)
        env = environment(case.backend, case.transport, case.device)
        devices = group.devices(gpus)
        with ExitStack() as starting:
            self._owners = [
                starting.enter_context(Child(f"owner {one}", "pdlink.cli.transfer_owner", [], env))
                for one in range(group.owners)
            ]
            self._readers = [
                starting.enter_context(Child(f"reader {one}", "pdlink.cli.transfer_reader", [], env))
                for one in range(group.readers)
            ]
            paths = self._open(devices)
            self._raw: RawMany | None = None
            if with_raw:
                fillers = [None if gpus else owner for owner in self._owners]
                self._raw = RawMany(self._cases, paths, devices, fillers)
                starting.callback(self._raw.close)
            self._stack = starting.pop_all()

    def measure(self, rounds: int, damage: str = "none") -> Taken:
        """Raises `WrongRun` when other bytes came than were sent, or on another way than the case says."""
        taken = Taken(settings=self._raw.settings if self._raw else {})
        for number in range(-WARM_UP, rounds):
            turns = [PDLINK, RAW] if number % 2 else [RAW, PDLINK]
            for turn in turns:
                if turn == PDLINK:
                    pulls, requests_s = self._pull(damage == PDLINK)
                    if number >= 0:
                        taken.pulls.append(pulls)
                        taken.requests_s.append(requests_s)
                elif self._raw:
                    raw, alone_s = self._raw.read_together(PAGES, damage == RAW), self._raw.read_alone_s(RANGE)
                    if number >= 0:
                        taken.raw.append(raw)
                        taken.alone_s.append(alone_s)
        return taken

    def _open(self, devices: tuple[list[int], list[int]]) -> tuple[list[str], list[str]]:
        """Start all ranks; returns where their memory is."""
        rest: dict[str, Any] = {"settings": self._case.settings}
        bootstrap, paths = "", []
        for rank, owner in enumerate(self._owners):
            place: dict[str, Any] = {"rank": rank, "num_ranks": len(self._owners), "bootstrap": bootstrap}
            place["device"] = devices[0][rank]
            told = ask(owner, ASK_TIMEOUT_S, "open", **rest, shape=self._cases[rank].shape, **place)
            bootstrap = told["bootstrap"]
            paths.append(told["path"])
        rest |= {"shape": self._case.shape, "bootstrap": bootstrap}
        heard = [
            ask(reader, ASK_TIMEOUT_S, "open", **rest, device=devices[1][one], reader=one)
            for one, reader in enumerate(self._readers)
        ]
        return paths, [one["path"] for one in heard]

    def _pull(self, damage: bool) -> tuple[dict[Link, Span], list[float]]:
        """One request of each reader, all at once."""
        self._number += 1
        for reader in self._readers:
            ask(reader, ASK_TIMEOUT_S, "wipe")
        for one, owner in enumerate(self._owners):
            is_damaged = damage and not one
            numbers = {"number": self._number, "num_readers": len(self._readers)}
            ask(owner, ASK_TIMEOUT_S, "publish", **numbers, damage=is_damaged)
        self._ask_readers("warm", number=self._number)
        heard = self._ask_readers("pull_at", number=self._number, start_at=time.perf_counter() + AHEAD_S)
        pulls: dict[Link, Span] = {}
        for at, told in enumerate(heard):
            if told["wrong"]:
                raise WrongRun(f"pdlink said success, and reader {at} has other bytes than were sent: {told['wrong']}")
            if told["ways"] != [self._case.way] or told["backends"] != [self._case.backend]:
                raise WrongRun(f"asked for {self._case}, and pages moved by {told['backends']} {told['ways']}")
            if len(told["spans"]) != len(self._owners):
                raise WrongRun(f"reader {at} pulled {len(told['spans'])} times from {len(self._owners)} owners")
            # In the order in which they ended; of which owner each was does not count here.
            pulls |= {(place, at): (began, ended) for place, (began, ended, _) in enumerate(told["spans"])}
        return pulls, [one["request_s"] for one in heard]

    def _ask_readers(self, do: str, **arguments: object) -> list[dict[str, Any]]:
        for reader in self._readers:
            reader.say({"do": do, **arguments})
        return [answer(reader, ASK_TIMEOUT_S) for reader in self._readers]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> ManyRig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def split(case: Case, num_owners: int) -> list[Case]:
    """The case of each owner: its own layers of the pool."""
    return [replace(case, part=(one.start, one.stop)) for one in balanced_ranges(case.num_layers, num_owners)]


def make_row(case: Case, group: Group, taken: Taken, joined_by: str = "") -> dict[str, Any]:
    """Medians over the rounds. `gbps` are 1e9 bytes a second, from the first begin to the last end of a round."""
    whole = [_wall_s(spans.values()) for spans in taken.pulls]
    readers = [
        [_wall_s(span for link, span in spans.items() if link[1] == reader) for spans in taken.pulls]
        for reader in range(group.readers)
    ]
    nbytes = case.nbytes * group.readers
    parts = split(case, group.owners)
    rate = _gbps(nbytes, whole)
    raw = _gbps(nbytes, [_wall_s(spans.values()) for spans in taken.raw]) if taken.raw else None
    links = (
        sum(_gbps(parts[link[0]].nbytes, [one[link] for one in taken.alone_s]) for link in taken.alone_s[0])
        if taken.alone_s
        else None
    )
    whole_ms = [one * 1e3 for one in whole]
    return {
        "backend": case.backend,
        "transport": joined_by if joined_by and case.transport == NVLINK else case.transport,
        "way": case.way,
        "device": case.device,
        "owners": group.owners,
        "readers": group.readers,
        "page_bytes": case.page_bytes,
        "num_pages": case.num_pages,
        "num_layers": case.num_layers,
        "layers_by_owner": [one.part[1] - one.part[0] for one in parts],
        "scattered": case.scattered,
        "nbytes": nbytes,
        "gbps": rate,
        "reader_gbps": [_gbps(case.nbytes, one) for one in readers],
        "p50_ms": summarise(whole_ms)["p50_ms"],
        "p99_ms": summarise(whole_ms)["p99_ms"],
        "request_ms": statistics.median(max(one) for one in taken.requests_s) * 1e3,
        "rounds_ms": whole_ms,
        "raw_gbps": raw,
        "of_raw": rate / raw if raw else None,
        "raw_setting": taken.settings.get(PAGES),
        "links_gbps": links,
        "of_links": rate / links if links else None,
        "links_setting": taken.settings.get(RANGE),
    }


def as_text(row: Mapping[str, Any]) -> list[str]:
    """The cells of `COLUMNS`."""
    each = row["reader_gbps"]
    has_raw = row["raw_gbps"] is not None
    return [
        f"{row['backend']} {row['transport']} {row['way']}",
        f"{row['owners']} x {row['readers']}",
        f"{row['num_pages']} x {row['page_bytes']} B x {row['num_layers']}",
        "scattered" if row["scattered"] else "contiguous",
        f"{row['gbps']:.2f}",
        "-".join(f"{one:.2f}" for one in dict.fromkeys((min(each), max(each)))),
        *((f"{row['raw_gbps']:.2f}", f"{row['links_gbps']:.2f}") if has_raw else ("", "")),
        f"{row['of_raw']:.0%}/{row['of_links']:.0%}" if has_raw else "",
        f"{row['p50_ms']:.1f}/{row['p99_ms']:.1f}",
        f"{row['request_ms']:.1f}",
    ]


def _wall_s(spans: Any) -> float:
    every = list(spans)
    return float(max(ended for _, ended in every) - min(began for began, _ in every))


def _gbps(nbytes: int, took_s: Sequence[float]) -> float:
    return nbytes / statistics.median(took_s) / 1e9
