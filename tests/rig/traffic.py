"""Owns callers that keep a rig busy while it is broken, and what each of their requests came to."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.rig.rig import PATIENCE_S, Rig, wait_until

NUM_CALLERS = 2


@dataclass
class Account:
    """The ends of requests: how many were right, and the text of each that failed or was wrong."""

    num_right: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_tries: int = 0


class Traffic:
    """Callers that ask `expected`'s prompts in turn, each until `stop`, which waits for the last answers."""

    def __init__(self, rig: Rig, expected: Mapping[str, list[int]]) -> None:
        self.account = Account()
        self._rig = rig
        self._expected = list(expected.items())
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call, args=(one,), daemon=True) for one in range(NUM_CALLERS)]

    def wait_right(self, more: int) -> None:
        """Until `more` further requests were answered rightly: the rig serves."""
        goal = self.account.num_right + more
        wait_until(
            lambda: self.account.num_right >= goal or bool(self.account.wrong),
            f"{more} more requests are answered; failed: {self.account.failed[-3:]}",
        )

    def stop(self) -> Account:
        self._stop.set()
        for one in self._threads:
            one.join(2 * PATIENCE_S)
            assert not one.is_alive(), "a request has no end"
        return self.account

    def __enter__(self) -> Self:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()

    def _call(self, number: int) -> None:
        while not self._stop.is_set():
            prompt, tokens = self._expected[number % len(self._expected)]
            number += 1
            try:
                found = self._rig.complete(prompt, len(tokens))
            except (OSError, AssertionError, ValueError) as error:
                with self._lock:
                    self.account.failed.append(f"{type(error).__name__}: {error}")
                time.sleep(0.5)
                continue
            with self._lock:
                self.account.num_tries += found["pdlink"]["tries"]
                if found["pdlink"]["tokens"] == tokens:
                    self.account.num_right += 1
                else:
                    self.account.wrong.append(f"{prompt!r}: {found['pdlink']['tokens']}, expected {tokens}")
