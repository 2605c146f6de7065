"""Owns the process of a decode server: its HTTP side and its link. It computes nothing (see `decode_rank`)."""

from __future__ import annotations

import json
import logging
import signal
import threading

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdlink.errors import LimitReached
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.serve.decode_rank import DecodeServer
from pdlink_engines.reference.serve.http_thread import MAX_ID_CHARS, MAX_PROMPT_CHARS, HttpThread, refuse
from pdlink_engines.reference.serve.jobs import Inbox, Job
from pdlink_engines.reference.serve.link import open_link, standing
from pdlink_engines.reference.serve.options import EngineOptions

log = logging.getLogger("pdlink_engines.serve")

MAX_BOOTSTRAPS = 16


class DecodeRequest(BaseModel):
    """The body of POST /decode: `instance` and `bootstraps` say where the prefill side is."""

    model_config = ConfigDict(extra="forbid")

    transfer_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    prompt: str = Field(min_length=1, max_length=MAX_PROMPT_CHARS)
    max_tokens: int = Field(ge=1)
    instance: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    bootstraps: list[str] = Field(min_length=1, max_length=MAX_BOOTSTRAPS)


class DecodeProcess:
    """One decode server, from its start to SIGTERM."""

    def __init__(self, options: EngineOptions, model: ReferenceModel) -> None:
        self._options = options
        self._model = model
        self._inbox = Inbox(options.max_requests)
        self._over = threading.Event()
        self._unready = "this decode server is starting"

    def run(self) -> int:
        """Serve until SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._over.set())
        http = HttpThread(self._options.http_address, {"POST /decode": self._decode}, lambda: self._unready)
        try:
            with open_link(self._options, self._over.is_set) as node:
                server = DecodeServer(self._options, self._model, node, self._inbox)
                log.info("decode serves at %s", self._options.http)
                while not self._over.is_set():
                    self._unready = standing(node)
                    server.turn()
                self._unready = "this decode server is ending"
                server.close()
        finally:
            http.close()
        return 0

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        """A JSON object a line: `received`, then a `token` each, then `end`; or `error`, after which nothing comes."""
        try:
            asked = DecodeRequest.model_validate_json(await request.read())
        except ValidationError as error:
            return refuse(400, str(error.errors()[0]["msg"]), retry=False)
        if self._unready:
            return refuse(503, self._unready, retry=True)
        where = {"instance": asked.instance, "bootstraps": asked.bootstraps, "max_tokens": asked.max_tokens}
        job = Job(asked.transfer_id, tuple(self._model.tokenizer.encode(asked.prompt)), **where)
        try:
            self._inbox.put(job)
        except LimitReached as error:
            return refuse(503, str(error), retry=True)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await response.prepare(request)
            while True:
                said = await job.next_answer()
                await response.write(json.dumps(said).encode() + b"\n")
                if said["event"] in ("end", "error"):
                    return response
        except ConnectionResetError:  # the caller has left, and reads no answer
            return response
        finally:
            job.has_left = True


def serve_decode(options: EngineOptions, model: ReferenceModel) -> int:
    """Serve until SIGTERM; the exit code."""
    return DecodeProcess(options, model).run()
