"""What prefill and decode refuse before anything runs, in one process, each with the values and the fix."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlink.errors import IntegrityError, InvalidInput
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink_engines.reference.compare import compare_generations
from pdlink_engines.reference.decode import generate
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.plain import generate_plain
from pdlink_engines.reference.prefill import FinishedPages, PrefillEngine
from tests import processes


@pytest.fixture
def pool(tiny: ReferenceModel) -> Iterator[LayerShardedPool]:
    layout = tiny.layout(8)
    made = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, 4)
    yield made
    made.close()


@pytest.fixture
def told() -> list[FinishedPages]:
    return []


@pytest.fixture
def engine(tiny: ReferenceModel, pool: LayerShardedPool, told: list[FinishedPages]) -> PrefillEngine:
    return PrefillEngine(tiny, pool, CpGroup(), chunk_tokens=8, on_pages=told.append)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty prompt"),
        ([1] * 33, "33 tokens needs 5 pages of 8, the pool has 4"),
        ([1] * 9000, "longer than the 8192 of model 'glm-dsa-tiny'"),
        ([1, 258], "token 258 is outside the vocabulary of 258"),
        ([-1], "token -1 is outside"),
    ],
    ids=["empty", "larger-than-pool", "larger-than-model", "no-such-token", "negative"],
)
def test_a_prompt_that_can_never_run_is_refused_and_the_next_one_runs(
    engine: PrefillEngine, tokens: list[int], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        engine.submit("a", tokens)
    engine.submit("a", [1, 2, 3])
    assert [one.request_id for one in engine.run()] == ["a"]


def test_an_id_in_use_is_refused_and_free_again_after_its_release(
    engine: PrefillEngine, told: list[FinishedPages]
) -> None:
    engine.submit("a", [1, 2, 3])
    with pytest.raises(InvalidInput, match="'a' is already here"):
        engine.submit("a", [1, 2, 3])
    engine.run()
    engine.release("a")
    engine.step()
    engine.submit("a", [4, 5])
    assert len(engine.run()) == 1
    assert [one.last for one in told] == [True, True]


def test_a_release_of_a_stranger_does_not_touch_a_later_request_of_that_name(engine: PrefillEngine) -> None:
    engine.release("a")
    engine.submit("a", [1] * 20)
    assert len(engine.run()) == 1


def test_a_request_waits_for_pages_and_runs_when_they_come_back(engine: PrefillEngine) -> None:
    engine.submit("a", [1] * 30)
    engine.submit("b", [2] * 30)
    done = [engine.step() for _ in range(6)]
    assert [one.request_id for one in done if one] == ["a"]
    engine.release("a")
    assert [one.request_id for one in engine.run()] == ["b"]


class FailingPool(LayerShardedPool):
    """A pool that finds the second forward damaged, once."""

    forwards = 0

    def end_forward(self) -> None:
        super().end_forward()
        self.forwards += 1
        if self.forwards == 2:
            raise IntegrityError("damaged")


def test_a_chunk_whose_forward_failed_is_not_told_and_is_computed_anew(
    tiny: ReferenceModel, told: list[FinishedPages]
) -> None:
    prompt = tiny.tokenizer.encode("This sentence fills three pages.")[:24]
    layout = tiny.layout(8)
    pool = FailingPool(layout, {one.name: one.layers for one in layout.components}, 4)
    engine = PrefillEngine(tiny, pool, CpGroup(), chunk_tokens=8, on_pages=told.append)
    engine.submit("a", prompt)
    engine.step()
    with pytest.raises(IntegrityError, match="damaged"):
        engine.step()
    assert [one.start_page for one in told] == [0]
    (result,) = engine.run()
    assert [one.start_page for one in told] == [0, 1, 2]
    expected = generate_plain(tiny, prompt, max_new_tokens=4)
    found = generate(tiny, pool, [*result.page_ids, 3], prompt, result.first_token, max_new_tokens=4)
    assert compare_generations(expected, found).tokens_equal
    pool.close()


def test_a_request_that_failed_can_be_dropped(tiny: ReferenceModel, told: list[FinishedPages]) -> None:
    layout = tiny.layout(8)
    pool = FailingPool(layout, {one.name: one.layers for one in layout.components}, 4)
    engine = PrefillEngine(tiny, pool, CpGroup(), chunk_tokens=8, on_pages=told.append)
    engine.submit("a", [1] * 24)
    engine.step()
    with pytest.raises(IntegrityError, match="damaged"):
        engine.step()
    engine.release("a")
    engine.submit("b", [2] * 24)
    assert [one.request_id for one in engine.run()] == ["b"]
    assert [one.request_id for one in told] == ["a", "b", "b", "b"]
    pool.close()


LOST_PEER = """
import sys
from datetime import timedelta
import torch.distributed as dist
from pdlink.errors import DeadlineExceeded, PeerGone
from pdlink_engines.reference.gather import CpGroup
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=100)
)
# Both processes are up before the short timeout counts.
CpGroup(dist.group.WORLD).minimum([0])
group = CpGroup(dist.new_group([0, 1], timeout=timedelta(seconds=5)))
assert group.minimum([5 + rank, 5 - rank]) == [5, 4]
print("ready", flush=True)
sys.stdin.readline()
try:
    group.minimum([1])
except (PeerGone, DeadlineExceeded) as exc:
    print(type(exc).__name__, exc, flush=True)
"""


@pytest.mark.parametrize(("fate", "error"), [("ends", "PeerGone"), ("stops", "DeadlineExceeded")])
def test_a_rank_that_is_gone_fails_the_others_in_bounded_time(tmp_path: Path, fate: str, error: str) -> None:
    """The peer is killed, or sits there and makes no call; the suite's own timeout bounds every wait."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", LOST_PEER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        me, peer = (
            stack.enter_context(processes.started([*command, str(rank), tmp_path / "store"], env=environment, **pipes))
            for rank in (0, 1)
        )
        for process in (me, peer):
            assert process.stdout.readline() == "ready\n"
        if fate == "ends":
            peer.kill()
            peer.wait(processes.PATIENCE_S)
        found, _ = me.communicate("go\n", timeout=processes.PATIENCE_S)
    assert found.startswith(f"{error} agreement on released requests on cp rank 0 of 2"), found


def test_a_chunk_of_no_tokens_is_refused(tiny: ReferenceModel, pool: LayerShardedPool) -> None:
    with pytest.raises(InvalidInput, match="chunk size 0"):
        PrefillEngine(tiny, pool, CpGroup(), chunk_tokens=0, on_pages=lambda pages: None)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([1] * 30, 4, "need room for 33, but 4 pages of 8 hold 32"),
        ([1] * 30, 0, "max_new_tokens of at least 1, got 0"),
        ([], 1, "needs a prompt"),
    ],
)
def test_decode_refuses_what_its_pages_cannot_hold(
    tiny: ReferenceModel, pool: LayerShardedPool, prompt: list[int], new: int, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        generate(tiny, pool, [0, 1, 2, 3], prompt, 5, max_new_tokens=new)


def test_one_new_token_is_the_first_one_and_needs_no_forward(tiny: ReferenceModel, pool: LayerShardedPool) -> None:
    found = generate(tiny, pool, [0, 1, 2, 3], [1] * 32, 5, max_new_tokens=1)
    assert found.tokens == (5,)
    assert found.logits.shape == (0, tiny.vocab_size)
