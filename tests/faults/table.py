"""Owns the judgement of a soak: it reads the file of `soak` and computes everything again from the raw hashes.

    python tests/faults/table.py FILE [--json]

It imports nothing of pdlink and nothing that was tested: what a page must hold is worked out here a second time.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

# What may fail while a fault is on, by its name; whatever is not here must not fail at all.
EVERYTHING = {
    *(f"{how} {whom}" for how in ("kill", "stop", "stop for good", "exit") for whom in ("prefill", "decode")),
    *(f"{how} {whom}" for how in ("cut", "deafen", "mute") for whom in ("prefill", "decode")),
    *(f"damage frames to {whom}" for whom in ("prefill", "decode")),
    "stranger to prefill",
}
"""Peers are gone, or what they say is not what was said."""
LATER_ONES = {f"{how} all bootstraps" for how in ("kill", "stop", "cut", "deafen", "mute")}
"""Only requests that begin meanwhile: nobody may tell them where to go. Those that had resolved must succeed."""

FALL_SILENT = {
    *(f"{how} decode" for how in ("kill", "stop", "stop for good", "exit")),
    *(f"{how} {whom}" for how in ("cut", "deafen", "mute") for whom in ("prefill", "decode")),
}
"""A reader goes, or is not heard, in the middle of reads: over tcp, UCX may abort owners for that."""
ABORTS_OWNERS = {"nixl-tcp"}
ABORTED = -6
THREADS_ON_DEMAND = {"pdlink-resolve": 16}
"""Pools that start threads when they need them, and how many at most."""
LOOSE = {"nixl-tcp": "fds", "mooncake-tcp": "natives"}
"""Of what a transport's library takes one more or less for each peer, as it happens: with UCX a socket that comes and
goes with reconnects, with mooncake a thread of its own. The mark: the least of a life, and one for each peer on top."""
CONSTANT = ("regions", "free_pages", "free_slots", "live")
Hashes = Mapping[str, list[str]]


# --- what a page must hold ----------------------------------------------------------------------------


def hash_page(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


@lru_cache(maxsize=1 << 14)
def wanted_hash(transfer_id: str, component: str, layer: int, position: int, nbytes: int) -> str:
    """Of the page at `position` of a request: each 8-byte word is a hash of all of these and of its own offset."""
    seed = np.uint64(zlib.crc32(f"{transfer_id}/{component}".encode()))
    key = (seed << np.uint64(32)) ^ np.uint64(layer << 24) ^ np.uint64(position)
    with np.errstate(over="ignore"):
        words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        page = _splitmix(words + _splitmix(np.asarray([key], dtype=np.uint64)))
    return hash_page(page.tobytes()[:nbytes])


def _splitmix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def wanted_hashes(transfer_id: str, num_pages: int, layout: Mapping[str, Any]) -> dict[str, list[str]]:
    """`layout`: component -> {"page_bytes", "layers"}."""
    return {
        f"{name}/{layer}": [wanted_hash(transfer_id, name, layer, at, one["page_bytes"]) for at in range(num_pages)]
        for name, one in layout.items()
        for layer in one["layers"]
    }


def fold(hashes: Hashes) -> str:
    """One short text for all the hashes of a request."""
    whole = json.dumps(hashes, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(whole.encode(), digest_size=6).hexdigest()


# --- one fault ----------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What one line comes to. The lists say each thing that is wrong, in words."""

    fault: str
    backend: str
    num_under_way: int = 0
    num_failed: int = 0
    """With leave: the fault explains them."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    recovery_s: float | None = None

    @property
    def complaints(self) -> list[str]:
        return [f"{kind}: {text}" for kind in ("lost", "wrong", "hangs", "leaks") for text in getattr(self, kind)]


class Judge:
    """Judges line after line of one soak, in their order: what a process may hold is the most that it ever held at
    rest before. `layout` is that of the header."""

    def __init__(self, layout: Mapping[str, Any]) -> None:
        self.layout = layout
        self._marks = Marks("", ())
        self._cluster: object = self  # that of no line

    def judge(self, line: Mapping[str, Any]) -> Verdict:
        if line.get("cluster") != self._cluster:
            self._cluster, self._marks = line.get("cluster"), Marks(line["transport"], line["processes"])
        verdict = Verdict(line["fault"], line["backend"], recovery_s=line["recovery_s"])
        excused = line["fault"] in EVERYTHING
        for one in line["requests"]:
            _judge_request(one, line, self.layout, excused, verdict)
        for name, num_pages, state, folded, aux in line["since_last"]:
            if state != "done":
                verdict.lost.append(f"{name} {state} while nothing was wrong")
            elif folded != fold(wanted_hashes(name, num_pages, self.layout)) or aux != name:
                verdict.wrong.append(f"{name} while nothing was wrong")
        limits = line["deadlines"]
        if line["recovery_s"] is None or line["recovery_s"] > limits["recovery_s"]:
            verdict.hangs.append(f"no request succeeded within {limits['recovery_s']} s of the end of the damage")
        if line["lacking"]:
            verdict.hangs.append(f"the cluster is not whole again: {line['lacking']}")
        if line["touched"]:
            verdict.wrong.append(f"written outside of any request: {line['touched']}")
        verdict.lost += [text for one in line["died"] if (text := _unexplained(one, line))]
        verdict.leaks += self._leaks(line["processes"])
        return verdict

    def _leaks(self, processes: Mapping[str, Any]) -> Iterator[str]:
        """What processes hold more than ever in this life of theirs, or have back less than they had."""
        for name, one in processes.items():
            if one["before"] is not None:
                self._marks.add(name, one["pid_before"], one["before"])
            if one["after"] is None:
                yield f"{name} says nothing"
                continue
            yield from (f"{name}: {text}" for text in self._marks.grown(name, one["pid_after"], one["after"]))
            self._marks.add(name, one["pid_after"], one["after"])


def _unexplained(death: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    """What is wrong with the end of a process that nobody killed, where it is not UCX that aborted an owner."""
    may_end = line["transport"] in ABORTS_OWNERS and line["fault"] in FALL_SILENT
    if may_end and death["name"].startswith("rank") and death["code"] == ABORTED:
        return ""
    return f"{death['name']} ended with code {death['code']} {death['after_s']} s after the damage"


class Marks:
    """The most that each process has held in this life of its, whenever it was counted at rest; see `LOOSE`."""

    def __init__(self, transport: str, names: Iterable[str]) -> None:
        self._loose = LOOSE.get(transport)
        self._names = list(names)
        self._most: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, name: str, pid: int, held: Mapping[str, Any]) -> None:
        before = self._most.get((name, pid))
        most = self._most[name, pid] = _most(before, held)
        if what := self._loose:
            num_peers = sum(other.startswith("rank") != name.startswith("rank") for other in self._names)
            limit = held[what] + num_peers
            most[what] = max(min(limit, before[what]), held[what]) if before else limit

    def grown(self, name: str, pid: int, held: Mapping[str, Any]) -> list[str]:
        """What `held` has more than ever, in words; nothing the first time that a process is counted."""
        most = self._most.get((name, pid))
        return grown(most, held) if most else []


def _most(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    if one is None:
        return dict(other)
    names = {*one["threads"], *other["threads"]}
    most = {**one, "threads": {name: max(census["threads"].get(name, 0) for census in (one, other)) for name in names}}
    for what in ("natives", "fds", "segments"):
        most[what] = max(one[what], other[what])
    most |= {what: other[what] for what in CONSTANT}  # what is lost is told once
    if other["fds"] > one["fds"]:
        most["fd_kinds"] = other["fd_kinds"]
    return most


def _judge_request(
    one: Mapping[str, Any], line: Mapping[str, Any], layout: Mapping[str, Any], excused: bool, verdict: Verdict
) -> None:
    name, state = one["id"], one["state"]
    verdict.num_under_way += one["when"] == "under way"
    excused = (excused and one["when"] != "before") or (line["fault"] in LATER_ONES and one["when"] == "during")
    if state == "none" or one["ended_s"] > line["deadlines"]["verdict_s"]:
        verdict.hangs.append(f"{name} had no terminal state after {line['deadlines']['verdict_s']} s")
    elif state != "done" and excused:
        verdict.num_failed += 1
    elif state != "done":
        verdict.lost.append(f"{name} {state}: {one['why']}")
    for rank, told in one["senders"].items():
        if told == "none":
            verdict.hangs.append(f"{name} had no terminal state on {rank}")
        elif state == "done" and told not in ("released", "gone"):
            verdict.lost.append(f"{name} was done, and {rank} says that it was {told}")
    if state in ("none", "gone"):
        return
    later = one["later"]
    if one["ends"] != 1 or (later and (later["state"] != state or later["ends"] != 1)):
        verdict.lost.append(f"{name} ended {one['ends']} times as {state}, later {later and later['state']}")
    if state == "done":
        wanted = wanted_hashes(name, one["pages"], layout)
        if one["hashes"] != wanted or (later and later["hashes"] != wanted):
            verdict.wrong.append(f"{name} was done with {_first_difference(one['hashes'], wanted)}")
        if one["aux"] != name:
            verdict.wrong.append(f"{name} was done with aux {one['aux']!r}")
    elif later and later["hashes"] != one["hashes"]:
        difference = _first_difference(later["hashes"], one["hashes"])
        verdict.wrong.append(f"pages of {name} changed after it was {state}: {difference}")


def _first_difference(found: Hashes, wanted: Hashes) -> str:
    for cell, hashes in wanted.items():
        for position, (one, other) in enumerate(zip(found.get(cell, []), hashes, strict=False)):
            if one != other:
                return f"{cell} page {position}: {one} for {other}"
    return "pages missing" if set(found) != set(wanted) else "nothing wrong in its own pages"


def grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What a census has that the one before it had not."""
    found = []
    for thread, number in after["threads"].items():
        if number > max(before["threads"].get(thread, 0), THREADS_ON_DEMAND.get(thread, 0)):
            found.append(f"{number} threads {thread}, {before['threads'].get(thread, 0)} before")
    if after["natives"] > before["natives"]:
        found.append(f"{after['natives']} threads that are not Python's, {before['natives']} before")
    for what in ("fds", "segments"):
        if after[what] > before[what]:
            found.append(f"{what} {after[what]}, {before[what]} before ({after['fd_kinds']}, {before['fd_kinds']})")
    for what in CONSTANT:
        if after[what] != before[what]:
            found.append(f"{what} {after[what]}, {before[what]} before")
    return found


# --- the whole file -----------------------------------------------------------------------------------


@dataclass
class Row:
    fault: str
    verdicts: list[Verdict] = field(default_factory=list)

    def cells(self) -> dict[str, Any]:
        times = [one.recovery_s for one in self.verdicts if one.recovery_s is not None]
        return {
            "fault": self.fault,
            "injected": len(self.verdicts),
            "under way": sum(one.num_under_way for one in self.verdicts),
            "failed with it": sum(one.num_failed for one in self.verdicts),
            "lost": sum(len(one.lost) for one in self.verdicts),
            "wrong bytes": sum(len(one.wrong) for one in self.verdicts),
            "hangs": sum(len(one.hangs) for one in self.verdicts),
            "leaks": sum(len(one.leaks) for one in self.verdicts),
            "recovery p50 s": round(statistics.median(times), 2) if times else None,
            "recovery max s": round(max(times), 2) if times else None,
        }


def read(lines: Iterable[str]) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The header, the line of every fault, and that of the end of every cluster."""
    parsed = [json.loads(line) for line in lines if line.strip()]
    header = next((one for one in parsed if one["line"] == "header"), None)
    if header is None:
        raise ValueError("it has no header line")
    return header, [one for one in parsed if one["line"] == "fault"], [one for one in parsed if one["line"] == "end"]


def judge_end(line: Mapping[str, Any]) -> list[str]:
    """What a cluster left behind when it was ended in order."""
    bad = [f"{name} ended with code {code}" for name, code in line["exit_codes"].items() if code]
    return bad + [f"{name} lies on in /dev/shm" for name in line["segments"]]


def rows(verdicts: Iterable[Verdict]) -> list[Row]:
    """One for each fault in order of its name, and all together."""
    found: dict[str, Row] = {}
    everything = Row("all")
    for verdict in verdicts:
        found.setdefault(verdict.fault, Row(verdict.fault)).verdicts.append(verdict)
        everything.verdicts.append(verdict)
    return [*sorted(found.values(), key=lambda row: row.fault), everything]


def markdown(table: list[dict[str, Any]]) -> str:
    names = list(table[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(path: str, *options: str) -> int:
    try:
        header, faults, ends = read(Path(path).read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError, KeyError) as error:
        print(f"{path} is no whole file of a soak: {error}", file=sys.stderr)
        return 2
    judge = Judge(header["layout"])
    verdicts = [judge.judge(line) for line in faults]
    table = [row.cells() for row in rows(verdicts)]
    num_between = sum(len(line["since_last"]) for line in faults)
    if "--json" in options:
        print(json.dumps({"header": header, "table": table, "between": num_between}))
    else:
        print(markdown(table))
        print(f"\n{num_between} more requests between the faults, each looked at too; seed {header['seed']}")
        died = Counter(f"{one['name'][:-1]} by signal {-one['code']}" for line in faults for one in line["died"])
        print("ended unasked: " + (", ".join(f"{number} {how}" for how, number in died.items()) or "nobody"))
        backends = Counter(line["transport"] for line in faults)
        print(f"{len(ends)} clusters ended, {sum(bool(judge_end(one)) for one in ends)} of them badly")
        print("faults per backend: " + ", ".join(f"{name} {number}" for name, number in sorted(backends.items())))
        if missed := sorted(set(header["backends"]) - set(backends)):
            print(f"not reached in this time: {', '.join(missed)}")
    complaints = [
        f"fault {line['number']} ({line['fault']}, {line['backend']}): {text}"
        for line, verdict in zip(faults, verdicts, strict=True)
        for text in verdict.complaints
    ]
    complaints += [
        f"end of cluster {one['cluster']} ({one['backend']}): {text}" for one in ends for text in judge_end(one)
    ]
    for text in complaints:
        print(text, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: table.py FILE [--json]")
    sys.exit(main(*sys.argv[1:]))
