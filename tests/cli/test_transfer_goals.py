"""The goals of `pdlink bench transfer`: each case that is measured for them has one, and ratios decide."""

from __future__ import annotations

from typing import Any

import pytest

from pdlink.cli.transfer_case import Case
from pdlink.cli.transfer_goals import as_text, cases, goals_of, judged
from pdlink.cli.transfer_rig import Measured
from pdlink.cli.transfer_row import make_row

PULL = {"prep_s": 0.0, "post_s": 0.0, "pack_s": 0.0, "wire_s": 1.0, "unpack_s": 0.0, "request_s": 1.0}
PULL |= {"head_s": 0.0, "tail_s": 0.0}


def row_of(case: Case, took_s: float, **raw_s: float) -> dict[str, Any]:
    """The row of a case whose pulls took `took_s`, and whose library took `raw_s`."""
    pulls = [{**PULL, "took_s": took_s, "num_posted": 1, "num_descriptors": 1}]
    return make_row(case, Measured(pulls, {what: [one] for what, one in raw_s.items()}, {}))


def find(device: str, backend: str, way: str, scattered: bool = True) -> Case:
    return next(
        case
        for case in cases(device)
        if (case.backend, case.way, case.scattered) == (backend, way, scattered) and case.transport != "cma"
    )


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_every_case_that_is_measured_for_goals_has_one(device: str) -> None:
    for case in cases(device):
        row = row_of(case, 1.0, pages=1.0, one_post=1.0, layers=1.0, range=1.0)
        assert any(goal.at_least is not None for goal in goals_of(row)), case
        assert len(list(as_text(row))) == len(judged(row)) == len(list(goals_of(row)))


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_cases_of_one_link_come_together(device: str) -> None:
    links = [case.link for case in cases(device)]
    assert links == sorted(links, key=links.index)


def test_a_staged_pull_between_gpus_is_held_to_a_range_a_layer_and_to_the_direct_way() -> None:
    nixl = find("cuda", "nixl", "staged")
    row = row_of(nixl, 1.0, pages=20.0, one_post=41.0, layers=0.81, range=0.6)
    assert [(one["ratio"], one["reached"]) for one in judged(row)] == [
        ("of_raw_per_layer", True),
        ("of_raw_one_post", True),
        ("of_raw", None),
    ]
    assert not judged(row_of(nixl, 1.0, pages=20.0, one_post=39.0, layers=0.79, range=0.6))[1]["reached"]
    mooncake = find("cuda", "mooncake", "staged")
    said = judged(row_of(mooncake, 1.0, pages=20.5, layers=0.79, range=0.6))
    assert [(one["ratio"], one["reached"]) for one in said] == [("of_raw_per_layer", False), ("of_raw", True)]


def test_a_mapped_pull_between_gpus_is_held_to_a_plain_peer_copy() -> None:
    row = row_of(find("cuda", "ipc", "mapped"), 1.0, pages=30.0, layers=0.9, range=0.84)
    assert [(one["ratio"], one["reached"]) for one in judged(row)] == [("of_raw", True), ("of_raw_large_range", False)]


def test_a_loopback_pull_is_held_to_the_large_range() -> None:
    row = row_of(find("host", "mooncake", "direct"), 1.0, pages=0.96, layers=0.8, range=0.74)
    assert [(one["ratio"], one["reached"]) for one in judged(row)] == [("of_raw", True), ("of_raw_large_range", False)]
    lines = list(as_text(row))
    assert [line[1:] for line in lines] == [("96%", "95%", "yes"), ("74%", "75%", "no")]


def test_a_row_of_another_shape_is_held_to_the_same_ranges_only() -> None:
    case = Case("nixl", "nvlink", "staged", 41_984, 128, 39, True, "cuda")
    assert judged(row_of(case, 1.0, pages=20.0, one_post=41.0, layers=0.81, range=0.6)) == []
