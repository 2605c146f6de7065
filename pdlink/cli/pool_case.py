"""Owns what `pdlink bench read` and `pdlink bench loop` measure: a case, its figures, its rows. It runs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from pdlink.errors import InvalidInput

DEVICES = ("cpu", "cuda")
ON_CUDA = ("copy", "sglang")
"""Rows that exist on GPUs only."""
WIDTHS = {"cpu": 512, "cuda": 6144}
"""Of the matrix products that stand for a layer's computation: on GPUs a hidden size of models of this kind."""
PAGE_SIZE = 64
LATENT_BYTES = 656
INDEX_BYTES = 132
MIN_ROUNDS = 7
LEAST_WAIT_S, WAIT_PER_RANK_S = 60.0, 10.0
"""How long ranks wait for each other: where they are more than cores, they start, and compute, one after another."""


@dataclass(frozen=True, slots=True)
class PoolCase:
    """One case on all of its ranks. Tokens are tokens; `loop` says which bench it is. Raises `InvalidInput`.

    `copy_blocks` bounds the multiprocessors that a gather takes on a GPU, 0 is all; `width` 0 is that of `WIDTHS`.
    `timeout_s` is that of the readers' own waits, 0 is `wait_s`.
    """

    loop: bool
    readers: tuple[str, ...]
    ranks: int
    layers: int
    live_tokens: int
    pool_tokens: int
    chunk_tokens: int
    products: int
    rounds: int
    device: str = "cpu"
    ahead: bool = False
    copy_blocks: int = 0
    width: int = 0
    timeout_s: float = 0.0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise InvalidInput(f"--device {self.device} is unknown; give {' or '.join(DEVICES)}")
        lacking = [one for one in self.readers if one in ON_CUDA and self.device != "cuda"]
        if lacking:
            raise InvalidInput(f"--reader {lacking[0]} is measured on GPUs only; give --device cuda or leave it out")
        if self.loop and "copy" in self.readers:
            raise InvalidInput("--reader copy is a read of one layer, no forward; leave it out")
        if self.ranks < 2:
            raise InvalidInput(f"--ranks {self.ranks}: a layer is split between at least 2")
        if self.live_tokens < 1 or self.layers < 1 or self.rounds < 1:
            raise InvalidInput("live tokens, layers and rounds must be at least 1")
        needed = self.live_tokens + self.chunk_tokens
        if needed > self.pool_tokens or self.pool_tokens % PAGE_SIZE:
            raise InvalidInput(
                f"a pool of {self.pool_tokens} tokens cannot hold {self.live_tokens} live ones and a chunk of "
                f"{self.chunk_tokens}, in pages of {PAGE_SIZE}; give --pool-tokens of at least {needed}, a multiple of "
                f"{PAGE_SIZE}"
            )

    @property
    def num_pages(self) -> int:
        return self.pool_tokens // PAGE_SIZE

    @property
    def product_width(self) -> int:
        return self.width or WIDTHS[self.device]

    @property
    def wait_s(self) -> float:
        """How long a rank waits for the others, when all start and in each exchange."""
        return LEAST_WAIT_S + WAIT_PER_RANK_S * self.ranks

    @property
    def readers_wait_s(self) -> float:
        return self.timeout_s or self.wait_s

    @property
    def baseline(self) -> str:
        """What `ratio` is taken to."""
        return "none" if self.loop else "whole-pool"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PoolCase:
        facts = json.loads(text)
        return cls(**{**facts, "readers": tuple(facts["readers"])})


def make_rows(
    case: PoolCase, taken: Mapping[str, Sequence[float]], moved: Mapping[str, int], picked: str = ""
) -> list[dict[str, object]]:
    """A row for each reader: `taken` are its milliseconds, one for each round; `moved` its bytes for a layer.

    `ratio` is the median of the rounds' own ratios to the baseline, since what disturbs a round disturbs all readers in
    it; `ratio_low` and `ratio_high` are its quartiles. None where the baseline is not among the readers. `picked` is
    what a pool would choose here, and why.
    """
    base = taken.get(case.baseline)
    rows: list[dict[str, object]] = []
    for reader in case.readers:
        ratios = sorted(mine / other for mine, other in zip(taken[reader], base, strict=True)) if base else []
        rows.append(
            {
                "reader": reader,
                "live_tokens": case.live_tokens,
                "pool_tokens": case.pool_tokens,
                "chunk_tokens": case.chunk_tokens,
                "ranks": case.ranks,
                "layers": case.layers,
                "device": case.device,
                "ahead": case.ahead and reader in ("broadcast", "peer"),
                "rounds": case.rounds,
                "ms": median(taken[reader]),
                "min_ms": min(taken[reader]),
                "bytes_moved": moved[reader],
                "gb_s": None if case.loop else moved[reader] / median(taken[reader]) / 1e6,
                "ratio": median(ratios) if ratios else None,
                "ratio_low": ratios[len(ratios) // 4] if ratios else None,
                "ratio_high": ratios[-1 - len(ratios) // 4] if ratios else None,
                "baseline": case.baseline,
                "copy_blocks": case.copy_blocks,
                "picked": picked,
            }
        )
    return rows
