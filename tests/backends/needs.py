"""Owns what a test needs of this machine beyond what every install has, and why it is skipped without."""

from __future__ import annotations

import ctypes
from importlib import metadata
from importlib.util import find_spec

import pytest


def mooncake_missing() -> str:
    """Why mooncake's library cannot be loaded here; empty if it can. The library itself is not loaded."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "mooncake needs libibverbs.so.1 (Debian package libibverbs1), and this machine lacks it"
    return ""


def nvlink_missing() -> str:
    """Why mooncake cannot move device memory over NVLink here; empty if it can."""
    names = {str(one.metadata["Name"]).lower() for one in metadata.distributions()}
    builds = {name for name in names if name.startswith("mooncake-transfer-engine")}
    if not builds - {"mooncake-transfer-engine-non-cuda"}:
        return f"mooncake over nvlink needs a build for CUDA; installed: {', '.join(sorted(builds)) or 'none'}"
    return mooncake_missing()


def nixl_missing() -> str:
    """Why there is no nixl here; empty if there is one."""
    if any(find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        return ""
    return "nixl is not installed"


needs_mooncake = pytest.mark.skipif(bool(mooncake_missing()), reason=mooncake_missing())
