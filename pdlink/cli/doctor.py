"""Owns `pdlink doctor`: what it looks at, in which order, and how it is shown. The looking is in `doctor_machine` and
`doctor_parts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pdlink.cli.exits import WrongRun
from pdlink.cli.settings import ConfigOption, SetOption

if TYPE_CHECKING:
    from rich.console import Console

    from pdlink.cli.doctor_finding import Finding

EXAMPLES = """\b
Examples:
  pdlink doctor
  pdlink doctor --fast
  pdlink doctor --json | jq '.findings[] | select(.state != "ok")'"""
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    fast: Annotated[bool, typer.Option("--fast", help="Leave out what starts processes and moves bytes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: ConfigOption = None,
    assigned: SetOption = None,
) -> None:
    """Look at what pdlink needs on this machine, and say of each thing whether it is well, and the fix where it is not.

    Transports are tried with a real transfer over loopback, each in a process of its own. Exit code 1 with any error.
    """
    from pdlink.cli.doctor_finding import ERROR, WARNING
    from pdlink.cli.output import console, print_json

    found: list[Finding] = []
    out = console()
    for finding in _findings(config, assigned, fast, as_json):
        found.append(finding)
        if not as_json:
            _show(out, finding)
    num_errors = sum(one.state == ERROR for one in found)
    num_warnings = sum(one.state == WARNING for one in found)
    if as_json:
        print_json({"ok": not num_errors, "findings": [one.as_object() for one in found]})
    else:
        out.print(f"{len(found)} looked at: {num_errors} errors, {num_warnings} warnings")
    if num_errors:
        first = next(one for one in found if one.state == ERROR)
        raise WrongRun(f"{num_errors} of {len(found)} are errors; the first one is {first.name}: {first.text}")


def _findings(config: str | None, assigned: list[str] | None, fast: bool, quiet: bool) -> Iterator[Finding]:
    from pdlink.cli import doctor_machine as machine
    from pdlink.cli import doctor_parts as parts
    from pdlink.cli.doctor_settings import named

    settings, finding = parts.settings(config, assigned)
    yield finding
    yield from named(settings)
    yield machine.interpreter()
    yield from machine.packages()
    yield from machine.limits(settings)
    yield from machine.verbs()
    yield from machine.ports(settings)
    if fast:
        return
    slow: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("torch, CUDA, peer access, NCCL", parts.torch),
        *((f"a transfer over {name}", lambda name=name: [parts.transport(name)]) for name in parts.TRANSPORTS),
        ("the hooks in sglang and vllm", parts.engines),
    )
    for what, look in slow:
        with _busy(what, quiet):
            told = list(look())
        yield from told


@contextlib.contextmanager
def _busy(what: str, quiet: bool) -> Iterator[None]:
    """Say on standard error, where that is a terminal, what takes its time."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"looking at {what}"):
        yield


def _show(out: Console, one: Finding) -> None:
    from rich.text import Text

    line = Text.assemble((f"{one.state:<8}", STYLES[one.state]), f"{one.name}: {one.text}")
    if one.fix:
        line.append(f"\n{'':8}-> {one.fix}")
    out.print(line, soft_wrap=True)
