"""Owns a decode engine while it serves: pages for each request, its receive, and then its tokens, a step at a time.

All requests that generate take turns, one token each. It knows no HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pdlink.address import parse_address
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import InvalidInput, PdlinkError
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.runtime.verbs import DecodeVerbs, NodeVerbs
from pdlink.transfer.states import ReceiverState
from pdlink_engines.reference.decode import generation_steps
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.pages import PageTable
from pdlink_engines.reference.serve.jobs import Inbox, Job
from pdlink_engines.reference.serve.options import EngineOptions

log = logging.getLogger("pdlink_engines.serve")

IDLE_S = 0.1
RECEIVING_S = 0.002
CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class _Live:
    """One request: it waits for pages, then receives, then generates."""

    job: Job
    pages: tuple[int, ...] = ()
    receiver: Receiver | None = None
    steps: Iterator[tuple[int, torch.Tensor]] | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class DecodeServer:
    """The engine of one decode rank. One thread runs `turn`."""

    def __init__(self, options: EngineOptions, model: ReferenceModel, node: NodeVerbs, inbox: Inbox) -> None:
        self._model = model
        self._inbox = inbox
        layout = options.layout()
        self._pool = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, options.pool_pages)
        self._worker: DecodeVerbs = node.decode(options.instance, layout, self._pool.regions())
        self._table = PageTable(range(options.pool_pages), options.page_size)
        self._live: list[_Live] = []

    def turn(self) -> None:
        """Take what is new, look after receives, and generate one token of each request that can."""
        is_generating = any(one.steps for one in self._live)
        wait_s = 0.0 if is_generating else RECEIVING_S if self._live else IDLE_S
        self._live += [_Live(job) for job in self._inbox.take(wait_s)]
        for one in list(self._live):
            try:
                is_over = self._advance(one)
            except PdlinkError as error:
                one.job.fail(str(error), is_callers=isinstance(error, InvalidInput))
                is_over = _is_quiet(one)  # else its pages are not the engine's yet
            if is_over:
                self._end(one)

    def close(self) -> None:
        """End every request; the pool is removed."""
        for one in self._live:
            one.job.fail("the decode server is ending")
            if one.receiver and not one.receiver.poll().is_final:
                one.receiver.abort("the decode server is ending")
        give_up = time.monotonic() + CLOSE_TIMEOUT_S
        while time.monotonic() < give_up and any(not _is_quiet(one) for one in self._live):
            time.sleep(RECEIVING_S)
        self._worker.close()
        self._pool.close()

    # --- inside -------------------------------------------------------------------------------------

    def _advance(self, one: _Live) -> bool:
        """Whether the request is over."""
        if one.steps is not None:
            return one.job.has_left or self._generate(one, one.steps)
        if one.receiver is not None:
            if one.job.has_left:
                one.receiver.abort("the caller has left")
            return one.receiver.poll().is_final and self._take(one, one.receiver)
        return one.job.has_left or self._open(one)

    def _open(self, one: _Live) -> bool:
        """Receive, as soon as there are pages for prompt and answer."""
        tokens, job = one.tokens, one.job
        assert not tokens
        num_prompt, max_tokens = len(job.tokens), int(job.fields["max_tokens"])
        needed = self._table.pages_for(num_prompt + max_tokens)
        if needed > self._table.num_pages or num_prompt + max_tokens > self._model.max_tokens:
            raise InvalidInput(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} need {needed} pages of "
                f"{self._table.page_size}; this server has {self._table.num_pages}, and model {self._model.name!r} "
                f"allows {self._model.max_tokens} tokens"
            )
        pages = self._table.allocate(needed)
        if pages is None:
            return False
        one.pages = pages
        prefill = PrefillInstance(
            job.fields["instance"], tuple(parse_address(where) for where in job.fields["bootstraps"])
        )
        mine = list(pages[: self._table.pages_for(num_prompt)])
        one.receiver = self._worker.receive(job.transfer_id, prefill, {"kv": mine}, num_prompt, expect_aux=True)
        return False

    def _take(self, one: _Live, receiver: Receiver) -> bool:
        """Begin to generate with what has come."""
        if receiver.poll() is not ReceiverState.DONE:
            one.job.fail(str(receiver.failure or f"the receive is {receiver.poll()}"))
            return True
        result = receiver.result()
        assert result.aux is not None
        first = int.from_bytes(result.aux, "little")
        one.job.answer(
            "received",
            num_prompt_tokens=len(one.job.tokens),
            pulled_bytes=dict(result.num_bytes),
            backends=sorted(set(result.backends.values())),
            ways=sorted({way for ways in result.ways.values() for way in ways}),
            elapsed_s=result.elapsed_s,
        )
        one.steps = generation_steps(
            self._model, self._pool, one.pages, one.job.tokens, first, max_new_tokens=int(one.job.fields["max_tokens"])
        )
        self._say(one, first)
        return False

    def _generate(self, one: _Live, steps: Iterator[tuple[int, torch.Tensor]]) -> bool:
        made = next(steps, None)
        if made is None:
            self._say_rest(one)
            stopped = bool(one.tokens) and one.tokens[-1] in self._model.stop_tokens
            one.job.answer("end", finish_reason="stop" if stopped else "length", num_tokens=len(one.tokens))
            return True
        self._say(one, made[0])
        return False

    def _say(self, one: _Live, token: int) -> None:
        """A token, and the text that is new with it: a character that is not whole yet waits for its rest."""
        one.tokens.append(token)
        text = self._model.tokenizer.decode(one.tokens)
        fresh = "" if text.endswith("\ufffd") else text[len(one.text) :]
        one.text += fresh
        one.job.answer("token", token=token, text=fresh)

    def _say_rest(self, one: _Live) -> None:
        rest = self._model.tokenizer.decode(one.tokens)[len(one.text) :]
        if rest:
            one.job.answer("text", text=rest)

    def _end(self, one: _Live) -> None:
        self._live.remove(one)
        self._inbox.done()
        self._table.release(one.pages)


def _is_quiet(one: _Live) -> bool:
    return one.receiver is None or one.receiver.poll().is_final
