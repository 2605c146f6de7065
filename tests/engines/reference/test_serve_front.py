"""The front between a caller and servers that answer as prefill and decode do, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdlink_engines.reference.serve.front import Front, FrontOptions

Said = list[dict[str, Any]]
ERROR = {"event": "error", "text": "an owner is gone", "retry": True}
RECEIVED = {
    "event": "received",
    "num_prompt_tokens": 3,
    "pulled_bytes": {"p/0": 7, "p/1": 9},
    "backends": ["nixl"],
    "ways": ["staged"],
    "elapsed_s": 0.1,
}
ANSWER: Said = [
    RECEIVED,
    {"event": "token", "token": 4, "text": "a"},
    {"event": "token", "token": 5, "text": "b"},
    {"event": "end", "finish_reason": "length", "num_tokens": 2},
]


@dataclass
class Sides:
    """What the two servers say, one list a try, and what they were asked. `hold`: decode waits for ever at its end."""

    decode: list[Said]
    prefill: list[dict[str, Any]] = field(default_factory=list)
    hold: bool = False
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_prefill(self, request: web.Request) -> web.Response:
        self.asked.append(("prefill", await request.json()))
        said = self.prefill.pop(0) if self.prefill else {"event": "prefilled"}
        return web.json_response(said, status=500 if said["event"] == "error" else 200)

    async def on_decode(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(("decode", await request.json()))
        response = web.StreamResponse()
        await response.prepare(request)
        for one in self.decode.pop(0):
            await response.write(json.dumps(one).encode() + b"\n")
        if self.hold:
            try:
                await asyncio.sleep(3600)
            finally:
                self.left.set()
        return response

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/prefill", self.on_prefill)
        app.router.add_post("/decode", self.on_decode)
        return app


@contextlib.asynccontextmanager
async def serving(sides: Sides, patience_s: float = 60.0) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    async with contextlib.AsyncExitStack() as stack:
        behind = await stack.enter_async_context(TestServer(sides.app(), handler_cancellation=True))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = str(behind.make_url("")).rstrip("/")
        options = FrontOptions(
            http="127.0.0.1:0",
            model="m",
            instance="prefill",
            bootstraps=("b-0:7400", "b-1:7400"),
            prefills=(url,),
            decodes=(url,),
            patience_s=patience_s,
        )
        front = Front(options, session)
        server = await stack.enter_async_context(TestServer(front.app(), handler_cancellation=True))
        yield str(server.make_url("")).rstrip("/"), session


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))


async def complete(url: str, session: aiohttp.ClientSession, status: int = 200, **body: Any) -> dict[str, Any]:
    async with session.post(f"{url}/v1/completions", json={"prompt": "hello", **body}) as response:
        assert response.status == status, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def counted(url: str, session: aiohttp.ClientSession, name: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_a_request_goes_to_both_sides_under_one_transfer_id() -> None:
    async def body() -> None:
        sides = Sides([ANSWER])
        async with serving(sides) as (url, session):
            found = await complete(url, session, max_tokens=2)
        assert found["choices"][0] == {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert found["pdlink"]["pulled_bytes"] == {"p/0": 7, "p/1": 9}
        asked = dict(sides.asked)
        assert asked["prefill"]["transfer_id"] == asked["decode"]["transfer_id"] == found["pdlink"]["transfer_id"]
        assert asked["decode"]["bootstraps"] == ["b-0:7400", "b-1:7400"]

    run(body)


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ([[ERROR], ANSWER], []),
        ([[RECEIVED, {"event": "token", "token": 9, "text": "x"}], ANSWER], []),
        ([ANSWER, ANSWER], [ERROR]),
    ],
    ids=["decode says an error", "decode ends in the middle", "prefill says an error"],
)
def test_a_try_that_fails_is_made_again_as_another_transfer(decode: list[Said], prefill: Said) -> None:
    async def body() -> None:
        sides = Sides(decode, prefill)
        async with serving(sides) as (url, session):
            found = await complete(url, session)
            assert (
                await counted(url, session, 'pdlink_front_tries_total{outcome="failed"}')
                == found["pdlink"]["tries"] - 1
            )
        assert found["choices"][0]["text"] == "ab"
        assert len({told["transfer_id"] for _, told in sides.asked}) == found["pdlink"]["tries"]

    run(body)


def test_a_request_that_is_never_answered_fails_when_the_patience_is_over() -> None:
    async def body() -> None:
        sides = Sides([[ERROR] for _ in range(100)])
        async with serving(sides, patience_s=0.5) as (url, session):
            found = await complete(url, session, status=503)
            assert re.search(r"an owner is gone .*the last of \d+ tries within 0.5 s", found["error"]["message"])
            assert await counted(url, session, 'pdlink_front_requests_total{outcome="failed"}') == 1

    run(body)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n: "),
        ({"model": "other"}, "'other' is not served here"),
        ({"top_p": 0.5}, "top_p"),
    ],
)
def test_what_the_front_cannot_do_is_refused_by_the_fields_name(body: dict[str, Any], said: str) -> None:
    async def ask() -> None:
        sides = Sides([])
        async with serving(sides) as (url, session):
            found = await complete(url, session, status=400, **body)
        assert said in found["error"]["message"]
        assert sides.asked == []

    run(ask)


def test_a_stream_shows_each_token_and_ends_with_what_moved() -> None:
    async def body() -> None:
        async with serving(Sides([ANSWER])) as (url, session):
            async with session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
                text = await response.text()
            assert await counted(url, session, "pdlink_front_tokens_total") == 2
            assert await counted(url, session, 'pdlink_front_received_bytes_total{owner="p/1"}') == 9
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        assert [one["choices"][0]["text"] for one in events] == ["a", "b", ""]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert events[-1]["pdlink"]["tokens"] == [4, 5]

    run(body)


def test_a_stream_that_breaks_after_a_token_says_so_and_is_not_begun_again() -> None:
    async def body() -> None:
        sides = Sides([[*ANSWER[:2], ERROR], ANSWER])
        async with (
            serving(sides) as (url, session),
            session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response,
        ):
            text = await response.text()
        assert "an owner is gone" in text
        assert "[DONE]" not in text
        assert len([what for what, _ in sides.asked if what == "decode"]) == 1

    run(body)


def test_decode_is_hung_up_on_when_the_caller_leaves() -> None:
    async def body() -> None:
        sides = Sides([ANSWER[:2]], hold=True)
        async with serving(sides) as (url, session):
            async with session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
                await response.content.readline()
                response.close()
            await asyncio.wait_for(sides.left.wait(), 60)

    run(body)
