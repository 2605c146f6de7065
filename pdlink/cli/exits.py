"""Owns the exit codes of the command and which error ends in which, as one line. It prints nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import typer

from pdlink.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    DuplicateTransfer,
    IncompatibleError,
    InvalidInput,
    NotReady,
    PdlinkError,
    StaleIncarnation,
)

OK = 0
WRONG = 1
UNUSABLE = 2
BUG = 3
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143
HUNG_UP = 129

SUMMARY = (
    "Exit codes: 0 done; 1 a run failed or was found wrong; 2 input or environment that cannot be used; "
    "3 a bug in pdlink; 129, 130, 143 hung up, Ctrl-C, terminated; 141 the reader of the output left."
)

# What the caller can put right: another value, another setting, another peer, a later moment.
_UNUSABLE = (
    InvalidInput,
    IncompatibleError,
    NotReady,
    BackendUnavailable,
    DuplicateTransfer,
    StaleIncarnation,
    DeadlineExceeded,
)


class WrongRun(PdlinkError):
    """A run that ended, and whose result is not what it must be: the message says where. Exit code 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread so that cleaning up goes the same way as after Ctrl-C."""


class HungUp(KeyboardInterrupt):
    """SIGHUP: the terminal or the ssh session is gone. Raised like `Terminated`."""


def exit_code(error: BaseException) -> int:
    """The exit code in which `error` ends the command."""
    if isinstance(error, Terminated):
        return TERMINATED
    if isinstance(error, HungUp):
        return HUNG_UP
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, typer.TyperException):
        return UNUSABLE
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, PdlinkError):
        return UNUSABLE if isinstance(error, _UNUSABLE) else WRONG
    if isinstance(error, OSError):  # no room on the disk, a file that may not be read, no more processes
        return UNUSABLE
    return BUG


def one_line(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """`error` as one line for an operator. `arguments` are the command line, for the value that was given."""
    text = _usage(error, arguments) if isinstance(error, typer.TyperException) else str(error)
    return " ".join(text.split()) or type(error).__name__


def _usage(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """A mistake in the command line. The parser names the option, but neither the value nor where to look."""
    text = bad_value(error, arguments)
    context: typer.Context | None = getattr(error, "ctx", None)
    return f"{text}; see '{context.command_path} --help'" if context else text


def bad_value(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Which option or argument of a command line cannot be used, its value where that is known, and what to give."""
    parameter = getattr(error, "param", None)
    names: Sequence[str] = getattr(parameter, "opts", ())
    value = _given(names, arguments)
    if value is None:
        return error.format_message().rstrip(".")
    return f"{names[0]} {value!r} cannot be used: {_advice(error) or error.message.rstrip('.')}"


_ADVICE = {
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_parsing": "give a number",
    "bool_parsing": "use true or false",
    "greater_than_equal": "give at least {ge}",
    "less_than_equal": "give at most {le}",
    "greater_than": "give more than {gt}",
    "less_than": "give less than {lt}",
    "value_error": "{error}",
}
"""What to give, by the kind of fault that the parser's checker names and its limits."""


def _advice(error: typer.TyperException) -> str:
    """What to give instead, in words of ours; empty where only the parser knows."""
    faults = getattr(error.__cause__, "errors", None)
    first = faults()[0] if callable(faults) else {}
    return _ADVICE.get(first.get("type", ""), "").format_map(first.get("ctx", {})).rstrip(".")


def _given(names: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The value that follows one of the option's names on the command line."""
    for here, after in itertools.zip_longest(arguments, arguments[1:]):
        if here in names:
            return after
        name, equals, value = here.partition("=")
        if equals and name in names:
            return value
    return None
