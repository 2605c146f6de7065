"""Owns parts: which heads and which tokens of a component the pages of one rank hold. It knows no address.

A page of a prefill rank and one of a decode rank need not hold the same: tensor parallelism splits heads, and a decode
side may spread tokens over ranks. `page_slices` says which bytes of the one are which bytes of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import LayoutError
from pdlink.layout.components import Component
from pdlink.layout.layer_plan import balanced_ranges


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank's pages hold of a component.

    Heads: range `head_index` of `head_count`, equal ones or the first of them one head longer. Tokens: those t of which
    t mod `token_count` is `token_index`, one after the other, so that a page holds tokens of `token_count` pages of
    everything. The default is all of both.
    """

    head_index: int = 0
    head_count: int = 1
    token_index: int = 0
    token_count: int = 1

    def __post_init__(self) -> None:
        for what, index, count in (
            ("heads", self.head_index, self.head_count),
            ("tokens", self.token_index, self.token_count),
        ):
            if not 0 <= index < count:
                raise LayoutError(f"part {index} of {count} of the {what} is no part")

    @property
    def is_whole(self) -> bool:
        return self.head_count == self.token_count == 1

    def heads(self, total: int) -> range:
        """Its heads among the `total` of the model. Raises `LayoutError` where these are fewer than the ranges."""
        if total < self.head_count:
            raise LayoutError(f"{total} heads make no {self.head_count} ranges")
        return balanced_ranges(total, self.head_count)[self.head_index]

    def __str__(self) -> str:
        heads = f"heads {self.head_index} of {self.head_count}" if self.head_count > 1 else "all heads"
        return f"{heads}, tokens {self.token_index} mod {self.token_count}" if self.token_count > 1 else heads


WHOLE = Part()


def part_of(component: Component, tp: int, tp_size: int, dcp: int = 1) -> Part:
    """What rank `tp` of `tp_size` holds of a component.

    Split heads lie on the ranks in order. Where there are more ranks than ranges, neighbours have the same one; where
    tp does not divide the heads, the first ranks have one more. `dcp` of the ranks that have the same share the
    tokens. Raises `LayoutError` where that does not come out.
    """
    if not 0 <= tp < tp_size:
        raise LayoutError(f"tp rank {tp} is outside tp={tp_size}")
    head_count = _head_count(component, tp, tp_size)
    if component.total_heads == 0 and component.num_heads > 1 and tp_size > 1:
        raise LayoutError(
            f"component {component.name!r} has {component.num_heads} heads on a rank of tp={tp_size} and does not say "
            "how many the model has: give it total_heads"
        )
    if tp_size % head_count:
        raise LayoutError(
            f"component {component.name!r} has {component.num_heads} of {component.model_heads} heads on tp rank {tp}, "
            f"which makes {head_count} ranges; tp={tp_size} is no multiple of that"
        )
    if dcp < 1 or (tp_size // head_count) % dcp:
        raise LayoutError(
            f"dcp={dcp} does not divide the {tp_size // head_count} of tp={tp_size} ranks that hold the same heads of "
            f"component {component.name!r}"
        )
    if component.page_size % dcp:
        raise LayoutError(
            f"dcp={dcp} does not divide page_size={component.page_size} of component {component.name!r}; take a page "
            "size that it divides"
        )
    return Part(tp * head_count // tp_size, head_count, tp % dcp, dcp)


def _head_count(component: Component, tp: int, tp_size: int) -> int:
    """How many ranges the heads make when rank `tp` has those of `component`."""
    total = component.model_heads
    if component.num_heads == total or total < tp_size or total % tp_size == 0:
        return -(-total // component.num_heads)
    if component.num_heads == len(balanced_ranges(total, tp_size)[tp]):
        return tp_size
    raise LayoutError(
        f"component {component.name!r} has {component.num_heads} of {total} heads on tp rank {tp}; of "
        f"tp={tp_size} ranks the first {total % tp_size} have {total // tp_size + 1}, the others {total // tp_size}"
    )
