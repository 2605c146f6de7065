"""What one request on one prefill rank publishes: in which order, at which positions, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlink.control.frames import Ready
from pdlink.errors import InvalidInput, StateError
from pdlink.transfer.states import SenderState
from tests.prefill.rig import (
    NUM_PAGES,
    Rig,
    facts,
    generations,
    published,
)


def test_pages_follow_each_other_and_the_last_carries_the_aux(rig: Rig) -> None:
    rig.subscribe(1)
    rig.sender.publish([3, 1])
    rig.sender.publish([2], last=True, aux=b"tok")
    first, last = rig.take(Ready)
    assert (first.sequence, first.start_page, first.page_ids.tolist(), first.last, first.aux) == (
        0,
        0,
        [3, 1],
        False,
        None,
    )
    assert (last.sequence, last.start_page, last.page_ids.tolist(), last.last, last.aux) == (1, 2, [2], True, b"tok")
    assert first.layers == {"latent": (0, 1), "index_k": (0, 1)}


def test_a_reader_that_comes_late_is_sent_everything(rig: Rig) -> None:
    rig.sender.publish([3, 1])
    rig.sender.publish([2], last=True)
    rig.subscribe(1)
    assert [one.sequence for one in rig.take(Ready)] == [0, 1]


def test_a_repeated_subscribe_fills_the_gap_it_names(rig: Rig) -> None:
    published(rig)
    rig.subscribe(1, next_sequence=1)
    assert [one.sequence for one in rig.take(Ready)] == [1]


def test_a_subscribe_from_beyond_the_end_hides_nothing_that_is_published_later(rig: Rig) -> None:
    rig.subscribe(1, next_sequence=1000)
    rig.sender.publish([3])
    assert [one.sequence for one in rig.take(Ready)] == [0]


def test_a_rank_that_is_not_elected_keeps_its_aux() -> None:
    rig = Rig(facts(is_aux_owner=False))
    rig.subscribe(1)
    rig.sender.publish([3], last=True, aux=b"tok")
    (last,) = rig.take(Ready)
    assert (last.last, last.aux) == (True, None)


def test_a_rank_that_owns_nothing_publishes_its_end(rig: Rig) -> None:
    rig = Rig(facts({}, is_aux_owner=False))
    rig.subscribe(1)
    rig.sender.publish([3, 4], last=True)
    (last,) = rig.take(Ready)
    assert (last.last, dict(last.layers)) == (True, {})
    assert rig.release(1, generations([last])).unchanged
    assert rig.sender.poll() is SenderState.RELEASED


@pytest.mark.parametrize("start_page", [-1, 1 << 31, 1 << 40])
def test_a_page_position_that_no_frame_can_carry_is_refused_before_anything_is_recorded(
    rig: Rig, start_page: int
) -> None:
    rig.subscribe(1)
    with pytest.raises(InvalidInput, match="page positions"):
        rig.sender.publish([3], start_page=start_page)
    rig.sender.publish([3])
    assert [one.start_page for one in rig.take(Ready)] == [0]


@pytest.mark.parametrize("page", [-1, NUM_PAGES])
@pytest.mark.parametrize("owned", [{"latent": (0,)}, {}], ids=["owner", "owns-nothing"])
def test_a_page_outside_the_pool_is_refused(page: int, owned: dict[str, tuple[int, ...]]) -> None:
    rig = Rig(facts(owned))
    if page >= 0 and not owned:
        page = 1 << 31
    with pytest.raises(InvalidInput, match="publishes pages"):
        rig.sender.publish([page])
    assert rig.sender.poll() is SenderState.OPEN


def test_a_layer_of_another_rank_is_refused_by_name(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match=r"'latent' layers \[2\].*owns \[0, 1\]"):
        rig.sender.publish([1], layers={"latent": [1, 2]})


def test_a_layer_named_twice_is_published_once(rig: Rig) -> None:
    rig.subscribe(1)
    rig.sender.publish([1], layers={"latent": [1, 0, 1]})
    assert [dict(one.layers) for one in rig.take(Ready)] == [{"latent": (0, 1)}]


def test_many_pages_are_cut_into_frames_that_end_once() -> None:
    many = list(range(9000 * NUM_PAGES))
    large = {cell: replace(region, num_pages=len(many)) for cell, region in facts().regions.items()}
    rig = Rig(replace(facts(), regions=large))
    rig.subscribe(1)
    rig.sender.publish(many, last=True, aux=b"tok")
    frames = rig.take(Ready)
    assert len(frames) == 3
    assert [one.sequence for one in frames] == [0, 1, 2]
    assert [one.start_page for one in frames] == [0, 65536, 131072]
    assert [page for one in frames for page in one.page_ids.tolist()] == many
    assert [(one.last, one.aux) for one in frames] == [(False, None), (False, None), (True, b"tok")]


def test_a_page_is_published_once(rig: Rig) -> None:
    rig.sender.publish([1, 2], layers={"latent": [0]}, start_page=0)
    rig.sender.publish([1, 2], layers={"latent": [1]}, start_page=0)
    with pytest.raises(StateError, match=r"'latent' layer 0: pages \[1, 2\)"):
        rig.sender.publish([5], layers={"latent": [0]}, start_page=1)


@pytest.mark.parametrize(
    ("before", "pages", "start", "said"),
    [
        ([], [3, 9, 3], 0, "page 3 of group 'kv' is given for two positions"),
        ([3, 9], [4, 3], 2, "page 3 of group 'kv' holds position 0 .* given for position 3"),
        ([3, 9], [9], 2, "page 9 of group 'kv' holds position 1 .* given for position 2"),
    ],
)
def test_a_page_holds_one_position_of_a_request(
    rig: Rig, before: list[int], pages: list[int], start: int, said: str
) -> None:
    rig.sender.publish(before)
    with pytest.raises(StateError, match=said):
        rig.sender.publish(pages, start_page=start)
    rig.sender.publish([5, 6], start_page=len(before))  # nothing was recorded of what was refused


def test_layers_of_one_position_are_published_one_after_the_other_from_the_same_page(rig: Rig) -> None:
    rig.sender.publish([3, 9], layers={"latent": [0]})
    rig.sender.publish([3, 9], start_page=0, layers={"latent": [1], "index_k": [0, 1]})
    with pytest.raises(StateError, match="published already"):
        rig.sender.publish([3], start_page=0, layers={"latent": [1]})


def test_nothing_is_published_after_the_last(rig: Rig) -> None:
    rig.sender.publish([1], last=True)
    with pytest.raises(StateError, match="to its end"):
        rig.sender.publish([2])


def test_aux_that_is_early_or_too_long_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match="last publish"):
        rig.sender.publish([1], aux=b"x")
    with pytest.raises(InvalidInput, match="over the limit"):
        rig.sender.publish([1], last=True, aux=bytes((64 << 10) + 1))
