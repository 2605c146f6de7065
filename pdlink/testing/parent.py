"""Owns a child's side of the conversation with the process that started it (see `child`): lines out, and nothing else.

What is heard is `sys.stdin`, which ends when the parent does.
"""

from __future__ import annotations

import json
import os
import sys
import threading


class Parent:
    """Whoever started this process. Make it first: from then on, what libraries print goes to standard error.

    Any thread may say something.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def say(self, value: object) -> None:
        """Send one line of JSON. Raises `BrokenPipeError` once the parent has gone."""
        with self._lock:
            try:
                self._out.write(json.dumps(value) + "\n")
                self._out.flush()
            except BrokenPipeError:
                # What is still buffered must not fail again when the interpreter ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
                raise
