"""Owns reader sets: which decode ranks pull one transfer."""

from __future__ import annotations

from dataclasses import dataclass

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
