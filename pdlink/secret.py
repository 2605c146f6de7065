"""Owns the shape of a secret in memory: bytes that no repr or log line shows. It makes and stores none."""

from __future__ import annotations

import hashlib
import hmac
from typing import NoReturn

HIDDEN = "***"


class Secret:
    """Bytes that only `reveal` gives out. Two are compared in constant time; printing one shows `Secret(***)`.

    It does not pickle: `TypeError`.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """The bytes, for whoever must send or use them; never for text that people read."""
        return self._value

    def digest(self) -> bytes:
        """SHA-256: enough to recognise the secret again, and useless to whoever reads it."""
        return hashlib.sha256(self._value).digest()

    def __len__(self) -> int:
        return len(self._value)

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self.digest(), other.digest())

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not written out")
