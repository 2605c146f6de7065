"""Owns context-parallel, chunked prefill of several requests on one rank: what runs next, and one forward at a time.

The pool it writes and the link that it tells about finished pages are passed in; it moves nothing to decode. All ranks
of all pipeline stages submit the same requests in the same order and call `step` equally often. Stages take turns: a
chunk goes through all of them before the next one starts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pdlink.errors import DeadlineExceeded, InvalidInput
from pdlink.memory.forward import ReadSpan
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.interleave import ChunkShares
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.paged_cache import PagedCache, causal_mask, slots_of
from pdlink_engines.reference.pages import PageTable
from pdlink_engines.reference.pipeline import Pipeline
from pdlink_engines.reference.pool import PagedPool
from pdlink_engines.reference.stage import Stage

POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class FinishedPages:
    """Pages of a request that are final: `page_ids` are the request's pages `start_page`, `start_page` + 1, ...

    Each page of a prompt is told once, in order; only the last of the `last` call may be partly filled. `first_token`
    comes with `last`, else it is None.
    """

    request_id: str
    start_page: int
    page_ids: tuple[int, ...]
    last: bool
    first_token: int | None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A finished prefill, equal on all ranks. `logits` float32 [vocab] gave `first_token`.

    `cached_tokens` of the prompt came from pages that an earlier request had filled.
    """

    request_id: str
    page_ids: tuple[int, ...]
    num_tokens: int
    cached_tokens: int
    first_token: int
    logits: torch.Tensor


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    tokens: tuple[int, ...]
    pages: tuple[int, ...] = ()
    computed: int = 0
    cached: int = 0
    told: int = 0
    result: PrefillResult | None = field(default=None)

    @property
    def active(self) -> bool:
        return bool(self.pages) and self.result is None


class PrefillEngine:
    """One rank's prefill. Not thread-safe, except for `release`.

    `on_pages` is called after each chunk, on every rank, with what became final; pages stay unchanged until every rank
    has called `release` for the request. `page_order` names the usable pages of the pool, in hand-out order (default:
    all of them); stages may differ in it, but not in how many pages they have.

    `pipeline` says which stage this is and `layers` which layers it has (default: one stage, all layers). With several
    stages, a forward that fails ends the instance: stages that went on find each other out of step.
    """

    def __init__(
        self,
        model: ReferenceModel,
        pool: PagedPool,
        group: CpGroup,
        *,
        chunk_tokens: int,
        on_pages: Callable[[FinishedPages], None],
        page_order: Iterable[int] | None = None,
        pipeline: Pipeline | None = None,
        layers: range | None = None,
    ) -> None:
        if chunk_tokens < 1:
            raise InvalidInput(f"chunk size {chunk_tokens} must be at least 1 token")
        self._model = model
        self._pool = pool
        self._group = group
        self._pipeline = pipeline or Pipeline(group)
        self._stage = Stage(model, layers)
        self._chunk_tokens = chunk_tokens
        self._on_pages = on_pages
        self._page_size = pool.layout.components[0].page_size
        self._table = PageTable(range(pool.num_pages) if page_order is None else page_order, self._page_size)
        self._requests: dict[str, _Request] = {}
        self._turns: deque[_Request] = deque()
        self._released: set[str] = set()
        self._lock = threading.Lock()

    def submit(self, request_id: str, tokens: Sequence[int]) -> None:
        """Queue a prompt. Raises `InvalidInput` for one that can never run, and for an id that is in use."""
        if request_id in self._requests:
            raise InvalidInput(f"request {request_id!r} is already here; release it before its id is used again")
        self._check(request_id, tokens)
        with self._lock:
            self._requests[request_id] = _Request(request_id, tuple(tokens))

    def release(self, request_id: str) -> None:
        """Say that this rank's pages of the request need not be kept. Any thread may call it, once or more.

        The pages are used again once every rank has said so; a request that still runs is dropped then. An id that was
        not submitted, or is gone already, is ignored.
        """
        with self._lock:
            if request_id in self._requests:
                self._released.add(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether the id is in use: it was submitted, and its pages were not handed back yet."""
        return request_id in self._requests

    @property
    def has_work(self) -> bool:
        """Whether a request has pages and no result yet."""
        return bool(self._turns)

    def step(self) -> PrefillResult | None:
        """Run one chunk of the next request in turn, if any can run; returns the result of one that finished by it.

        Raises what the pool and the group raise. The request then keeps its turn: the caller may step again, which
        computes the same chunk anew, or release the request, which drops it.
        """
        self._free_released()
        self._admit()
        if not self._turns:
            return None
        request = self._turns[0]
        self._run_chunk(request)
        self._turns.popleft()
        if request.active:
            self._turns.append(request)
        self._tell(request)
        return request.result

    def run(self, page_timeout_s: float = 30.0) -> list[PrefillResult]:
        """Step until every submitted request has its result; returns those that finished meanwhile, in order.

        Raises `DeadlineExceeded` on all ranks when requests wait for pages longer than `page_timeout_s`.
        """
        results = []
        waiting_since = time.monotonic()
        while any(request.result is None for request in self._requests.values()):
            result = self.step()
            if result is not None:
                results.append(result)
            if self._turns or result is not None:
                waiting_since = time.monotonic()
                continue
            self._wait_for_pages(time.monotonic() - waiting_since < page_timeout_s, page_timeout_s)
        return results

    def _check(self, request_id: str, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InvalidInput(f"request {request_id!r} has an empty prompt")
        if len(tokens) > self._model.max_tokens:
            raise InvalidInput(
                f"prompt of {len(tokens)} tokens is longer than the {self._model.max_tokens} of model "
                f"{self._model.name!r}"
            )
        needed = self._table.pages_for(len(tokens))
        if needed > self._table.num_pages:
            raise InvalidInput(
                f"prompt of {len(tokens)} tokens needs {needed} pages of {self._page_size}, the pool has "
                f"{self._table.num_pages}; shorten the prompt or enlarge the pool"
            )
        outside = next((one for one in tokens if not 0 <= one < self._model.vocab_size), None)
        if outside is not None:
            raise InvalidInput(f"token {outside} is outside the vocabulary of {self._model.vocab_size}")

    def _wait_for_pages(self, patient: bool, timeout_s: float) -> None:
        # The slowest clock must not decide alone: ranks give up together, or some would wait in a collective.
        if not self._pipeline.everyone.minimum([int(patient)])[0]:
            blocked = [one.request_id for one in self._requests.values() if not one.pages]
            raise DeadlineExceeded(
                f"requests {blocked} waited {timeout_s:g} s for pages ({self._table.num_available} of "
                f"{self._table.num_pages} free): the link released too little"
            )
        time.sleep(POLL_S)

    def _free_released(self) -> None:
        """Take back what every rank has released: another rank may still be read from."""
        known = list(self._requests.values())
        with self._lock:
            said = [int(one.request_id in self._released) for one in known]
        for request, everywhere in zip(known, self._pipeline.everyone.minimum(said), strict=True):
            if not everywhere:
                continue
            self._table.release(request.pages)
            if request.active:
                self._turns.remove(request)
            with self._lock:
                del self._requests[request.request_id]
                self._released.discard(request.request_id)

    def _admit(self) -> None:
        """Give pages to waiting requests, first come first served, as long as they fit."""
        for request in self._requests.values():
            if request.pages:
                continue
            shared = self._table.share(request.tokens)
            fresh = self._table.allocate(self._table.pages_for(len(request.tokens)) - len(shared))
            if fresh is None:
                self._table.release(shared)
                return
            request.pages = shared + fresh
            request.cached = request.computed = len(shared) * self._page_size
            self._turns.append(request)

    def _run_chunk(self, request: _Request) -> None:
        length = len(request.tokens)
        num_tokens = min(self._chunk_tokens, length - request.computed)
        shares = ChunkShares(request.computed, num_tokens, self._group.size)
        self._pool.begin_forward([ReadSpan(request.pages[: self._table.pages_for(shares.start)], shares.start)])
        logits = self._forward(request, shares)
        self._pool.end_forward()
        if shares.end == length:
            logits = self._pipeline.share(logits, shares.holder(length - 1))
        request.computed = shares.end
        self._table.remember(request.tokens, request.pages[: shares.end // self._page_size])
        if shares.end == length:
            request.result = PrefillResult(
                request.request_id, request.pages, length, request.cached, int(logits.argmax()), logits
            )

    def _forward(self, request: _Request, shares: ChunkShares) -> torch.Tensor:
        """Run this rank's share through the layers of its stage.

        Returns float32 [vocab], which means something on the last stage's holder of the last token.
        """
        positions = shares.padded_positions(self._group.rank)
        cache = PagedCache(
            self._pool,
            self._model.shape,
            all_slots=slots_of(request.pages, self._page_size, 0, shares.end),
            prefix=shares.start,
            gather=self._group.row_gather(shares),
        )
        stage, came = self._stage, None
        if not stage.is_first:
            came = self._pipeline.receive(request.request_id, shares, stage.incoming(len(positions), shares.end))
        with torch.no_grad():
            tokens = [request.tokens[one] for one in positions]
            output = stage.run(came, tokens, positions, causal_mask(positions, shares.end), cache)
            if stage.is_last:
                return stage.logits(output, shares.row(shares.end - 1))
        self._pipeline.send(request.request_id, shares, stage.outgoing(output))
        return torch.empty(self._model.vocab_size)

    def _tell(self, request: _Request) -> None:
        result = request.result
        upto = len(request.pages) if result else request.computed // self._page_size
        if upto == request.told:
            return
        start, request.told = request.told, upto
        pages = request.pages[start:upto]
        first_token = result.first_token if result else None
        self._on_pages(FinishedPages(request.request_id, start, pages, result is not None, first_token))
