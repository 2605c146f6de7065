"""Owns how the log of a pdlink process is written: lines of text, or one JSON object a line. What is said, and when, is
its writers' to decide: stdlib loggers under `pdlink.*`.

A record may carry plain values as `extra=fields(...)`; they are members of the JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

LINE = "%(levelname).1s %(asctime)s %(name)s: %(message)s"
OWN = ("time", "level", "logger", "message", "traceback")
"""Members that every object has, or may have; fields of the same names are left out."""


class JsonFormatter(logging.Formatter):
    """One JSON object for each record: time (UTC), level, logger, message, the record's fields, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        more = getattr(record, "pdlink", None)
        if isinstance(more, Mapping):
            said |= {str(name): value for name, value in more.items() if name not in OWN}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str, ensure_ascii=False)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error. A class of its own, so that `set_up` finds it again."""


def set_up(level: str, style: Literal["text", "json"] = "text") -> None:
    """Write everything of `level` and above to standard error, in place of what was set up before.

    For commands: where the process has set up a log of its own, nothing is changed. That may take `JsonFormatter`.
    """
    root = logging.getLogger()
    ours = [one for one in root.handlers if isinstance(one, StderrHandler)]
    if root.handlers and not ours:
        return
    handler = StderrHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(LINE))
    root.setLevel(level.upper())
    root.addHandler(handler)
    for one in ours:
        root.removeHandler(one)
