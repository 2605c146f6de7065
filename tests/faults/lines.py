"""Owns the loop of a process that is told things in lines and does a little work in between."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any

STEP_S = 0.005


def obey(do: Callable[[dict[str, Any]], None], work: Callable[[], None]) -> None:
    """Hand every line of standard input to `do`, and call `work` a few hundred times a second, until the input ends."""
    heard = b""
    while True:
        if select.select([0], [], [], STEP_S)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            heard += data
            *lines, heard = heard.split(b"\n")
            for line in lines:
                do(json.loads(line))
        work()
