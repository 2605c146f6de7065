"""Requests through sglang's real classes, from layer-split prefill ranks to decode, byte for byte."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.sglang.nursery import Nursery
from tests.sglang.rig import SUCCESS, TRANSFERRING, WAITING, Rig
from tests.sglang.talk import ask_all

SOURCE, TARGET = [1, 2, 3, 7, 5], [6, 1, 8, 2, 4]
PAGE_SIZE = 64
TRANSPORTS = ["nixl", "mooncake", "ipc"]
# CP size, layers: with three ranks one owns nothing.
SHAPES = [(1, 5), (2, 5), (3, 2)]


PLACES = [(*shape, transport) for shape in SHAPES for transport in TRANSPORTS]
# Every rank has the cache of every layer, as without layer split.
WHOLE = (2, 3, "whole-ipc")


@pytest.fixture(scope="module")
def deployments() -> Iterator[dict[tuple[int, int], Rig]]:
    """At most one deployment lives at a time: each is several processes that have sglang loaded."""
    live: dict[tuple[int, int], Rig] = {}
    yield live
    for rig in live.values():
        rig.close()


@pytest.fixture(scope="module", params=[*PLACES, WHOLE], ids=lambda one: f"cp{one[0]}-layers{one[1]}-{one[2]}")
def rig(
    request: pytest.FixtureRequest,
    deployments: dict[tuple[int, int], Rig],
    tmp_path_factory: pytest.TempPathFactory,
    nursery: Nursery,
) -> Rig:
    *shape, transport = request.param
    environ = {}
    if transport.startswith("whole-"):
        transport, environ = transport.removeprefix("whole-"), {"WHOLE_CACHE": "1"}
    if transport == "mooncake" and not has_ibverbs():
        pytest.skip("the mooncake library needs libibverbs.so.1")
    if tuple(shape) not in deployments:
        while deployments:
            deployments.popitem()[1].close()
        deployments[tuple(shape)] = Rig(nursery, tmp_path_factory.mktemp("ranks"), *shape, environ=environ)
    rig = deployments[tuple(shape)]
    rig.start(transport)
    return rig


def has_ibverbs() -> bool:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def request_of(
    rig: Rig, source: list[int], target: list[int], prefix_pages: int, chunks: list[list[int]], seed: int
) -> int:
    """One request, sent in `chunks` of page ids, the last of which may be empty; returns its room after the checks."""
    room, aux = rig.room(), 3
    ask_all(rig.prefill, "fill", seed=seed)
    rig.decode.do("blank")
    rig.open(room)
    rig.decode.do("receive", room=room, pages=target, aux=5, prefix_tokens=prefix_pages * PAGE_SIZE)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[WAITING])) == {WAITING}
    assert set(ask_all(rig.prefill, "begin", room=room, num_pages=len(source), aux_index=aux)) == {
        prefix_pages * PAGE_SIZE
    }
    for number, pages in enumerate(chunks):
        last = number == len(chunks) - 1
        ask_all(rig.prefill, "send", room=room, pages=pages, last=last, index_pages=source, aux=aux)
    seen = rig.decode.do("poll_until_final", room=room)
    assert seen[-1] == SUCCESS, rig.decode.do("explain", room=room)
    assert set(seen) <= {WAITING, TRANSFERRING, SUCCESS}
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[SUCCESS])) == {SUCCESS}
    assert rig.decode.do("differences", seed=seed, source=source, target=target) == []
    assert rig.decode.do("aux", index=5) == {"room": room, "token": 4242 + room}
    ask_all(rig.prefill, "forget", room=room)
    rig.decode.do("forget", room=room)
    return room


def test_a_prompt_in_chunks_arrives_to_the_byte(rig: Rig) -> None:
    request_of(rig, SOURCE, TARGET, 0, [SOURCE[:2], SOURCE[2:4], SOURCE[4:]], seed=1)


def test_the_prefix_that_decode_has_is_not_moved(rig: Rig) -> None:
    request_of(rig, SOURCE, TARGET, 2, [SOURCE[:3], SOURCE[3:]], seed=2)


def test_an_empty_last_chunk_ends_the_request(rig: Rig) -> None:
    request_of(rig, SOURCE, TARGET, 1, [SOURCE[:4], SOURCE[4:], []], seed=3)


def test_a_prompt_that_decode_has_whole_moves_its_metadata_alone(rig: Rig) -> None:
    request_of(rig, [], [], 3, [[]], seed=4)


def test_a_room_can_be_used_again(rig: Rig) -> None:
    room = request_of(rig, SOURCE[:1], TARGET[:1], 0, [SOURCE[:1]], seed=5)
    rig.rooms = room - 1
    assert request_of(rig, SOURCE, TARGET, 0, [SOURCE], seed=6) == room
