"""Owns the front: OpenAI's `/v1/completions` for callers, and what a PD router does behind it.

A request gets a transfer id and goes to a prefill and a decode server at once, as sglang's router does it; decode is
told where the prefill side's bootstraps are. What decode says is passed on. A try that fails before the caller has seen
a token is made again, as a new transfer, until the front's patience is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdlink.address import parse_address
from pdlink.errors import ConfigError
from pdlink_engines.reference.serve.attempts import Attempts, TryFailed
from pdlink_engines.reference.serve.completions import Answer, CompletionRequest, error_body
from pdlink_engines.reference.serve.front_metrics import FrontMetrics
from pdlink_engines.reference.serve.http_thread import MAX_BODY_BYTES, SHUTDOWN_S

log = logging.getLogger("pdlink_engines.serve")

PROBE_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 3.0
MAX_LINE_BYTES = 1 << 20


class FrontOptions(BaseModel):
    """What a front is started with. `prefills` and `decodes` are URLs, taken in turn.

    `patience_s` bounds a request with all its tries, and `silence_s` each wait for decode's next word: a server that
    was cut off says nothing any more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    http: str
    model: str
    instance: str
    bootstraps: tuple[str, ...] = Field(min_length=1)
    prefills: tuple[str, ...] = Field(min_length=1)
    decodes: tuple[str, ...] = Field(min_length=1)
    patience_s: float = Field(90.0, gt=0)
    silence_s: float = Field(45.0, gt=0)


class Front:
    """The handlers of one front. All of it runs on one event loop."""

    def __init__(self, options: FrontOptions, session: aiohttp.ClientSession) -> None:
        self._options = options
        self._session = session
        self._metrics = FrontMetrics()
        self._prefills = itertools.cycle(options.prefills)
        self._decodes = itertools.cycle(options.decodes)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/readyz", self.readyz)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self._metrics.begin()
        outcome = "left"
        try:
            try:
                asked = self._check(await request.read())
            except ValueError as error:
                outcome = "refused"
                return web.json_response(error_body(str(error), "invalid_request_error"), status=400)
            answer = Answer(f"cmpl-{secrets.token_hex(12)}", self._options.model)
            if asked.stream:
                response, outcome = await self._stream(request, asked, answer)
            else:
                response, outcome = await self._whole(asked, answer)
            return response
        except ConnectionResetError:  # the caller has left, and reads no answer
            return web.Response()
        finally:
            self._metrics.end(outcome)

    async def models(self, request: web.Request) -> web.Response:
        one = {"id": self._options.model, "object": "model", "created": 0, "owned_by": "pdlink"}
        return web.json_response({"object": "list", "data": [one]})

    async def metrics(self, request: web.Request) -> web.Response:
        text, kind = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": kind})

    async def healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def readyz(self, request: web.Request) -> web.Response:
        """Whether a prefill and a decode server are ready."""
        reasons = [await self._unready("prefill", self._options.prefills)]
        reasons.append(await self._unready("decode", self._options.decodes))
        reasons = [text for text in reasons if text]
        return web.json_response({"ok": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    # --- inside -------------------------------------------------------------------------------------

    def _check(self, body: bytes) -> CompletionRequest:
        """Raises `ValueError` with the field and what is wrong with it."""
        try:
            asked = CompletionRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise ValueError(f"{where}: {first['msg']}") from error
        if asked.model not in (None, self._options.model):
            raise ValueError(f"model: {asked.model!r} is not served here; this is {self._options.model!r}")
        return asked

    async def _whole(self, asked: CompletionRequest, answer: Answer) -> tuple[web.Response, str]:
        async def take(text: str) -> None:
            answer.text += text

        try:
            await self._answer(asked, answer, take, Attempts(time.monotonic() + self._options.patience_s))
        except TryFailed as error:
            return self._refusal(error, answer), "refused" if not error.may_retry else "failed"
        return web.json_response(answer.whole()), "ok"

    async def _stream(
        self, request: web.Request, asked: CompletionRequest, answer: Answer
    ) -> tuple[web.StreamResponse, str]:
        """Server-sent events. The response begins with the first token, so that until then an error has a status."""
        attempts = Attempts(time.monotonic() + self._options.patience_s)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def take(text: str) -> None:
            if not response.prepared:
                await response.prepare(request)
            attempts.has_shown = True
            await response.write(_event(answer.chunk(text)))

        try:
            await self._answer(asked, answer, take, attempts)
        except TryFailed as error:
            if not response.prepared:
                return self._refusal(error, answer), "refused" if not error.may_retry else "failed"
            await response.write(_event(error_body(str(error), "server_error")))
            return response, "failed"
        await take("")
        await response.write(b"data: [DONE]\n\n")
        return response, "ok"

    def _refusal(self, error: TryFailed, answer: Answer) -> web.Response:
        if error.may_retry:
            tries = "the only try" if answer.tries == 1 else f"the last of {answer.tries} tries"
            text = f"{error} ({tries} within {self._options.patience_s:g} s)"
            return web.json_response(error_body(text, "server_error"), status=503)
        return web.json_response(error_body(str(error), "invalid_request_error"), status=400)

    async def _answer(
        self, asked: CompletionRequest, answer: Answer, take: Callable[[str], Any], attempts: Attempts
    ) -> None:
        """Try until it is answered. Raises the last `TryFailed`."""
        began = time.monotonic()
        while True:
            answer.restart(f"{answer.completion_id}-{attempts.count}")
            outcome = "left"
            try:
                async with contextlib.aclosing(self._try(asked, answer)) as texts:
                    async for text in texts:
                        if answer.num_tokens == 1:
                            self._metrics.first_token(time.monotonic() - began)
                        await take(text)
                outcome = "ok"
                return
            except TryFailed as failed:
                outcome = "failed"
                log.warning("%s failed: %s", answer.transfer_id, failed)
                pause_s = attempts.pause_s(failed, time.monotonic())
                if pause_s is None:
                    raise
            finally:
                self._metrics.tried(outcome)
            attempts.count += 1
            await asyncio.sleep(pause_s)

    async def _try(self, asked: CompletionRequest, answer: Answer) -> AsyncIterator[str]:
        """One transfer: the text as it comes. When this is left, both sides have been hung up on."""
        prefill = asyncio.create_task(self._prefill(next(self._prefills), asked, answer.transfer_id))
        try:
            async with contextlib.aclosing(self._decode(next(self._decodes), asked, answer.transfer_id)) as events:
                pending = asyncio.create_task(anext(events))
                try:
                    while True:
                        watched = {pending} if prefill.done() else {pending, prefill}
                        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                        if prefill.done():
                            prefill.result()  # a failure of prefill is one of the request
                        if not pending.done():
                            continue
                        said = pending.result()
                        text = self._hear(answer, said)
                        if text:
                            yield text
                        if said["event"] == "end":
                            return
                        pending = asyncio.create_task(anext(events))
                finally:
                    await _cancel(pending)
        finally:
            await _cancel(prefill)

    def _hear(self, answer: Answer, said: dict[str, Any]) -> str:
        """Take over one word of decode; the text in it."""
        event = said["event"]
        if event == "error":
            raise TryFailed(f"decode: {said['text']}", may_retry=bool(said["retry"]))
        if event == "received":
            answer.num_prompt_tokens = said["num_prompt_tokens"]
            answer.pulled_bytes, answer.backends, answer.ways = said["pulled_bytes"], said["backends"], said["ways"]
            self._metrics.received(answer.pulled_bytes)
        elif event == "token":
            answer.tokens.append(said["token"])
            answer.num_tokens += 1
            self._metrics.token()
        elif event == "end":
            answer.finish_reason = said["finish_reason"]
        return str(said.get("text", ""))

    async def _prefill(self, url: str, asked: CompletionRequest, transfer_id: str) -> None:
        """Raises `TryFailed`."""
        body = {"transfer_id": transfer_id, "prompt": asked.prompt}
        with _translated("prefill", url):
            async with self._session.post(f"{url}/prefill", json=body) as response:
                if response.status != 200:
                    raise await _refused("prefill", response)
                await response.read()

    async def _decode(self, url: str, asked: CompletionRequest, transfer_id: str) -> AsyncIterator[dict[str, Any]]:
        """What decode says, a line each. Raises `TryFailed`, also where it ends without an end."""
        body = {
            "transfer_id": transfer_id,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "instance": self._options.instance,
            "bootstraps": list(self._options.bootstraps),
        }
        with _translated("decode", url):
            async with self._session.post(f"{url}/decode", json=body) as response:
                if response.status != 200:
                    raise await _refused("decode", response)
                async for line in response.content:
                    yield json.loads(line)
        raise TryFailed(f"decode at {url} ended in the middle of an answer", may_retry=True)

    async def _unready(self, what: str, urls: tuple[str, ...]) -> str:
        """What keeps all of `urls` from serving, "" when one does."""
        reasons = []
        for url in urls:
            try:
                timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
                async with self._session.get(f"{url}/readyz", timeout=timeout) as response:
                    if response.status == 200:
                        return ""
                    reasons.append(f"{what} at {url}: {(await response.json())['reason']}")
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                reasons.append(f"{what} at {url}: {_said(error)}")
        return "; ".join(reasons)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _translated(what: str, url: str) -> Any:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise TryFailed(f"{what} at {url}: {_said(error)}", may_retry=True) from error


async def _refused(what: str, response: aiohttp.ClientResponse) -> TryFailed:
    said = await response.json()
    return TryFailed(f"{what}: {said['text']}", may_retry=bool(said["retry"]))


async def _cancel(task: asyncio.Task[Any]) -> None:
    """End a task and forget what it raises: it was heard of already, or nobody wants to know."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def _serve(options: FrontOptions) -> None:
    address = parse_address(options.http)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=options.silence_s)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, trust_env=False, read_bufsize=MAX_LINE_BYTES
    ) as session:
        runner = web.AppRunner(
            Front(options, session).app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, address.host, address.port, reuse_address=True).start()
        except OSError as error:
            raise ConfigError(f"--http {address} cannot be bound: {error.strerror or error}") from error
        log.info("the front serves at http://%s/v1/completions", address)
        await over.wait()
        await runner.cleanup()


def serve_front(options: FrontOptions) -> int:
    """Serve until SIGTERM; the exit code."""
    asyncio.run(_serve(options))
    return 0
