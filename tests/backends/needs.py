"""Owns what a test needs of this machine beyond Python packages, and why it is skipped without."""

from __future__ import annotations

import ctypes

import pytest


def mooncake_missing() -> str:
    """Why mooncake's library cannot be loaded here; empty if it can. The library itself is not loaded."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "mooncake needs libibverbs.so.1 (Debian package libibverbs1), and this machine lacks it"
    return ""


needs_mooncake = pytest.mark.skipif(bool(mooncake_missing()), reason=mooncake_missing())
