"""A test's own time limit may be longer than that of all tests, and is never shorter."""

from __future__ import annotations

import pytest


@pytest.mark.timeout(1)
def test_a_shorter_limit_is_lengthened(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("timeout").args == (float(request.config.getini("timeout")),)


@pytest.mark.timeout(5000)
def test_a_longer_limit_stays(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("timeout").args == (5000,)
