"""Owns the process of one prefill rank: its HTTP side, its link, and the group that it forms and leaves.

It computes nothing (see `prefill_rank`).
"""

from __future__ import annotations

import logging
import signal
import threading

import torch.distributed as dist
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdlink.errors import LimitReached, PdlinkError
from pdlink.runtime.verbs import NodeVerbs
from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.serve import keeper
from pdlink_engines.reference.serve.gang import Leader, follow
from pdlink_engines.reference.serve.http_thread import MAX_ID_CHARS, MAX_PROMPT_CHARS, Handler, HttpThread, refuse
from pdlink_engines.reference.serve.jobs import Inbox, Job
from pdlink_engines.reference.serve.link import open_link, standing
from pdlink_engines.reference.serve.options import PrefillOptions
from pdlink_engines.reference.serve.pool_metrics import PoolMetrics
from pdlink_engines.reference.serve.prefill_rank import PrefillServer, leave_group
from pdlink_engines.reference.serve.watchdog import end_within

log = logging.getLogger("pdlink_engines.serve")

REGISTER_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 8.0
FORMING = "the prefill ranks are forming their group"


class PrefillRequest(BaseModel):
    """The body of POST /prefill."""

    model_config = ConfigDict(extra="forbid")

    transfer_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARS)


class PrefillProcess:
    """A child of the keeper: one group, from meeting to parting."""

    def __init__(self, options: PrefillOptions, model: ReferenceModel) -> None:
        self._options = options
        self._model = model
        self._inbox = Inbox(options.max_requests)
        self._metrics = PoolMetrics()
        self._over = threading.Event()
        self._unready = FORMING

    def run(self) -> int:
        """Serve until the group breaks (`keeper.AGAIN`) or SIGTERM (0)."""
        signal.signal(signal.SIGTERM, lambda *_: self._over.set())
        options = self._options
        routes: dict[str, Handler] = {"GET /metrics": self._metrics.handle}
        if options.is_leader:
            routes["POST /prefill"] = self._prefill
        http = HttpThread(options.http_address, routes, lambda: self._unready)
        leader = Leader(options.leader_address, options.cp) if options.is_leader else None
        try:
            with open_link(options, self._over.is_set) as node:
                self._serve(node, leader)
        except (PdlinkError, RuntimeError) as error:
            if not self._over.is_set():
                log.warning("the group of prefill ranks is given up: %s", error)
        finally:
            if leader:
                leader.close()
            http.close()
        return 0 if self._over.is_set() else keeper.AGAIN

    def _serve(self, node: NodeVerbs, leader: Leader | None) -> None:
        """Form a group, serve while it stands, and end what was under way. Raises what ended the group."""
        server = None
        try:
            if not self._meet(leader):
                return
            group = RankGroup(dist.group.WORLD)
            server = PrefillServer(self._options, self._model, node, self._inbox, group, self._metrics)
            server.wait_registered(REGISTER_TIMEOUT_S)
            log.info("%d prefill ranks are one group", self._options.cp)
            while not self._over.is_set():
                self._unready = standing(node)
                if leader:
                    leader.check()
                server.turn()
        finally:
            self._unready = FORMING
            is_done = end_within(CLOSE_TIMEOUT_S, keeper.AGAIN)
            leave_group()
            if server:
                server.close()
            node.close()
            is_done.set()

    def _meet(self, leader: Leader | None) -> bool:
        options, is_over = self._options, self._over.is_set
        if leader:
            return leader.meet(options.group_timeout_s, is_over)
        return follow(options.leader_address, options.rank, options.cp, options.group_timeout_s, is_over)

    async def _prefill(self, request: web.Request) -> web.Response:
        try:
            asked = PrefillRequest.model_validate_json(await request.read())
        except ValidationError as error:
            return refuse(400, str(error.errors()[0]["msg"]), retry=False)
        if self._unready:
            return refuse(503, self._unready, retry=True)
        job = Job(asked.transfer_id, tuple(self._model.tokenizer.encode(asked.prompt)))
        try:
            self._inbox.put(job)
        except LimitReached as error:
            return refuse(503, str(error), retry=True)
        try:
            said = await job.next_answer()
        finally:
            job.has_left = True  # or has its answer
        if said["event"] == "error":
            return refuse(500 if said["retry"] else 400, said["text"], retry=said["retry"])
        return web.json_response(said)


def serve_prefill(options: PrefillOptions, model: ReferenceModel) -> int:
    """Serve until SIGTERM; the exit code. For a process with one thread, which forks (see `keeper`)."""
    return keeper.keep(lambda: PrefillProcess(options, model).run())
