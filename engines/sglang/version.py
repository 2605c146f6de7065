"""Owns which versions of sglang the plug-in works with. It imports no sglang."""

from __future__ import annotations

import importlib.metadata
import re

from pdlink.errors import InvalidInput

SUPPORTED = "0.5.23"
"""This release and its post releases: the plug-in uses what sglang does not promise to keep."""
_MATCH = re.compile(re.escape(SUPPORTED) + r"(\.post\d+)?(\+.*)?")


def check_version(installed: str | None = None) -> None:
    """Raise `InvalidInput` unless the installed sglang (or `installed`) is one that the plug-in was made for."""
    version = importlib.metadata.version("sglang") if installed is None else installed
    if not _MATCH.fullmatch(version):
        raise InvalidInput(
            f"sglang {version} is installed and pdlink's plug-in was made for {SUPPORTED}; install "
            f"sglang=={SUPPORTED}, or a pdlink that names your version"
        )
