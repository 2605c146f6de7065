"""Owns `pdlink config show`: the effective settings and where each came from. Secrets are never shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pdlink.cli.settings import ConfigOption, SetOption, trace

if TYPE_CHECKING:
    from pdlink.config import Loaded

EXAMPLES = """\b
Examples:
  pdlink config show
  pdlink config show --config pdlink.yaml --set way=staged --json"""

config = typer.Typer(name="config", help="What is set, and where it was set.", rich_markup_mode=None)


@config.callback(invoke_without_command=True)
def _config(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@config.command("show", epilog=EXAMPLES)
def show(
    config: ConfigOption = None,
    assigned: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print every setting, its value, and where that came from: an option, the environment, the file or the default.

    Any setting can be given as PDLINK_NAME in the environment, or as `name: value` in the file.
    """
    from pdlink.cli.output import console, print_json, print_table

    rows = _rows(trace(config, assigned), changed)
    if as_json:
        print_json({name: {"value": value, "from": origin, "where": where} for name, value, origin, where in rows})
        return
    shown = [(name, "" if value is None else str(value), where or origin) for name, value, origin, where in rows]
    print_table(console(), ("setting", "value", "from"), shown, left=3)


def _rows(loaded: Loaded, changed: bool) -> list[tuple[str, object, str, str]]:
    """(name, value, origin, where) of each setting; the value of a secret is hidden."""
    from pydantic import SecretStr

    from pdlink.config import Origin
    from pdlink.secret import HIDDEN

    rows = []
    for name, source in loaded.sources.items():
        value = getattr(loaded.settings, name)
        if changed and source.origin is Origin.DEFAULT:
            continue
        rows.append((name, HIDDEN if isinstance(value, SecretStr) else value, source.origin.value, source.where))
    return rows
