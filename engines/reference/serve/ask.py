"""Owns a person's first look at a front: prompts go in, answers come out as they are made, with what moved for each."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from pdlink.errors import PdlinkError

TIMEOUT_S = 120.0
PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
)


def ask(url: str, prompts: tuple[str, ...], max_tokens: int) -> None:
    """Print each answer and the bytes that decode pulled from each owner. Raises `PdlinkError` with what went wrong."""
    for prompt in prompts:
        print(f"> {prompt}")
        last: dict[str, Any] = {}
        for event in events(url, {"prompt": prompt, "max_tokens": max_tokens, "stream": True}):
            if "error" in event:
                raise PdlinkError(f"the front at {url}: {event['error']['message']}")
            print(event["choices"][0]["text"], end="", flush=True)
            last = event
        print()
        for line in account(last):
            print(f"    {line}")


def account(last: dict[str, Any]) -> list[str]:
    """What the last event of a stream says of the transfer, as lines."""
    link, usage = last["pdlink"], last["usage"]
    pulled = link["pulled_bytes"]
    how = f"{', '.join(link['backends'])} ({', '.join(link['ways'])})"
    tries = f", {link['tries']} tries" if link["tries"] > 1 else ""
    lines = [f"{usage['prompt_tokens']} prompt tokens, {sum(pulled.values()):,} bytes pulled over {how}{tries}"]
    return lines + [f"{nbytes:>11,} bytes from {owner}" for owner, nbytes in sorted(pulled.items())]


def events(url: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S) -> Iterator[dict[str, Any]]:
    """The events of one streamed completion. Raises `PdlinkError` where the front refuses or cannot be reached."""
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    # No proxy of the environment stands between hosts of a rig.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            for line in response:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    return
                if text:
                    yield json.loads(text)
    except urllib.error.HTTPError as error:
        raise PdlinkError(f"the front at {url}: {json.loads(error.read())['error']['message']}") from error
    except OSError as error:
        raise PdlinkError(f"the front at {url} cannot be reached: {error}") from error
    raise PdlinkError(f"the front at {url} ended in the middle of an answer")
