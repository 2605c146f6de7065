"""Owns how a YAML file of settings is read: one flat mapping of names to text. What the names mean is `config`'s.

Every value is taken as the text that stands there, as in the environment, so that `on` stays `on` and `0x10` is not 16
in one place and refused in the other.
"""

from __future__ import annotations

import difflib
import logging
import os
import stat
from collections.abc import Collection
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    import yaml

log = logging.getLogger("pdlink.config")
MAX_BYTES = 1 << 20


def read_config_file(
    path: str, known: Collection[str], secrets: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The settings of the file at `path`, and what is wrong with its lines; an empty file has neither. One of `secrets`
    in a file that others may read is a warning.

    Wrong are a name that is not among `known` (the nearest one is told), one that stands there twice, and one with
    several values. Raises `ConfigError` for a file that cannot be read or is no such mapping. The text of a value is in
    no error: it may be a secret.
    """
    import yaml  # most processes read no file

    node = _parse(path, _read(path))
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):  # `---` alone is an empty document
        return {}, []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: line {_line(node)}: settings are lines of `name: value`, and nothing else")
    found: dict[str, str] = {}
    problems = []
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"; did you mean {near[0]}?" if near else "; `pdlink config show` lists those that there are"
            problems.append(f"{path}: line {_line(key)}: unknown setting {name!r}{advice}")
        elif name in found:
            problems.append(f"{path}: line {_line(key)}: {name} stands there twice; keep one of them")
        elif not isinstance(value, yaml.ScalarNode):
            problems.append(f"{path}: line {_line(value)}: {name} takes one value, not several")
        else:
            found[name] = value.value
    for name in secrets:
        if name in found and os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("%s holds %s, and others may read that file; chmod 600 it", path, name)
    return found, problems


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the settings in {path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes, and is no file of settings")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8, at byte {error.start}") from error


def _parse(path: str, text: str) -> yaml.Node | None:
    import yaml

    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:  # its own text quotes the file, and a secret may stand there
        where = f": line {error.problem_mark.line + 1}" if error.problem_mark else ""
        fix = "write lines of `name: value`, and put values that begin with a sign into quotes"
        raise ConfigError(f"{path}{where}: not YAML; {fix}") from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path}: not YAML, or not of a kind that settings are written in") from None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
