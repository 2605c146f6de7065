"""Owns which bytes of a prefill page are which bytes of a decode page, where the two hold different things.

A slice is what one page of one side gives to a page of the other: runs of bytes, in the order in which they lie in the
prefill page. A packed page is these runs one after another, so its owner needs to know nothing of the other side's
page but the part that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from pdlink.errors import LayoutError
from pdlink.layout.components import Component, Field
from pdlink.layout.parts import Part

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PageSlice:
    """Runs: `nbytes[i]` bytes at `source[i]` of the one page are those at `destination[i]` of the other.

    int64 [n] each, `source` increasing; no two runs overlap on either side.

    `is_whole`: a page goes as it is, padding included.
    """

    source: Int64Array
    destination: Int64Array
    nbytes: Int64Array
    is_whole: bool = False

    @property
    def num_runs(self) -> int:
        return len(self.nbytes)

    @cached_property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


@lru_cache(maxsize=4096)
def slice_page(source: Component, held: Part, destination: Component, wanted: Part, turn: int = 0) -> PageSlice:
    """What a page of `source`, which holds `held`, gives to the `turn`-th part of a page of `destination`, which holds
    `wanted`. A page of a side that keeps one token of n holds tokens of n pages of the other, one after another.

    Empty where they have no head in common. Raises `LayoutError` where the sides cannot be converted, as `obstacle`
    says before.
    """
    if text := obstacle(source, held, destination, wanted):
        raise LayoutError(text)
    alike = (source.fields, source.page_bytes) == (destination.fields, destination.page_bytes)
    if held == wanted and wanted.token_count == 1 and alike:
        zero, whole = np.zeros(1, dtype=np.int64), np.array([source.page_bytes], dtype=np.int64)
        return PageSlice(zero, zero, whole, is_whole=True)
    rows = turn * (source.page_size // wanted.token_count)
    slots = rows + np.arange(source.page_size // wanted.token_count, dtype=np.int64)
    here, there, sizes = [], [], []
    for field in source.fields:
        other = destination.field(field.name)
        ours, theirs = _common_heads(source, held, wanted, field), _common_heads(destination, wanted, held, other)
        starts = _picked(field.starts(source.page_size), _tokens(source, wanted), ours)
        here.append(starts)
        there.append(_picked(other.starts(destination.page_size), slots, theirs))
        sizes.append(np.full(len(starts), field.bytes_per_token, dtype=np.int64))
    source_starts, nbytes = np.concatenate(here), np.concatenate(sizes)
    order = np.argsort(source_starts, kind="stable")
    columns = source_starts[order], np.concatenate(there)[order], nbytes[order]
    runs = _run_starts((_follows(columns[0], columns[2])) & (_follows(columns[1], columns[2])))
    return PageSlice(columns[0][runs], columns[1][runs], _sums(columns[2], runs))


@lru_cache(maxsize=4096)
def held_runs(source: Component, held: Part, wanted: Part) -> tuple[Int64Array, Int64Array]:
    """(offsets, sizes), int64 [n]: the runs of a page that holds `held` which somebody who holds `wanted` takes.

    One after another they are the packed page: the bytes of `slice_page`, in the same order, whatever they are for.
    Empty where there is no head in common. Raises `LayoutError` for a part that pages cannot be cut into.
    """
    if text := _unfit(source, held, "prefill") or _unfit_reader(source, wanted):
        raise LayoutError(text)
    here, sizes = [], []
    for field in source.fields:
        heads = _common_heads(source, held, wanted, field)
        starts = _picked(field.starts(source.page_size), _tokens(source, wanted), heads)
        here.append(starts)
        sizes.append(np.full(len(starts), field.bytes_per_token, dtype=np.int64))
    starts, nbytes = np.concatenate(here), np.concatenate(sizes)
    order = np.argsort(starts, kind="stable")
    starts, nbytes = starts[order], nbytes[order]
    runs = _run_starts(_follows(starts, nbytes))
    return starts[runs], _sums(nbytes, runs)


def obstacle(source: Component, held: Part, destination: Component, wanted: Part) -> str:
    """Why pages of the one cannot become pages of the other, or nothing."""
    for what in ("page_size", "model_heads", "is_by_heads"):
        ours, theirs = getattr(source, what), getattr(destination, what)
        if ours != theirs:
            return f"component {source.name!r} has {what}={ours} on prefill and {theirs} on decode"
    ours, theirs = _what_a_token_takes(source), _what_a_token_takes(destination)
    if ours != theirs:
        return f"component {source.name!r} has fields {ours} on prefill and {theirs} on decode"
    return _unfit(source, held, "prefill") or _unfit(destination, wanted, "decode") or _unfit_reader(source, wanted)


def _unfit(component: Component, part: Part, side: str) -> str:
    """Why pages of a component on one side cannot hold a part."""
    if side == "prefill" and part.token_count > 1:
        return f"component {component.name!r} is spread over ranks by tokens on prefill, which only decode may do"
    if component.model_heads < part.head_count or len(part.heads(component.model_heads)) != component.num_heads:
        return (
            f"component {component.name!r} has {component.num_heads} of {component.model_heads} heads in a page on "
            f"{side}, which is not range {part.head_index} of {part.head_count}"
        )
    return ""


def _unfit_reader(component: Component, wanted: Part) -> str:
    """Why nobody can take that part of pages of a component."""
    if component.page_size % wanted.token_count:
        return f"component {component.name!r}: dcp={wanted.token_count} does not divide page_size={component.page_size}"
    if component.model_heads < wanted.head_count or (wanted.head_count > 1 and not component.is_by_heads):
        return f"component {component.name!r} has {component.model_heads} heads, not {wanted.head_count} ranges of them"
    return ""


def _what_a_token_takes(component: Component) -> dict[str, tuple[int, int]]:
    """Field -> bytes, and how many of them a token has where that is not the same in all fields."""
    by_heads = component.is_by_heads
    return {one.name: (one.bytes_per_token, 1 if by_heads else one.num_heads) for one in component.fields}


def _tokens(source: Component, wanted: Part) -> Int64Array:
    """Positions in a page of the tokens that are wanted of it, the same in every page."""
    return np.arange(wanted.token_index, source.page_size, wanted.token_count, dtype=np.int64)


def _common_heads(component: Component, part: Part, other: Part, field: Field) -> Int64Array:
    """Heads that both parts have, as they are numbered in a page that holds `part`."""
    if not component.is_by_heads:
        return np.arange(field.num_heads, dtype=np.int64)
    mine, theirs = part.heads(component.model_heads), other.heads(component.model_heads)
    return np.arange(max(mine.start, theirs.start), min(mine.stop, theirs.stop), dtype=np.int64) - mine.start


def _picked(starts: Int64Array, tokens: Int64Array, heads: Int64Array) -> Int64Array:
    picked: Int64Array = starts[tokens[:, None], heads[None, :]].reshape(-1)
    return picked


def _follows(starts: Int64Array, nbytes: Int64Array) -> npt.NDArray[np.bool_]:
    """bool [n]: whether each begins where the one before it ends."""
    follows = np.zeros(len(starts), dtype=np.bool_)
    follows[1:] = starts[1:] == starts[:-1] + nbytes[:-1]
    return follows


def _run_starts(follows: npt.NDArray[np.bool_]) -> Int64Array:
    return np.flatnonzero(~follows).astype(np.int64)


def _sums(nbytes: Int64Array, starts: Int64Array) -> Int64Array:
    return np.add.reduceat(nbytes, starts) if len(starts) else nbytes
