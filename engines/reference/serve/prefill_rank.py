"""Owns one prefill rank as a server: rank 0 takes requests over HTTP, and all ranks compute them in the same order.

Each turn begins with an exchange in which the leader tells the others what is new, and which ends where a rank is gone.
Then the process ends as well: the next one (see `keeper`) forms a group with whoever is there. Requests that were
under way fail, their callers hear of it, and nothing of them comes back.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pdlink.errors import InvalidInput, PdlinkError
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.owners import ShardOwners
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.prefill.rank import PrefillRank
from pdlink.runtime.verbs import NodeVerbs, PrefillVerbs, SenderVerbs
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.prefill import FinishedPages, PrefillEngine, PrefillResult
from pdlink_engines.reference.serve.jobs import Inbox, Job
from pdlink_engines.reference.serve.options import PrefillOptions
from pdlink_engines.reference.serve.pool_metrics import PoolMetrics
from pdlink_engines.reference.watched import watch_pool, watch_reader

log = logging.getLogger("pdlink_engines.serve")

AUX_BYTES = 8
IDLE_S = 0.02
"""How long the leader waits for a request before it looks after the others again."""
MAX_PLAN_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class _Live:
    """One request on this rank. `job` is there on the leader alone, until it was answered."""

    sender: SenderVerbs
    job: Job | None
    is_released: bool = False


class PrefillServer:
    """One rank while its group stands. One thread."""

    def __init__(
        self,
        options: PrefillOptions,
        model: ReferenceModel,
        node: NodeVerbs,
        inbox: Inbox,
        group: RankGroup,
        metrics: PoolMetrics,
    ) -> None:
        """The pool's reads are counted by `metrics`, and by `node` too where that is in this process."""
        self._options = options
        self._inbox = inbox
        self._group = group
        self._is_leader = group.rank == 0
        self._live: dict[str, _Live] = {}
        layout, plan, place = options.layout(), options.plan(), options.place
        owners = ShardOwners.of(layout, plan, place)
        timeout_s = options.group_timeout_s
        reader = BroadcastReader.open(owners, range(options.cp), timeout_s=timeout_s) if options.cp > 1 else None
        watched = watch_reader(node, metrics.watch_reader(reader))
        self._pool = LayerShardedPool(layout, plan.owned[place], options.pool_pages, reader=watched)
        watch_pool(node, self._pool)
        metrics.watch_pool(self._pool)
        self._worker: PrefillVerbs = node.prefill(
            PrefillRank(
                options.instance, layout, options.sizes, place, plan.kinds, plan.owned[place], self._pool.regions()
            ),
            options.bootstrap_addresses(),
        )
        self._engine = PrefillEngine(
            model,
            self._pool,
            CpGroup(group.group),
            chunk_tokens=options.chunk_tokens,
            on_pages=self._publish,
        )
        log.info(
            "prefill rank %s owns %s",
            place,
            {name: f"{ids[0]}-{ids[-1]}" if ids else "nothing" for name, ids in plan.owned[place].items()},
        )

    def wait_registered(self, timeout_s: float) -> None:
        self._worker.wait_registered(timeout_s)

    def turn(self) -> None:
        """Take what is new, run one chunk, hand pages back.

        Raises what collectives do when a rank is gone: the group is of no use any more.
        """
        jobs = self._take() if self._is_leader else []
        submitted, dropped = self._agree(jobs)
        for told in submitted:
            self._submit(told["id"], told["tokens"], next((one for one in jobs if one.transfer_id == told["id"]), None))
        for request_id in dropped:
            self._drop(request_id)
        self._release()
        result = self._engine.step()
        if result is not None:
            self._finish(result)
        self._forget()

    def close(self) -> None:
        """Tell readers and callers that nothing more comes; the pool is removed."""
        for one in self._live.values():
            if one.job:
                one.job.fail("the prefill ranks are forming their group anew")
        self._worker.close()
        self._pool.close()

    # --- inside -------------------------------------------------------------------------------------

    def _take(self) -> list[Job]:
        """New requests, without a wait while there is work. Those whose callers have left meanwhile are over."""
        jobs = self._inbox.take(0 if self._engine.has_work else IDLE_S)
        for one in jobs:
            if one.has_left:
                self._inbox.done()
        return [one for one in jobs if not one.has_left]

    def _agree(self, jobs: list[Job]) -> tuple[list[dict[str, Any]], list[str]]:
        """What the leader has for this turn, on every rank: new requests, and those that nobody waits for any more.

        It is an exchange, so that all notice when one is gone.
        """
        submitted = [{"id": one.transfer_id, "tokens": one.tokens} for one in jobs]
        dropped = [name for name, one in self._live.items() if one.job and one.job.has_left]
        data = json.dumps({"submit": submitted, "drop": dropped}).encode() if submitted or dropped else b""
        nbytes = -self._group.minimum([-len(data)])[0]
        if not nbytes:
            return [], []
        if nbytes > MAX_PLAN_BYTES:
            raise InvalidInput(f"the leader announces a turn of {nbytes} bytes; at most {MAX_PLAN_BYTES}")
        room = torch.frombuffer(bytearray(data or nbytes), dtype=torch.uint8)
        self._group.broadcast(room, 0)
        told = json.loads(room.numpy().tobytes())
        return told["submit"], told["drop"]

    def _submit(self, request_id: str, tokens: list[int], job: Job | None) -> None:
        """Open the request on this rank's link, if every rank can."""
        sender, reason = None, ""
        try:
            sender = self._worker.open(request_id)
        except PdlinkError as error:
            reason = str(error)
            log.warning("request %s cannot be opened here: %s", request_id, error)
        if not self._group.minimum([int(sender is not None)])[0]:
            if sender:
                sender.abort("another prefill rank could not open this request")
            self._answer(job, error=reason or "another prefill rank could not open this request; see its log")
            return
        assert sender is not None
        try:
            self._engine.submit(request_id, tokens)
        except InvalidInput as error:  # on every rank alike
            sender.abort(str(error))
            self._answer(job, error=str(error), is_callers=True)
            return
        self._live[request_id] = _Live(sender, job)

    def _drop(self, request_id: str) -> None:
        """End a request whose caller has left, on every rank."""
        one = self._live.get(request_id)
        if one is None:
            return
        one.sender.abort("the caller has left")
        if one.job:
            one.job = None
            self._inbox.done()

    def _publish(self, pages: FinishedPages) -> None:
        aux = pages.first_token.to_bytes(AUX_BYTES, "little") if pages.first_token is not None else None
        self._live[pages.request_id].sender.publish(
            pages.page_ids, start_page=pages.start_page, last=pages.last, aux=aux if pages.last else None
        )

    def _release(self) -> None:
        for request_id, one in self._live.items():
            if not one.is_released and one.sender.poll().is_final:
                one.is_released = True
                self._engine.release(request_id)

    def _finish(self, result: PrefillResult) -> None:
        one = self._live[result.request_id]
        job, one.job = one.job, None
        self._answer(job, result=result)

    def _forget(self) -> None:
        """Drop what every rank has released. What was dropped before its result has failed on the link."""
        for request_id in [one for one in self._live if not self._engine.holds(one)]:
            one = self._live.pop(request_id)
            if one.job:
                self._answer(one.job, error=str(one.sender.failure or "decode ended the request"))

    def _answer(
        self, job: Job | None, *, result: PrefillResult | None = None, error: str = "", is_callers: bool = False
    ) -> None:
        if job is None:
            return
        self._inbox.done()
        if result is None:
            job.fail(error, is_callers=is_callers)
            return
        job.answer("prefilled", num_tokens=result.num_tokens, cached_tokens=result.cached_tokens)


def leave_group() -> None:
    """End torch's default group, so that ranks which wait for this one notice at once."""
    began = time.monotonic()
    try:
        dist.destroy_process_group()
    except RuntimeError as error:
        log.warning("the group could not be ended: %s", error)
    log.info("left the group in %.2f s", time.monotonic() - began)
