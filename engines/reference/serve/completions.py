"""Owns the shape of OpenAI's `/v1/completions` as far as the front speaks it: the body, answers, chunks and errors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdlink_engines.reference.serve.http_thread import MAX_PROMPT_CHARS


class CompletionRequest(BaseModel):
    """What a caller may ask for. Answers are greedy; fields that would ask for anything else are refused."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARS)
    model: str | None = None
    max_tokens: int = Field(16, ge=1)
    stream: bool = False
    temperature: Literal[0] | float | None = Field(None, le=0)
    n: Literal[1] = 1
    user: str | None = None


@dataclass(slots=True)
class Answer:
    """One request's answer as it comes. `pulled_bytes` is per prefill rank that bytes came from."""

    completion_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    transfer_id: str = ""
    tries: int = 0
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    pulled_bytes: dict[str, int] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)

    def restart(self, transfer_id: str) -> None:
        """Forget what a failed try has brought."""
        self.transfer_id, self.tries = transfer_id, self.tries + 1
        self.text, self.finish_reason, self.num_tokens = "", None, 0
        self.tokens = []
        self.pulled_bytes, self.backends, self.ways = {}, [], []

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        return self._body(self.text) | {"usage": self._usage(), "pdlink": self._link()}

    def chunk(self, text: str) -> dict[str, Any]:
        """One event of a stream. The last one, with the finish reason, has usage and what pdlink did."""
        body = self._body(text)
        return body if self.finish_reason is None else body | {"usage": self._usage(), "pdlink": self._link()}

    def _body(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": self.finish_reason}
        return {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }

    def _link(self) -> dict[str, Any]:
        return {
            "transfer_id": self.transfer_id,
            "tries": self.tries,
            "tokens": self.tokens,
            "pulled_bytes": self.pulled_bytes,
            "backends": self.backends,
            "ways": self.ways,
        }


def error_body(text: str, kind: str) -> dict[str, Any]:
    """An error in OpenAI's form; `kind` is "invalid_request_error" or "server_error"."""
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}
