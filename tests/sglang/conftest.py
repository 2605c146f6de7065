"""Owns what the tests against the real sglang share: the process that has it imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sglang.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
