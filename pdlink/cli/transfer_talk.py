"""Owns the conversation of the processes of `pdlink bench transfer` with the command: a JSON line each way, in turn.

A child answers what its object's method of that name returns, or how it was refused. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pdlink.cli.exits import WrongRun
from pdlink.errors import BackendUnavailable, PdlinkError
from pdlink.testing.child import Child
from pdlink.testing.parent import Parent


class Unavailable(BackendUnavailable):
    """A backend, or the memory that it needs, is not to be had on this machine. The message says why."""


def ask(child: Child, timeout_s: float, do: str, **arguments: Any) -> dict[str, Any]:
    """Put one question to a child. Raises `Unavailable` or `WrongRun` for what it refuses, and what `hear` raises."""
    child.say({"do": do, **arguments})
    return answer(child, timeout_s)


def answer(child: Child, timeout_s: float) -> dict[str, Any]:
    """The answer to a question that was put before."""
    heard = child.hear(timeout_s)
    assert isinstance(heard, dict)
    if "unavailable" in heard:
        raise Unavailable(heard["unavailable"])
    if "refused" in heard:
        raise WrongRun(f"{child.name}: {heard['refused']}")
    return heard


def converse(side: Any) -> None:
    """In a child: answer until standard input ends, then close `side`. What libraries print goes to standard error."""
    parent = Parent()
    try:
        for line in sys.stdin:
            message = json.loads(line)
            parent.say(_reply(side, message.pop("do"), message))
    except BrokenPipeError:  # the command has gone without a word: its end of standard input says the same
        pass
    finally:
        side.close()


def _reply(side: Any, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        told: dict[str, Any] = getattr(side, do)(**arguments)
        return told
    except BackendUnavailable as error:
        return {"unavailable": str(error)}
    except PdlinkError as error:
        return {"refused": str(error)}
