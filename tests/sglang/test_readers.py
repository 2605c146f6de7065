"""Several decode ranks of one request, and a draft model that only the last prefill rank sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sglang.nursery import Nursery
from tests.sglang.rig import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Rig
from tests.sglang.talk import ask_all

SOURCE, TARGET = [1, 2, 3], [6, 1, 8]


@pytest.fixture(scope="module")
def rig(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    environ = {"DRAFT_LAYERS": "1"}
    made = Rig(nursery, tmp_path_factory.mktemp("ranks"), 2, 5, environ=environ, num_decode=2)
    try:
        told = made.start("ipc")
        # The draft's layer follows the model's, on the rank that has the last of them.
        assert [one["layer_ids"] for one in told] == [[0, 1, 2], [3, 4, 5]]
        yield made
    finally:
        made.close()


def begun(rig: Rig) -> int:
    """A request of which decode rank 0 alone has asked for pages."""
    room = rig.room()
    ask_all(rig.prefill, "fill", seed=room)
    ask_all(rig.decodes, "blank")
    rig.open(room)
    rig.decodes[0].do("receive", room=room, pages=TARGET, aux=5)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[WAITING], timeout_s=1.0)) == {BOOTSTRAPPING}
    return room


def test_prefill_waits_for_every_decode_rank_and_each_gets_every_layer(rig: Rig) -> None:
    room = begun(rig)
    # The ranks of one decode server have pages of their own.
    others = [2, 7, 4]
    rig.decodes[1].do("receive", room=room, pages=others, aux=3)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[WAITING])) == {WAITING}
    ask_all(rig.prefill, "begin", room=room, num_pages=3, aux_index=2)
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[:2], last=False)
    assert set(ask_all(rig.prefill, "poll", room=room)) == {TRANSFERRING}
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[2:], last=True, index_pages=SOURCE, aux=2)
    assert {seen[-1] for seen in ask_all(rig.decodes, "poll_until_final", room=room)} == {SUCCESS}
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[SUCCESS])) == {SUCCESS}
    for decode, target, aux in zip(rig.decodes, (TARGET, others), (5, 3), strict=True):
        assert decode.do("differences", seed=room, source=SOURCE, target=target) == []
        assert decode.do("aux", index=aux) == {"room": room, "token": 4242 + room}


def test_one_decode_rank_that_gives_up_fails_the_other_and_prefill(rig: Rig) -> None:
    room = begun(rig)
    rig.decodes[1].do("abort", room=room)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}
    assert rig.decodes[0].do("poll_until_final", room=room)[-1] == FAILED
    assert "Aborted by AbortReq" in rig.decodes[0].do("explain", room=room)
