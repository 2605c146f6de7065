"""Owns how commands get their settings: the options that all of them share, and the log that follows from them.

A secret is no option: every user of a machine can read the options of its processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from pdlink.config import Loaded, Settings

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="YAML file of settings, under PDLINK_* and options."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, above PDLINK_* and the file; repeatable."),
]
SECRETS = ("token",)


def load(config: str | None, assigned: Sequence[str] | None, **flags: object) -> Settings:
    """The settings of one command, of its options `flags` too. The log follows them from now on."""
    return trace(config, assigned, **flags).settings


def trace(config: str | None, assigned: Sequence[str] | None, **flags: object) -> Loaded:
    """Like `load`, and where each value came from."""
    from pdlink.config import trace_settings
    from pdlink.observability.logs import set_up

    given = {name: value for name, value in flags.items() if value is not None}
    values, problems = _parse(assigned or ())
    try:
        loaded = trace_settings(None, file=config, **{**values, **given})
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from error
    if problems:
        raise ConfigError(*problems)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    set_up(loaded.settings.log, loaded.settings.log_format)
    return loaded


def _parse(assigned: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """The settings of `--set`, and what is wrong with the others."""
    from pdlink.config import Settings, nearest

    values: dict[str, object] = {}
    problems = []
    for text in assigned:
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"--set takes NAME=VALUE, and {name!r} has no value")
        elif name not in Settings.model_fields:
            problems.append(f"--set {name}: unknown setting{nearest(name, Settings.model_fields)}")
        elif name in SECRETS:
            problems.append(f"--set {name}: every user of this machine could read it there; set {name}_file")
        else:
            values[name] = value
    return values, problems
