"""Requests that end badly do so on both sides, through sglang's own interface, with a reason, and free their pages."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.nursery import Nursery
from tests.sglang.rig import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Rig
from tests.sglang.talk import ask_all

SOURCE, TARGET = [1, 2, 3], [6, 1, 8]


@pytest.fixture(scope="module")
def deployment(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(nursery, tmp_path_factory.mktemp("ranks"), 2, 5)
    yield rig
    rig.close()


@pytest.fixture
def rig(deployment: Rig) -> Rig:
    deployment.start("ipc")
    return deployment


def wanted(rig: Rig) -> int:
    """A request that decode has asked for and of which nothing is sent yet."""
    room = rig.room()
    ask_all(rig.prefill, "fill", seed=room)
    rig.decode.do("blank")
    rig.open(room)
    rig.decode.do("receive", room=room, pages=TARGET, aux=5)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[WAITING])) == {WAITING}
    ask_all(rig.prefill, "begin", room=room, num_pages=len(SOURCE), aux_index=2)
    return room


def test_prefill_waits_until_decode_has_asked(rig: Rig) -> None:
    room = rig.room()
    rig.open(room)
    assert set(ask_all(rig.prefill, "poll", room=room)) == {BOOTSTRAPPING}
    rig.decode.do("receive", room=room, pages=TARGET, aux=5)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[WAITING])) == {WAITING}


def test_decode_does_not_wait_for_a_server_that_never_answers(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert rig.decode.do("ensure", bootstrap_port=port, num_attempts=1) is False
        asked, _ = silent.accept()
        with asked:
            # It has asked, goes on waiting somewhere, and the scheduler's thread is back.
            assert asked.recv(4096).startswith(b"GET /pdlink ")
            asked.setblocking(False)
            with pytest.raises(BlockingIOError):
                asked.recv(1)


def test_a_prefill_server_that_is_not_there_is_the_reason_of_the_failure(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert rig.decode.do("ensure", bootstrap_port=port, num_attempts=10) is False
    room = rig.room()
    # sglang gives up on a server by an abort of what waits for it.
    assert rig.decode.do("abort_before_known", room=room, bootstrap_port=port) == FAILED
    text = rig.decode.do("explain", room=room)
    assert f"prefill server 127.0.0.1:{port} does not answer" in text
    assert "check bootstrap_host and bootstrap_port" in text


def test_a_bootstrap_port_that_is_taken_ends_the_server_and_names_the_option(rig: Rig) -> None:
    text = rig.prefill[0].do("serve_bootstrap_again")
    assert text.startswith("error: pdlink cannot serve this sglang: bootstrap cannot listen at 127.0.0.1:")
    assert "choose another --disaggregation-bootstrap-port" in text


def test_dp_rank_questions_have_threads_that_nothing_else_runs_on(rig: Rig) -> None:
    # Threads that ask prefill servers are all taken; the answer still comes.
    assert rig.decode.do("dp_query_beside_blocked_asks", timeout_s=20.0) is True


def test_kv_is_not_read_before_the_event_that_guards_it(rig: Rig) -> None:
    room = wanted(rig)
    seed = 77
    # Each rank sends pages that hold nothing yet, and writes them once its event was asked for.
    assert ask_all(rig.prefill, "send_after", room=room, pages=SOURCE[:2], seed=seed) == [True, True]
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[2:], last=True, index_pages=SOURCE, aux=2)
    assert rig.decode.do("poll_until_final", room=room)[-1] == SUCCESS
    assert rig.decode.do("differences", seed=seed, source=SOURCE, target=TARGET) == []


def test_an_abort_on_decode_fails_prefill_with_the_reason(rig: Rig) -> None:
    room = wanted(rig)
    rig.decode.do("abort", room=room)
    assert rig.decode.do("poll_until_final", room=room)[-1] == FAILED
    assert "Aborted by AbortReq" in rig.decode.do("explain", room=room)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}
    assert all("Aborted by AbortReq" in text for text in ask_all(rig.prefill, "explain", room=room))


def test_an_abort_on_decode_before_it_has_pages_fails_prefill_too(rig: Rig) -> None:
    room = rig.room()
    rig.open(room)
    rig.decode.do("abort", room=room)
    assert rig.decode.do("poll", room=room) == FAILED
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}


def test_an_abort_on_one_prefill_rank_fails_every_rank_and_decode(rig: Rig) -> None:
    room = wanted(rig)
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[:1], last=False)
    rig.prefill[1].do("abort", room=room)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}
    assert rig.decode.do("poll_until_final", room=room)[-1] == FAILED
    # Only now, because asking ends the request on this rank too.
    assert rig.prefill[0].do("explain", room=room)
    text = rig.decode.do("explain", room=room)
    assert "aborted by the prefill server" in text
    assert "cp1" in text


def test_pages_are_held_until_nothing_can_land_when_a_sibling_rank_failed(rig: Rig) -> None:
    room = wanted(rig)
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[:1], last=False)
    assert "(another rank)" in rig.decode.do("let_another_rank_fail", room=room)
    assert rig.decode.do("quiet_within", room=room, timeout_s=20.0)
    assert rig.decode.do("poll", room=room) == FAILED
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}


def test_a_prompt_that_was_not_sent_whole_fails_and_names_the_page(rig: Rig) -> None:
    room = wanted(rig)
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[:2], last=True, index_pages=SOURCE, aux=2)
    seen = rig.decode.do("poll_until_final", room=room)
    assert seen[-1] == FAILED
    assert "page 2" in rig.decode.do("explain", room=room)


def test_a_request_that_decode_never_asks_for_fails_in_time(rig: Rig) -> None:
    ask_all(rig.prefill, "start", transports="ipc", environ={"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "1"})
    room = rig.room()
    ask_all(rig.prefill, "open", room=room)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}
    texts = ask_all(rig.prefill, "explain", room=room)
    assert any("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in text for text in texts)
    ask_all(rig.prefill, "start", transports="ipc", environ={"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "300"})


def test_a_room_that_is_in_use_is_refused_by_name(rig: Rig) -> None:
    room = wanted(rig)
    rig.prefill[0].do("open", room=room)
    assert rig.prefill[0].do("poll", room=room) == FAILED
    assert "id of its own" in rig.prefill[0].do("explain", room=room)


def test_a_page_that_the_pool_lacks_fails_the_request_and_not_the_scheduler(rig: Rig) -> None:
    room = rig.room()
    rig.open(room)
    rig.decode.do("receive", room=room, pages=[1, 999], aux=5)
    assert rig.decode.do("poll", room=room) == FAILED
    assert "999" in rig.decode.do("explain", room=room)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}


def test_metadata_of_another_size_fails_the_request_by_name(rig: Rig) -> None:
    rig.decode.do("start", transports="ipc", hidden_size=32)
    room = wanted(rig)
    ask_all(rig.prefill, "send", room=room, pages=SOURCE, last=True, index_pages=SOURCE, aux=2)
    assert rig.decode.do("poll_until_final", room=room)[-1] == FAILED
    assert "bytes of metadata" in rig.decode.do("explain", room=room)


def test_another_cache_format_fails_both_sides_with_both_values(rig: Rig) -> None:
    rig.decode.do("start", transports="ipc", cache_dtype="fp8_e4m3")
    check_mismatch(rig, "latent.dtype is bfloat16 on prefill and fp8_e4m3 on decode")


def test_another_page_size_fails_both_sides_with_both_values(nursery: Nursery, tmp_path: Path) -> None:
    sizes = {"prefill_environ": {"MLA_PAGE_SIZE": "64"}, "decode_environ": {"MLA_PAGE_SIZE": "32"}}
    rig = Rig(nursery, tmp_path, 1, 2, **sizes)
    try:
        rig.start("ipc")
        check_mismatch(rig, "latent.page_size is 64 on prefill and 32 on decode; start both servers with the same page")
    finally:
        rig.close()


def check_mismatch(rig: Rig, words: str) -> None:
    room = rig.room()
    rig.open(room)
    rig.decode.do("receive", room=room, pages=TARGET, aux=5)
    assert rig.decode.do("poll_until_final", room=room)[-1] == FAILED
    assert words in rig.decode.do("explain", room=room)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}
    texts = ask_all(rig.prefill, "explain", room=room)
    # A rank that saw another one fail first has no reason of its own (yet).
    assert any(words in text for text in texts)
    assert all(words in text or "(another rank)" in text for text in texts)


def test_decode_can_ask_which_dp_rank_has_a_room(rig: Rig) -> None:
    room = rig.room()
    prefill = rig.prefill[0]
    prefill.do("open_with_dp_ranks", room=room, num_dp_ranks=2, method="round_robin")
    assert prefill.do("poll", room=room) == BOOTSTRAPPING
    give_up = time.monotonic() + 30
    while not (told := rig.decode.do("dp_ranks", rooms=[room, room + 1], bootstrap_port=rig.port)):
        assert time.monotonic() < give_up
    assert told == {str(room): 0}


def test_a_room_on_a_dp_rank_that_decode_would_not_expect_is_refused_by_name(rig: Rig) -> None:
    rig.rooms += rig.rooms % 2  # the next one is odd, which means DP rank 1 of 2
    room = rig.room()
    rig.prefill[0].do("open_with_dp_ranks", room=room, num_dp_ranks=2, method="follow_bootstrap_room")
    assert rig.prefill[0].do("poll", room=room) == FAILED
    assert "runs on DP rank 0, and follow_bootstrap_room means 1" in rig.prefill[0].do("explain", room=room)


def test_success_frees_the_pages_of_prefill_only_after_decode_has_them(rig: Rig) -> None:
    room = wanted(rig)
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[:2], last=False)
    assert set(ask_all(rig.prefill, "poll", room=room)) == {TRANSFERRING}
    ask_all(rig.prefill, "send", room=room, pages=SOURCE[2:], last=True, index_pages=SOURCE, aux=2)
    assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[SUCCESS])) == {SUCCESS}
    assert rig.decode.do("poll_until_final", room=room)[-1] == SUCCESS
    assert rig.decode.do("differences", seed=room, source=SOURCE, target=TARGET) == []


def test_memory_that_sglang_takes_back_and_returns_is_served_again(rig: Rig) -> None:
    ask_all(rig.prefill, "give_memory_back")
    room = wanted(rig)
    ask_all(rig.prefill, "send", room=room, pages=SOURCE, last=True, index_pages=SOURCE, aux=2)
    assert rig.decode.do("poll_until_final", room=room)[-1] == SUCCESS
    assert rig.decode.do("differences", seed=room, source=SOURCE, target=TARGET) == []


def test_a_killed_decode_rank_gives_prefill_its_pages_back(nursery: Nursery, tmp_path: Path) -> None:
    """Long before the lease: it is not heard any more."""
    rig = Rig(nursery, tmp_path, 2, 5)
    try:
        rig.start("ipc")
        room = wanted(rig)
        ask_all(rig.prefill, "send", room=room, pages=SOURCE[:1], last=False)
        rig.decode.kill()
        assert set(ask_all(rig.prefill, "poll_all_until", room=room, states=[FAILED])) == {FAILED}
        texts = ask_all(rig.prefill, "explain", room=room)
        assert any("has not been heard" in text for text in texts)
    finally:
        rig.close()


def test_a_killed_prefill_rank_fails_the_request_and_is_named(nursery: Nursery, tmp_path: Path) -> None:
    rig = Rig(nursery, tmp_path, 2, 5)
    try:
        rig.start("ipc")
        room = wanted(rig)
        ask_all(rig.prefill, "send", room=room, pages=SOURCE[:1], last=False)
        rig.prefill[1].kill()
        assert rig.decode.do("poll_until_final", room=room)[-1] == FAILED
        assert "cp1" in rig.decode.do("explain", room=room)
        # The rank that is left is told too: its pages are free again.
        assert rig.prefill[0].do("poll_alone_until", room=room, states=[FAILED]) == FAILED
    finally:
        rig.close()
