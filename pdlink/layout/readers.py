"""Owns reader sets and parts: which decode ranks pull one transfer, and which slice of a page a source provides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdlink.errors import LayoutError


@dataclass(frozen=True, slots=True)
class ReaderSet:
    """One reader's place among the decode ranks that pull a transfer.

    Sets of one transfer agree on `decode_instance` and `num_readers`; `reader_index` is in [0, num_readers).
    """

    decode_instance: str
    reader_index: int = 0
    num_readers: int = 1

    def __post_init__(self) -> None:
        if not self.decode_instance:
            raise LayoutError("a reader set needs the name of its decode instance")
        if not 0 <= self.reader_index < self.num_readers:
            raise LayoutError(f"reader_index={self.reader_index} is outside num_readers={self.num_readers}")

    def agrees(self, other: ReaderSet) -> bool:
        """Whether both belong to one set (the index may differ)."""
        return (self.decode_instance, self.num_readers) == (other.decode_instance, other.num_readers)


class PartKind(StrEnum):
    WHOLE = "whole"
    HEADS = "heads"
    TOKEN_RESIDUE = "token_residue"
    SUB_PAGE = "sub_page"


@dataclass(frozen=True, slots=True)
class Part:
    """A disjoint slice of a page: part `index` of `count` equal ones of its kind. The default is all of the page."""

    kind: PartKind = PartKind.WHOLE
    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count or (self.kind is PartKind.WHOLE and self.count != 1):
            raise LayoutError(f"part {self.index} of {self.count} ({self.kind}) is not a slice of a page")


WHOLE = Part()
