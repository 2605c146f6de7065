"""Owns how a command tells at once everything that is wrong with its options. What is wrong, the command says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from pdlink.cli.exits import bad_value
from pdlink.errors import InvalidInput

UNREAD = "pdlink.unread"
T = TypeVar("T")
Fault = tuple[str, tuple[str, ...]]
"""What is wrong, and the parameters of the command that it depends on."""


class EveryOption(TyperCommand):
    """A command that is called although some of its options cannot be read; these have their defaults then.

    It makes `Faults` of its context, and calls `end` on them before it does anything.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except typer.BadParameter:
            given, extra, _ = self.make_parser(ctx).parse_args(args=list(args))
        unread = {"": f"unexpected argument {' '.join(extra)!r}; leave it out"} if extra else {}
        for parameter in self.get_params(ctx):
            try:
                parameter.handle_parse_result(ctx, given, [])
            except typer.BadParameter as error:
                name = str(parameter.name)
                ctx.params[name] = parameter.default
                unread[name] = f"{bad_value(error, args)}; see '{ctx.command_path} --help'"
        ctx.meta[UNREAD] = unread
        ctx.args = []
        return []


class Faults:
    """What was found wrong with one command line so far. What depends on an option that cannot be read is not looked
    at."""

    def __init__(self, context: typer.Context) -> None:
        unread: dict[str, str] = context.meta.get(UNREAD, {})
        self._unread = frozenset(unread)
        self._problems = list(unread.values())

    def add(self, faults: Iterable[Fault]) -> None:
        self._problems += [text for text, parameters in faults if self._unread.isdisjoint(parameters)]

    def attempt(self, make: Callable[[], T], *parameters: str) -> T | None:
        """What `make` makes of these parameters; None where it raises `InvalidInput`, which is kept."""
        if not self._unread.isdisjoint(parameters):
            return None
        try:
            return make()
        except InvalidInput as error:
            self._problems += error.problems
        return None

    def end(self) -> None:
        """Raise `InvalidInput` with all of them, if there are any."""
        if self._problems:
            raise InvalidInput(*self._problems)
