"""Owns the one request that most prefill tests drive by hand."""

from __future__ import annotations

import pytest

from tests.prefill.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
