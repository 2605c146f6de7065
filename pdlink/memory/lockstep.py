"""Owns the record by which ranks of a shard group prove that they do the same thing at the same time. Pure values.

Before each step that needs all of them, the ranks exchange their records, all of one size whatever the step. Ranks
that agree go on; ranks that differ all learn it from the same exchange, so none is left waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np

RECORD_MAGIC = 0x70646C6E6B01
TRAILER_MAGIC = 0x70646C6E6B02


class StepKind(IntEnum):
    BEGIN = 1
    READ = 2
    END = 3
    FAILED = 4
    SKIP = 5


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank is about to do in a forward.

    `sequence` counts the layer reads of the forward. `component` and `layer` are -1 where no layer is meant;
    `component` is a position in the sorted component names. The digests stand for the page ids and rows, the layer
    order, and the set-up (owners, layout, pool size). `changes` counts the moves, restores and writes to prefix rows of
    the forward before, -1 where that failed or was skipped. Everything fits int64.
    """

    kind: StepKind
    forward: int
    sequence: int = 0
    component: int = -1
    layer: int = -1
    num_pages: int = 0
    pages_digest: int = 0
    order_digest: int = 0
    setup_digest: int = 0
    changes: int = 0

    def pack(self, magic: int = RECORD_MAGIC) -> np.ndarray:
        """int64 [NUM_WORDS]: the magic, the fields, and a word mixed from them all."""
        words = np.array([magic, *(int(getattr(self, one.name)) for one in fields(self)), 0], dtype=np.int64)
        words[-1] = _mix(words[:-1])
        return words


NUM_WORDS = len(fields(Step)) + 2
RECORD_NBYTES = NUM_WORDS * 8


def unpack(words: np.ndarray, magic: int = RECORD_MAGIC) -> Step | None:
    """The step in int64 [NUM_WORDS], or None when nobody wrote one there."""
    if int(words[0]) != magic or int(words[-1]) != _mix(words[:-1]):
        return None
    kind, *rest = (int(word) for word in words[1:-1])
    return Step(StepKind(kind), *rest)


def find_divergence(steps: Sequence[Step | None], ranks: Sequence[int], components: Sequence[str]) -> str | None:
    """One sentence that names the ranks which differ from the rest, or None when all records are equal.

    `ranks` are the global ranks of the group in group order. What most ranks say is taken as right, and among equally
    many, what the lowest rank says.
    """
    for index, step in enumerate(steps):
        if step is None:
            return f"{name_rank(index, ranks)} sent no record: its communicator moves nothing"
    present = [step for step in steps if step is not None]
    for index, step in enumerate(present):
        if step.kind is StepKind.FAILED:
            return f"{name_rank(index, ranks)} failed {describe(step, components)}; its own error says why"
    usual = Counter(present).most_common(1)[0][0]
    odd = [index for index, step in enumerate(present) if step != usual]
    if not odd:
        return None
    normal = present.index(usual)
    first = present[odd[0]]
    names = ", ".join(name_rank(index, ranks) for index in odd)
    verb = "is" if len(odd) == 1 else "are"
    return (
        f"{names} {verb} at {describe(first, components)} while {name_rank(normal, ranks)} is at "
        f"{describe(usual, components)} ({_difference(first, usual)}); all ranks must make the same calls"
    )


def excuse(steps: Sequence[Step]) -> list[Step]:
    """Records of a begin without the differences that ranks may have when each gathers for itself.

    A rank that skips the forward, or has nothing to read in it, need not know what the others read; where a rank does
    not know how often the forward before was changed, that isn't compared.
    """
    counted = Counter(step.changes for step in steps if step.changes >= 0)
    changes = counted.most_common(1)[0][0] if counted else 0
    known = [replace(step, changes=changes) if step.changes < 0 else step for step in steps]
    readers = [step for step in known if step.kind is StepKind.BEGIN and step.num_pages]
    if not readers:
        return [replace(step, kind=StepKind.BEGIN) if step.kind is StepKind.SKIP else step for step in known]
    usual = Counter(readers).most_common(1)[0][0]
    eased = []
    for step in known:
        if step.kind is StepKind.SKIP:
            eased.append(replace(usual, forward=step.forward, setup_digest=step.setup_digest))
        elif step.kind is StepKind.BEGIN and not step.num_pages:
            eased.append(replace(usual, forward=step.forward, setup_digest=step.setup_digest, changes=step.changes))
        else:
            eased.append(step)
    return eased


def name_rank(index: int, ranks: Sequence[int]) -> str:
    return f"shard rank {index} (global rank {ranks[index]})"


def describe(step: Step, components: Sequence[str]) -> str:
    """ "the read of 'latent' layer 3 in forward 7" and the like."""
    where = f"in forward {step.forward}"
    if step.kind is StepKind.BEGIN:
        return f"the begin {where}"
    if step.kind is StepKind.END:
        return f"the end {where}"
    if step.kind is StepKind.SKIP:
        return f"no work {where}"
    if step.component < 0:
        return where
    name = components[step.component] if step.component < len(components) else f"component {step.component}"
    verb = "the read of" if step.kind is StepKind.READ else "to read"
    return f"{verb} {name!r} layer {step.layer} {where}"


_MEANINGS = {
    "kind": "different calls",
    "forward": "different forward numbers",
    "component": "different layers",
    "layer": "different layers",
    "sequence": "different numbers of layer reads",
    "num_pages": "different page counts",
    "pages_digest": "different page ids or token counts",
    "order_digest": "different layer orders",
    "setup_digest": "different layer owners, layouts, scratch slots, prefetch settings or pool sizes",
    "changes": "different numbers of moves, restores and writes to prefix rows in the forward before",
}


def _difference(one: Step, other: Step) -> str:
    for name, text in _MEANINGS.items():
        here, there = getattr(one, name), getattr(other, name)
        if here != there:
            return text if name.endswith("digest") or name == "kind" else f"{text}: {here} and {there}"
    return "no difference"


def _mix(words: np.ndarray) -> int:
    """A word that zeros, repeated bytes and shifted records do not have."""
    mixed = 0x9E3779B97F4A7C15
    for word in words:
        mixed = ((mixed ^ (int(word) & 0xFFFFFFFFFFFFFFFF)) * 0x100000001B3 + 1) & 0xFFFFFFFFFFFFFFFF
    return mixed >> 1
