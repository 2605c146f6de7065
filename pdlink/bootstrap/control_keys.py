"""Owns what a reader needs to talk to a rank's control socket under CURVE. It makes no keys and opens no socket."""

from __future__ import annotations

from dataclasses import dataclass

from pdlink.errors import InvalidInput
from pdlink.secret import Secret

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ControlKeys:
    """Keys of one life of a rank: its server's public one, and the pair that a reader must have.

    All readers of a rank share the pair, so that it says "the bootstrap gave me this", and not which reader it is.
    Raises `InvalidInput` for keys of another size.
    """

    server_public: bytes
    client_public: bytes
    client_secret: Secret

    def __post_init__(self) -> None:
        for name in ("server_public", "client_public", "client_secret"):
            nbytes = len(getattr(self, name))
            if nbytes != KEY_BYTES:
                raise InvalidInput(f"control_keys.{name} has {nbytes} bytes; a CURVE key has {KEY_BYTES}")
