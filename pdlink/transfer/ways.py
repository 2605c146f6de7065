"""Owns the choice of how a pull moves: direct, staged or mapped, and the cost model behind it. It moves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PIECE_S = 300e-6
"""Asking for a staged piece and hearing that it is packed."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """What packing or unpacking takes: the bytes, and one more run of pages."""

    bytes_per_s: float
    row_s: float

    def seconds(self, num_descriptors: int, nbytes: int) -> float:
        return num_descriptors * self.row_s + nbytes / self.bytes_per_s


HOST_COPY = CopyCost(4e9, 1e-6)
"""One core between host addresses, page by page."""
DEVICE_COPY = CopyCost(1e12, 5e-9)
"""A kernel within the memory of one device, which reads page ids from a table."""


class Way(StrEnum):
    DIRECT = "direct"
    STAGED = "staged"
    MAPPED = "mapped"


@dataclass(frozen=True, slots=True)
class WireCost:
    """What a backend takes over one link. `gathers`: a pull reads scattered pages where they are, at no extra cost."""

    per_descriptor_s: float
    bytes_per_s: float
    gathers: bool = False

    def seconds(self, num_descriptors: int, nbytes: int) -> float:
        return num_descriptors * self.per_descriptor_s + (nbytes / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """One pull: its bytes, the descriptors of the direct way, and the pieces of the staged one (None: impossible)."""

    nbytes: int
    num_descriptors: int
    num_pieces: int | None


@dataclass(frozen=True, slots=True)
class WayChoice:
    """A way, what each would take, and why it was this one. Seconds; None where a way was not to be had."""

    way: Way
    reason: str
    direct_s: float
    staged_s: float | None

    def explain(self) -> str:
        """One line for people."""
        staged = "not possible" if self.staged_s is None else f"{self.staged_s * 1e3:.3f} ms"
        return f"{self.way}: {self.reason} (direct {self.direct_s * 1e3:.3f} ms, staged {staged}, as estimated)"


def choose_way(
    asked: str, load: Workload, cost: WireCost, obstacle: str = "", copies: CopyCost = HOST_COPY
) -> WayChoice:
    """The way for one pull. `asked` is the setting `auto`, `direct` or `staged`; `obstacle` says why not staged;
    `copies` is what packing takes, and unpacking again.

    A way that was asked for and cannot be had is replaced by direct, and the reason says so.
    """
    direct_s = cost.seconds(load.num_descriptors, load.nbytes)
    direct = Way.MAPPED if cost.gathers else Way.DIRECT
    staged_s = None
    if not obstacle and load.num_pieces is not None:
        copies_s = 2 * copies.seconds(load.num_descriptors, load.nbytes)
        staged_s = cost.seconds(load.num_pieces, load.nbytes) + copies_s + load.num_pieces * PIECE_S
    if asked == Way.DIRECT:
        return WayChoice(direct, "PDLINK_WAY=direct", direct_s, staged_s)
    if asked == Way.STAGED and staged_s is not None:
        return WayChoice(Way.STAGED, "PDLINK_WAY=staged", direct_s, staged_s)
    if asked == Way.STAGED:
        why = (
            obstacle
            or "a page does not fit a staging slot (PDLINK_STAGING_SLOT_BYTES, PDLINK_STAGING_DEVICE_SLOT_BYTES)"
        )
        return WayChoice(direct, f"PDLINK_WAY=staged, but {why}", direct_s, None)
    if cost.gathers:
        return WayChoice(direct, "the backend gathers pages where they are", direct_s, staged_s)
    if staged_s is None:
        return WayChoice(direct, obstacle or "a page does not fit a staging slot", direct_s, None)
    if staged_s < direct_s:
        return WayChoice(Way.STAGED, f"{load.num_descriptors} descriptors cost more than packing", direct_s, staged_s)
    return WayChoice(direct, f"{load.num_descriptors} descriptors cost less than packing", direct_s, staged_s)
