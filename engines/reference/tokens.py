"""Owns how text becomes tokens for the models that come without a tokenizer. Models with one wrap their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NUM_BYTES = 256
BEGIN = 256
END = 257
VOCAB_SIZE = 258


class Tokenizer(Protocol):
    """Text to token ids and back. `encode` gives a whole prompt, whatever marks the model wants around it included."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per UTF-8 byte after a begin mark. Bytes that are no text come back as escapes."""

    def encode(self, text: str) -> list[int]:
        return [BEGIN, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(one for one in tokens if one < NUM_BYTES).decode(errors="backslashreplace")
