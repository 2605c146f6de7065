"""Owns leaks on purpose: a file, thread, segment or region that a process of a fault test keeps. It counts none."""

from __future__ import annotations

import os
import threading

from pdlink.backends.base import Backend
from pdlink.backends.shm import Segment
from pdlink.layout.regions import Region

KINDS = ("file", "thread", "segment", "region")
MOMENT_S = 3.0
"""Longer than it takes to find a count at rest."""


class Leaks:
    """What has leaked stays here until the process ends."""

    def __init__(self, backend: Backend, region: Region) -> None:
        self.backend, self.region = backend, region
        self.kept: list[object] = []
        self.never = threading.Event()

    def add(self, kind: str) -> None:
        match kind:
            case "file":
                self.kept.append(os.open(os.devnull, os.O_RDONLY))
            case "file for a moment":
                threading.Timer(MOMENT_S, os.close, [os.open(os.devnull, os.O_RDONLY)]).start()
            case "thread":
                threading.Thread(target=self.never.wait, name="leaked", daemon=True).start()
            case "segment":
                self.kept.append(Segment.create(4096))
            case "region":
                self.backend.register(self.region)
