"""Owners stage the first pieces unasked for readers of parts of pages too, and these come out as if they had been asked
for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from pdlink.control.frames import Ready
from pdlink.layout import DecodePlan, DecodeSizes, LayerPlan, ParallelSizes
from pdlink.prefill.publication import Parts, Publication
from tests.topology.quiet import Here
from tests.topology.site import SPARE_PAGES, Site
from tests.topology.strategies import Ask, Topology
from tests.topology.test_every_count import gqa, mla

LAYERS = 4


def by_heads() -> Topology:
    source, destination = gqa(LAYERS, 1), gqa(LAYERS, 2)
    plan = LayerPlan.balanced(source, ParallelSizes(cp=2))
    return Topology((source,), plan, (destination,) * 2, DecodePlan.balanced(destination, DecodeSizes(tp=2)))


def from_heads() -> Topology:
    source, destination = gqa(LAYERS, 3), gqa(LAYERS, 1)
    plan = LayerPlan.balanced(source, ParallelSizes(tp=3))
    return Topology((source,) * 3, plan, (destination,), DecodePlan.balanced(destination, DecodeSizes()))


def by_tokens() -> Topology:
    layout = mla(LAYERS)
    decode = DecodePlan.balanced(layout, DecodeSizes(tp=2, dcp=2))
    return Topology((layout,), LayerPlan.balanced(layout, ParallelSizes()), (layout,) * 2, decode)


@pytest.mark.parametrize("make", [by_heads, from_heads, by_tokens])
@pytest.mark.parametrize("prefix", [0, 3])
def test_what_a_reader_takes_of_pages_is_staged_unasked(
    make: Callable[[], Topology], prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Parts, int]] = []
    ready = Publication.ready

    def note(publication: Publication, staged_pieces: int = 0, parts: Parts = ()) -> Ready:
        told.append((parts, staged_pieces))
        return ready(publication, staged_pieces, parts)

    monkeypatch.setattr(Publication, "ready", note)
    with contextlib.ExitStack() as stack:
        site = Site(stack, make(), 9 + SPARE_PAGES, Here, way="staged", verify_digests=True)
        site.link()
        for number in range(4):
            told.clear()
            site.finish([site.begin(f"t{number}", Ask(17, prefix, 0, 40 + number))])
            assert all(parts for parts, _ in told)
            if number == 0:
                assert not any(pieces for _, pieces in told)
        assert any(pieces for _, pieces in told)
