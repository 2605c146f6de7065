"""Owns the shared token of a process: where it comes from, how it is sent and how one that was sent is judged.

A token file may hold several lines, so that a token can be replaced without a gap: first the bootstrap's file gets the
new one as another line, then the callers', and in the end the old line goes.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from pdlink.bootstrap.renewed import Renewed
from pdlink.bootstrap.tls import read_file, unusable
from pdlink.config import PREFIX, Settings
from pdlink.errors import ConfigError
from pdlink.secret import Secret

TOKEN_KEY = "authorization"
SCHEME = "Bearer "
LEAST_CHARS, MOST_CHARS = 16, 4096


def read_tokens(settings: Settings) -> tuple[Secret, ...]:
    """The tokens of the settings, the one to send first; none where none is set. Raises `ConfigError` without them."""
    if settings.token is not None and settings.token_file is not None:
        raise ConfigError(f"{PREFIX}TOKEN and {PREFIX}TOKEN_FILE are both set; set one")
    if settings.token is not None:
        token = settings.token.get_secret_value()
        fault = _fault(token)
        if fault:
            raise ConfigError(f"{PREFIX}TOKEN {fault}; make one with: openssl rand -hex 32")
        return (Secret(token.encode()),)
    if settings.token_file is None:
        return ()
    text = read_file("token_file", settings.token_file).decode("ascii", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fault = next(filter(None, map(_fault, lines)), "" if lines else "holds no token")
    if fault:
        raise unusable("token_file", settings.token_file, f"{fault}; make one with: openssl rand -hex 32")
    return tuple(Secret(line.encode()) for line in lines)


def _fault(token: str) -> str:
    if not token:
        return "is empty: unset it, or set one"
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "holds characters other than printable ASCII without spaces"
    if not LEAST_CHARS <= len(token) <= MOST_CHARS:
        return f"has a token of {len(token)} characters, not {LEAST_CHARS}..{MOST_CHARS}"
    return ""


class TokenDoor:
    """What a bootstrap takes for a good token. Raises `ConfigError` when made of settings that cannot be used."""

    def __init__(self, settings: Settings) -> None:
        self._digests = Renewed([settings.token_file], lambda: tuple(one.digest() for one in read_tokens(settings)))

    @property
    def is_open(self) -> bool:
        """Whether no token is asked for."""
        return not self._digests.get()

    def fault(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """What is wrong with a call's token, or nothing. It is compared with every good one, in constant time."""
        good = self._digests.get()
        if not good:
            return ""
        sent = next((value for key, value in metadata if key == TOKEN_KEY), None)
        if not isinstance(sent, str) or not sent.startswith(SCHEME):
            return "no token"
        digest = Secret(sent[len(SCHEME) :].encode()).digest()
        found = [hmac.compare_digest(digest, one) for one in good]
        return "" if any(found) else "wrong token"
