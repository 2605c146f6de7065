"""Owns how activations get from one pipeline stage to the next. What a stage computes is not its concern."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from pdlink.errors import IntegrityError, InvalidInput
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.interleave import ChunkShares
from pdlink_engines.reference.stage import Activations

_HEADER_WORDS = 3


class Pipeline:
    """One rank's place in the pipeline of a prefill instance: stage `pp` of `pp_size`.

    Each stage has a cp group of the same size, and rank r of a stage passes its rows to rank r of the next. `everyone`
    has the ranks of all stages, stage by stage, each in the order of its cp group; it may be left out with one stage.
    """

    def __init__(self, cp: CpGroup, everyone: RankGroup | None = None, pp: int = 0, pp_size: int = 1) -> None:
        self.cp = cp
        self.everyone = cp if everyone is None else everyone
        self.pp, self.pp_size = pp, pp_size
        if not 0 <= pp < pp_size or self.everyone.size != pp_size * cp.size or self.everyone.rank != self._at(pp):
            raise InvalidInput(
                f"stage {pp} of {pp_size} with cp rank {cp.rank} of {cp.size} cannot be rank {self.everyone.rank} of "
                f"{self.everyone.size}; list the ranks stage by stage"
            )

    def receive(self, request_id: str, shares: ChunkShares, room: Activations) -> Activations:
        """What the same cp rank of the stage before has computed, in the shape of `room`.

        Raises `IntegrityError` when that is of another chunk: a stage has failed and gone on.
        """
        parts = _parts(room)
        data = torch.empty(8 * _HEADER_WORDS + sum(one.nbytes for one in parts), dtype=torch.uint8)
        what = f"{request_id!r} tokens {shares.start} to {shares.end - 1} from stage {self.pp - 1}"
        self.everyone.receive(data, self._at(self.pp - 1), what)
        header, *pieces = torch.split(data, [8 * _HEADER_WORDS, *(one.nbytes for one in parts)])
        expected = _header(request_id, shares)
        if not torch.equal(header, expected):
            start, end = header.view(torch.int64)[1:].tolist()
            raise IntegrityError(
                f"{what}: tokens {start} to {end - 1} of a request came instead; a stage is out of step"
            )
        came = [piece.clone().view(part.dtype).view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        return Activations(*came)

    def send(self, request_id: str, shares: ChunkShares, activations: Activations) -> None:
        """Pass this rank's activations of a chunk to the next stage."""
        parts = [part.contiguous().view(-1).view(torch.uint8) for part in _parts(activations)]
        what = f"{request_id!r} tokens {shares.start} to {shares.end - 1} to stage {self.pp + 1}"
        self.everyone.send(torch.cat([_header(request_id, shares), *parts]), self._at(self.pp + 1), what)

    def share(self, values: torch.Tensor, holder: int) -> torch.Tensor:
        """Give `values` of cp rank `holder` of the last stage to every rank of all stages, in place."""
        return self.everyone.broadcast(values, (self.pp_size - 1) * self.cp.size + holder)

    def _at(self, pp: int) -> int:
        return pp * self.cp.size + self.cp.rank


def _parts(activations: Activations) -> Sequence[torch.Tensor]:
    return [activations.hidden] if activations.choice is None else [activations.hidden, activations.choice]


def _header(request_id: str, shares: ChunkShares) -> torch.Tensor:
    name = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little", signed=True)
    return torch.tensor([name, shares.start, shares.end], dtype=torch.int64).view(torch.uint8)
