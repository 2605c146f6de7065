"""The front's tries, the gathering of prefill ranks, and the shape of completions, as decisions without I/O."""

from __future__ import annotations

import pytest

from pdlink.errors import InvalidInput
from pdlink_engines.reference.serve.attempts import MOST_PAUSE_S, Attempts, TryFailed
from pdlink_engines.reference.serve.completions import Answer
from pdlink_engines.reference.serve.gang import FRESH_S, Gathering
from pdlink_engines.reference.serve.options import PrefillOptions


def test_a_try_is_made_again_until_the_patience_is_over() -> None:
    attempts, failed = Attempts(give_up_at=10.0), TryFailed("gone", may_retry=True)
    assert attempts.pause_s(failed, now=0.0) == pytest.approx(0.1)
    attempts.count = 50
    assert attempts.pause_s(failed, now=0.0) == MOST_PAUSE_S
    assert attempts.pause_s(failed, now=9.5) is None


def test_no_try_is_made_again_once_the_caller_has_seen_a_token() -> None:
    attempts = Attempts(give_up_at=10.0, has_shown=True)
    assert attempts.pause_s(TryFailed("gone", may_retry=True), now=0.0) is None


def test_a_request_that_is_wrong_is_not_tried_again() -> None:
    assert Attempts(give_up_at=10.0).pause_s(TryFailed("too long", may_retry=False), now=0.0) is None


def test_a_rank_counts_as_there_only_while_it_says_so() -> None:
    gathering = Gathering(3)
    gathering.hear(1, "a", b"r1", now=0.0)
    assert gathering.missing(now=0.0) == [2]
    gathering.hear(2, "b", b"r2", now=FRESH_S)
    assert gathering.missing(now=FRESH_S) == [1]
    gathering.hear(1, "a", b"r1", now=FRESH_S)
    assert gathering.missing(now=FRESH_S) == []
    assert gathering.names() == {"1": "a", "2": "b"}


@pytest.mark.parametrize("rank", [-1, 0, 3])
def test_a_rank_that_cannot_be_is_not_heard(rank: int) -> None:
    gathering = Gathering(3)
    gathering.hear(rank, "x", b"r", now=0.0)
    assert gathering.members == {}


def test_a_new_try_of_an_answer_forgets_the_old_one() -> None:
    answer = Answer("cmpl-1", "m")
    answer.restart("cmpl-1-0")
    answer.tokens, answer.num_tokens, answer.pulled_bytes, answer.text = [1, 2], 2, {"p/0": 5}, "ab"
    answer.restart("cmpl-1-1")
    whole = answer.whole()
    assert whole["choices"][0]["text"] == ""
    assert whole["pdlink"] == {
        "transfer_id": "cmpl-1-1",
        "tries": 2,
        "tokens": [],
        "pulled_bytes": {},
        "backends": [],
        "ways": [],
    }


def options(**changed: object) -> PrefillOptions:
    given = {"model": "glm-dsa-tiny", "instance": "p", "http": "127.0.0.1:1", "leader": "127.0.0.1:2", "cp": 2}
    return PrefillOptions.model_validate({**given, "bootstraps": ["127.0.0.1:3"], **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": 2}, "--rank 2 is not below --cp 2"),
        ({"bootstraps": []}, "give --bootstrap HOST:PORT"),
        ({"cp": 99}, "--cp 99 is more than the 7 layers"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(changed: dict[str, object], said: str) -> None:
    with pytest.raises((InvalidInput, ValueError), match=said):
        options(**changed)
    assert options().plan().owned.keys() == set(options().sizes.ranks())
