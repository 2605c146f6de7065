"""Owns the verdict on two generations: equal, parted by a tie, or wrong. It runs no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdlink.errors import InvalidInput
from pdlink_engines.reference.decode import Generation

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Tie:
    """A step at which both runs picked another of two tokens that the reference holds for equal, `margin` apart."""

    step: int
    expected_token: int
    found_token: int
    margin: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """`logit_difference` is the largest over `num_steps` compared steps; it ends where the tokens part.

    `tie` explains tokens that part; without one they part for no good reason.
    """

    tokens_equal: bool
    logit_difference: float
    num_steps: int
    tolerance: float
    parted_at: int | None = None
    tie: Tie | None = None

    @property
    def passed(self) -> bool:
        return self.logit_difference <= self.tolerance and (self.tokens_equal or self.tie is not None)

    @property
    def text(self) -> str:
        """One sentence for an operator."""
        relation = "within" if self.logit_difference <= self.tolerance else "off by"
        steps = f"logits {relation} {self.logit_difference:.1e} over {self.num_steps} step(s)"
        if self.tokens_equal:
            return f"tokens equal, {steps}"
        if self.tie is not None:
            return (
                f"a tie at step {self.tie.step}: tokens {self.tie.expected_token} and {self.tie.found_token} are "
                f"{self.tie.margin:.1e} apart; {steps}"
            )
        return f"tokens part at step {self.parted_at}, {steps}"


def compare_generations(expected: Generation, found: Generation, tolerance: float = TOLERANCE) -> Comparison:
    """Compare step by step as far as both follow the same tokens.

    Step 0 counts where both know the logits of the first token. A logit that is not a number counts as infinitely far.
    Raises `InvalidInput` when nothing could be compared.
    """
    length = min(len(expected.tokens), len(found.tokens))
    parted_at = next((i for i in range(length) if expected.tokens[i] != found.tokens[i]), None)
    if parted_at is None and len(expected.tokens) != len(found.tokens):
        parted_at = length
    steps = range(length if parted_at is None else min(parted_at + 1, length))
    pairs = [(_row(expected, step), _row(found, step)) for step in steps]
    differences = [_distance(a, b) for a, b in pairs if a is not None and b is not None]
    if not differences:
        raise InvalidInput("the two generations share no step whose logits both know")
    tie = None
    if parted_at is not None and parted_at < length:
        tie = _tie(expected, parted_at, found.tokens[parted_at], tolerance)
    return Comparison(parted_at is None, max(differences), len(differences), tolerance, parted_at, tie)


def _row(generation: Generation, step: int) -> torch.Tensor | None:
    return generation.first_logits if step == 0 else generation.logits[step - 1]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = float((a - b).abs().max())
    return difference if difference == difference else float("inf")


def _tie(expected: Generation, step: int, found_token: int, tolerance: float) -> Tie | None:
    logits = _row(expected, step)
    if logits is None:
        return None
    margin = float(logits[expected.tokens[step]] - logits[found_token])
    return Tie(step, expected.tokens[step], found_token, margin) if margin <= tolerance else None
