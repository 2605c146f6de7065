"""Whole links over every transport, direct and staged: pages that their owner writes anew are nobody's success."""

from __future__ import annotations

import pytest

from tests.link.backend_runs import TEST_LIMIT_S, over_each, run_case

pytestmark = pytest.mark.timeout(TEST_LIMIT_S)


@pytest.mark.parametrize(("transport", "way", "how"), over_each(["withdraw", "abort", "expire", "overwrite"], 2))
def test_pages_taken_back_and_reused_under_a_reader_never_make_a_success(transport: str, way: str, how: str) -> None:
    run_case("reuse", transport, way, how=how)
