"""Owns damage to bytes: small changes that turn a valid frame into one that may be anything. It knows no protocol."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = ("flip", "cut", "insert", "repeat", "zero", "none")


@dataclass(frozen=True, slots=True)
class Damage:
    """One change: of what `kind`, where (a fraction of the length, 0..1), and by which value (0..255)."""

    kind: str
    where: float
    value: int

    def to(self, data: bytes) -> bytes:
        at = min(int(self.where * len(data)), max(len(data) - 1, 0))
        stop = min(at + 1 + self.value % 16, len(data))
        match self.kind:
            case "flip" if data:
                return data[:at] + bytes([data[at] ^ (self.value or 1)]) + data[at + 1 :]
            case "cut":
                return data[:at]
            case "insert":
                return data[:at] + bytes([self.value]) * (1 + self.value % 8) + data[at:]
            case "repeat":
                return data[:stop] + data[at:]
            case "zero":
                return data[:at] + bytes(stop - at) + data[stop:]
        return data


def any_damage(chance: random.Random) -> Damage:
    return Damage(chance.choice(KINDS[:-1]), chance.random(), chance.randrange(256))
