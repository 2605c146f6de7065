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
    loaded = trace_settings(None, file=config, **{**_parse(assigned or ()), **given})
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    set_up(loaded.settings.log, loaded.settings.log_format)
    return loaded


def _parse(assigned: Sequence[str]) -> dict[str, object]:
    from pdlink.config import Settings, nearest

    values: dict[str, object] = {}
    for text in assigned:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, and {name!r} has no value")
        if name not in Settings.model_fields:
            raise ConfigError(f"--set {name}: unknown setting{nearest(name, Settings.model_fields)}")
        if name in SECRETS:
            raise ConfigError(f"--set {name}: every user of this machine could read it there; set {name}_file")
        values[name] = value
    return values
