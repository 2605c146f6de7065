"""`pdlink bench plan`: what it reports, that its check bites, and that planning makes no object per page."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from pdlink.cli.bench_plan import (
    Form,
    Scene,
    build_planner,
    draw_pages,
    handshake_bytes,
    make_scene,
    plan_request,
)
from pdlink.cli.main import main

SMALL = ("--pages", "64", "--layers", "10", "--owners", "3")


@pytest.mark.parametrize("form", ["factored", "expanded"])
def test_it_reports_what_was_planned(capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert main(["bench", "plan", *SMALL, "--form", form, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (value["form"], value["num_pages"], value["num_layers"], value["num_owners"]) == (form, 64, 10, 3)
    assert value["num_cells"] == 64 * 20
    assert value["num_bytes"] == 64 * 10 * 64 * (1152 + 132)
    # A descriptor is a run of pages in one layer: at most one for each cell.
    assert 20 <= value["num_descriptors"] <= value["num_cells"]
    assert value["plan_ms"] > 0
    assert value["cold_ms"] > 0
    assert len(value["rounds_ms"]) == 7


def test_the_page_ids_are_scattered_and_differ_between_owners() -> None:
    scene = make_scene(4096, 2, 2)
    pages = draw_pages(scene, np.random.default_rng(0))
    for ids in (*pages.source, pages.destination):
        assert len(set(ids.tolist())) == 4096
        assert ids.max() > 4096
    assert not np.array_equal(*pages.source)
    batches = plan_request(build_planner(scene), pages, Form.FACTORED)
    # Neighbours on both sides are rare among random pages: hardly any run is longer than a page.
    assert sum(batch.num_descriptors for batch in batches) > 0.99 * 4096 * 4


@pytest.mark.parametrize("fault", ["hole", "duplicate"])
@pytest.mark.parametrize("size", [SMALL, ("--pages", "1", "--layers", "1", "--owners", "2")])
def test_an_injected_fault_fails_the_check_and_names_the_cell(
    capsys: pytest.CaptureFixture[str], fault: str, size: tuple[str, ...]
) -> None:
    assert main(["bench", "plan", *size, "--inject", fault, "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "layer" in captured.err
    assert "destination page" in captured.err
    assert ("no source" if fault == "hole" else "more than one source") in captured.err


def peak_objects(scene: Scene) -> int:
    """The most Python objects that planning one request holds at once, looked at in every call and return."""
    planner = build_planner(scene)
    pages = draw_pages(scene, np.random.default_rng(0))
    plan_request(planner, pages, Form.FACTORED)  # what is made once is no part of a request
    most = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal most
        most = max(most, sys.getallocatedblocks())

    before = sys.getallocatedblocks()
    sys.setprofile(look)
    try:
        batches = plan_request(planner, pages, Form.FACTORED)
    finally:
        sys.setprofile(None)
    assert sum(batch.nbytes for batch in batches)
    return most - before


def test_planning_makes_no_python_object_per_page() -> None:
    few, many = (peak_objects(make_scene(pages, 6, 2)) for pages in (256, 16_384))
    assert many - few < 200


def test_an_object_per_page_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlink.transfer import planner

    pair = planner.pair_pages
    monkeypatch.setattr(planner, "pair_pages", lambda a, b: (a.tolist(), "", pair(a, b))[2])
    few, many = (peak_objects(make_scene(pages, 6, 2)) for pages in (256, 16_384))
    assert many - few > 10_000


def test_the_handshake_does_not_grow_with_pages() -> None:
    sizes = [handshake_bytes(make_scene(pages, 78, 4)) for pages in (1 << 14, 1 << 20)]
    # Page counts are written in as many bytes as they need; nothing is said of single pages.
    assert sizes[1] - sizes[0] < 4 * 78
