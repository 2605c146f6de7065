"""What passes between pipeline stages arrives as it left, and what belongs to another chunk is not taken for it."""

from __future__ import annotations

import pytest
import torch

from pdlink.errors import IntegrityError, InvalidInput
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.interleave import ChunkShares
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.pipeline import Pipeline
from pdlink_engines.reference.stage import Activations, Stage


class Wire(RankGroup):
    """Two ranks in one process: what the one sends lies here until the other takes it."""

    def __init__(self, rank: int, sent: list[tuple[int, torch.Tensor]]) -> None:
        self.group, self.size, self.rank, self._sent = None, 2, rank, sent

    def send(self, data: torch.Tensor, target: int, what: str) -> None:
        self._sent.append((target, data.clone()))

    def receive(self, data: torch.Tensor, source: int, what: str) -> torch.Tensor:
        target, came = self._sent.pop(0)
        assert (source, target) == (1 - self.rank, self.rank)
        return data.copy_(came)


@pytest.fixture
def stages() -> tuple[Pipeline, Pipeline]:
    sent: list[tuple[int, torch.Tensor]] = []
    first, second = (Pipeline(CpGroup(), Wire(rank, sent), rank, 2) for rank in (0, 1))
    return first, second


def activations(rows: int) -> Activations:
    choice = torch.arange(rows * 4, dtype=torch.int32).view(1, rows, 4)
    return Activations(torch.randn(1, rows, 8, dtype=torch.float64), choice)


def room(rows: int) -> Activations:
    return Activations(torch.empty(1, rows, 8, dtype=torch.float64), torch.empty(1, rows, 4, dtype=torch.int32))


def test_hidden_states_and_the_indexers_choice_arrive_as_they_left(stages: tuple[Pipeline, Pipeline]) -> None:
    shares = ChunkShares(7, 5, 1)
    left = activations(5)
    stages[0].send("a", shares, left)
    came = stages[1].receive("a", shares, room(5))
    assert came.hidden.equal(left.hidden)
    assert came.choice is not None
    assert came.choice.equal(left.choice)


@pytest.mark.parametrize(("name", "start"), [("a", 12), ("b", 7)])
def test_activations_of_another_chunk_or_request_are_refused(
    stages: tuple[Pipeline, Pipeline], name: str, start: int
) -> None:
    stages[0].send(name, ChunkShares(start, 5, 1), activations(5))
    with pytest.raises(IntegrityError, match=f"'a' tokens 7 to 11 from stage 0: tokens {start} to {start + 4}"):
        stages[1].receive("a", ChunkShares(7, 5, 1), room(5))


def test_a_rank_that_is_not_where_its_stage_says_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot be rank 1 of 2; list the ranks stage by stage"):
        Pipeline(CpGroup(), Wire(1, []), 0, 2)


def test_a_stage_hands_on_a_choice_only_to_a_layer_that_shares_it(tiny: ReferenceModel) -> None:
    made = activations(3)
    # Layers 0, 1, 3 and 6 of this model run an indexer; the others share that of an earlier one.
    handed = {end: Stage(tiny, range(end)).outgoing(made).choice is not None for end in range(1, 7)}
    assert handed == {1: False, 2: True, 3: False, 4: True, 5: True, 6: False}
    for end, expected in handed.items():
        assert (Stage(tiny, range(end, 7)).incoming(3, 9).choice is not None) is expected


@pytest.mark.parametrize("span", [range(0), range(3, 3), range(6, 8)])
def test_a_stage_without_layers_of_the_model_is_refused(tiny: ReferenceModel, span: range) -> None:
    with pytest.raises(InvalidInput, match="needs some of the 7 layers"):
        Stage(tiny, span)
