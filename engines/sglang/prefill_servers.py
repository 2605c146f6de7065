"""Owns what a decode rank knows of prefill servers, by bootstrap address. It asks in the background and never waits.

Which ranks a server has, and what they own, is the gRPC directory's to say; this is the little that sglang's decode
scheduler wants before it makes a receiver.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from pdlink.errors import InvalidInput
from pdlink_engines.sglang.http_answers import FACTS_PATH, PrefillFacts, unpack_facts

log = logging.getLogger("pdlink.sglang")

HTTP_THREADS = 8
"""That the manager gives to asking."""
REFUSAL_TTL_S = 5.0
MAX_DOUBTFUL = 3
"""Servers asked at once of those that did not answer before: fewer than there are threads, so that servers that are
gone, each of which holds a thread until its timeout, leave some to those that answer."""
MAX_SERVERS = 4096
"""Remembered at once, of those that answer and of those that don't."""
MAX_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Refusal:
    text: str
    at: float


class PrefillServers:
    """Thread-safe. `known` is read by sglang's scheduler, as the table that it takes it for."""

    def __init__(self, threads: Executor, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.known: dict[str, PrefillFacts] = {}
        self._threads = threads
        self._timeout_s = timeout_s
        self._clock = clock
        self._asking: set[str] = set()
        self._refused: dict[str, _Refusal] = {}
        self._troubles: dict[str, str] = {}
        """Address -> why it could not be asked the last time."""
        self._lock = threading.Lock()

    def look(self, address: str) -> bool:
        """Whether the server at `address` (host:port) is known; if not, ask it, unless that is under way.

        A server that is not pdlink's is known too: requests to it are let through, to be refused with the reason.
        """
        with self._lock:
            refused = self._refused.get(address)
            if refused and self._clock() - refused.at > REFUSAL_TTL_S:
                # Another server may be there by now.
                del self._refused[address]
                self.known.pop(address, None)
            if address in self.known:
                return True
            if address not in self._asking and self._may_ask(address):
                self._asking.add(address)
                self._threads.submit(self._ask, address)
            return False

    def _may_ask(self, address: str) -> bool:
        return address not in self._troubles or len(self._asking & self._troubles.keys()) < MAX_DOUBTFUL

    def refusal(self, address: str) -> str | None:
        with self._lock:
            refused = self._refused.get(address)
            return refused.text if refused else None

    def trouble(self, address: str) -> str | None:
        """Why the server is not known (yet), where it was asked and that failed."""
        with self._lock:
            return self._troubles.get(address)

    def forget(self, address: str) -> None:
        with self._lock:
            self.known.pop(address, None)
            self._refused.pop(address, None)

    def _ask(self, address: str) -> None:
        """On a background thread."""
        facts, refusal, trouble = None, None, None
        try:
            facts = _fetch(address, self._timeout_s)
        except InvalidInput as error:
            refusal = str(error)
            log.error("%s", refusal)
        except _NotReady as error:
            trouble = f"prefill server {address} is not ready: {error}"
        except (OSError, http.client.HTTPException) as error:
            trouble = (
                f"prefill server {address} does not answer: {getattr(error, 'reason', None) or error or repr(error)}; "
                "check bootstrap_host and bootstrap_port of the request, and that prefill runs"
            )
        except BaseException as error:
            log.exception("asking prefill server %s failed", address)
            trouble = f"prefill server {address} could not be asked: {type(error).__name__}: {error}"
        with self._lock:
            self._asking.discard(address)
            before = self._troubles.pop(address, None)
            if trouble:
                self._troubles[address] = trouble
            if facts:
                self.known[address] = facts
            books: tuple[dict[str, Any], ...] = (self._troubles, self.known, self._refused)
            for book in books:
                while len(book) >= MAX_SERVERS:  # the one heard of first; it is asked again when it is meant again
                    book.pop(next(iter(book)))
            if refusal:
                self._refused[address] = _Refusal(refusal, self._clock())
                self.known[address] = PrefillFacts(1, True)
        # It is asked again and again: said once, and when it changes.
        if trouble and trouble != before:
            log.warning("%s", trouble)


class _NotReady(Exception):
    """The server is pdlink's, and not all of its ranks have registered."""


def _fetch(address: str, timeout_s: float) -> PrefillFacts:
    """The facts of a server whose ranks are all there. Raises `_NotReady` or `OSError` for one to ask again,
    `InvalidInput` for one that pdlink cannot pull from."""
    try:
        with urllib.request.urlopen(f"http://{address}{FACTS_PATH}", timeout=timeout_s) as answer:
            return unpack_facts(answer.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        text = error.read(1000).decode(errors="replace")
        if error.code == 503:
            raise _NotReady(text) from error
        raise InvalidInput(
            f"the prefill server with bootstrap address {address} does not run pdlink (it answered {error.code} to "
            f"{FACTS_PATH}); install pdlink there, and start it with the same --disaggregation-transfer-backend and "
            "PDLINK_SGLANG_BACKEND_NAME as this decode server"
        ) from error
    except InvalidInput as error:
        raise InvalidInput(f"prefill server {address}: {error}") from error
