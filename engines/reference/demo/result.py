"""Owns what a demo run has found: the plan, the bytes, the text and the proof. It measures and prints nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestResult:
    """One prompt. `pulled` is per decode and prefill rank, in bytes, and `pages` per decode rank.

    `transfer_ms` runs from the last publish to the end at the last decode rank.
    """

    request_id: str
    prompt: str
    num_tokens: int = 0
    cached_tokens: int = 0
    published_at: float = 0.0
    done_at: float = 0.0
    pulled: dict[int, list[int]] = field(default_factory=dict)
    num_descriptors: int = 0
    pages: dict[int, list[int]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    bytes_equal: bool = False
    difference: str = ""
    tokens_equal: bool = False
    proof_passed: bool = False
    logit_difference: float = float("inf")
    verdict: str = ""
    tie: dict[str, object] | None = None

    @property
    def pulled_bytes(self) -> list[int]:
        """Per prefill rank, by all decode ranks together."""
        return [sum(column) for column in zip(*self.pulled.values(), strict=True)]

    @property
    def transfer_ms(self) -> float:
        return (self.done_at - self.published_at) * 1e3


@dataclass(slots=True)
class DemoResult:
    """The whole run. `layers` is per prefill rank and component; byte counts of pools are in the same order, stage by
    stage."""

    model: str
    cp: int
    pp: int = 1
    decode_tp: int = 1
    backend: str = ""
    layers: list[dict[str, list[int]]] = field(default_factory=list)
    kv_bytes_unsplit: int = 0
    kv_bytes_per_rank: list[int] = field(default_factory=list)
    scratch_bytes_per_rank: list[int] = field(default_factory=list)
    requests: list[RequestResult] = field(default_factory=list)

    @property
    def bytes_equal(self) -> bool:
        return all(one.bytes_equal for one in self.requests)

    @property
    def tokens_equal(self) -> bool:
        return all(one.tokens_equal for one in self.requests)

    @property
    def passed(self) -> bool:
        """Bytes equal, logits close, tokens equal but for a named tie."""
        return self.bytes_equal and all(one.proof_passed for one in self.requests)

    @property
    def pulled_bytes_per_pair(self) -> list[list[int]]:
        """Per decode rank and prefill rank, over all requests."""
        readers = range(self.decode_tp)
        return [[sum(pair) for pair in zip(*(one.pulled[tp] for one in self.requests), strict=True)] for tp in readers]

    @property
    def pulled_bytes_per_owner(self) -> list[int]:
        return [sum(column) for column in zip(*self.pulled_bytes_per_pair, strict=True)]

    def failures(self) -> list[str]:
        """What is wrong, a line each."""
        lines = [f"{one.request_id}: {one.difference}" for one in self.requests if not one.bytes_equal]
        return lines + [f"{one.request_id}: {one.verdict}" for one in self.requests if not one.proof_passed]

    def as_json(self) -> dict[str, object]:
        """The object that `--json` prints."""
        return {
            "model": self.model,
            "pp": self.pp,
            "cp": self.cp,
            "decode_tp": self.decode_tp,
            "backend": self.backend,
            "passed": self.passed,
            "bytes_equal": self.bytes_equal,
            "tokens_equal": self.tokens_equal,
            "text": self.requests[0].text if self.requests else "",
            "kv_bytes_unsplit": self.kv_bytes_unsplit,
            "kv_bytes_per_rank": self.kv_bytes_per_rank,
            "scratch_bytes_per_rank": self.scratch_bytes_per_rank,
            "pulled_bytes_per_owner": self.pulled_bytes_per_owner,
            "pulled_bytes_per_pair": self.pulled_bytes_per_pair,
            "layers_per_rank": self.layers,
            "failures": self.failures(),
            "requests": [
                {
                    "request_id": one.request_id,
                    "prompt": one.prompt,
                    "num_tokens": one.num_tokens,
                    "cached_tokens": one.cached_tokens,
                    "text": one.text,
                    "tokens": one.tokens,
                    "transfer_ms": round(one.transfer_ms, 3),
                    "pulled_bytes": one.pulled_bytes,
                    "num_descriptors": one.num_descriptors,
                    "bytes_equal": one.bytes_equal,
                    "tokens_equal": one.tokens_equal,
                    "logit_difference": one.logit_difference,
                    "tie": one.tie,
                    "verdict": one.verdict,
                }
                for one in self.requests
            ],
        }
