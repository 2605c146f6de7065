"""Owns the request that makes a prefill server compute a retracted request again. It runs on a background thread.

sglang retracts running requests before it updates weights, and then wants their prefix from the prefill server anew.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from pdlink.address import Address, parse_address
from pdlink_engines.sglang.http_answers import PrefillFacts

log = logging.getLogger("pdlink.sglang")


def request_recompute(
    receiver: Any, known: Mapping[str, PrefillFacts], payload: Mapping[str, Any], timeout_s: float
) -> None:
    """POST `payload` to `/generate` of the receiver's prefill server; a failure fails the receiver, with the reason."""
    facts = known.get(receiver.bootstrap_addr)
    if facts is None or facts.prefill_http_port is None:
        receiver.fail(f"prefill server {receiver.bootstrap_addr} did not say where its /generate is")
        return
    url = f"http://{Address(parse_address(receiver.bootstrap_addr).host, facts.prefill_http_port)}/generate"
    body = json.dumps(payload).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            answer.read()
    except (OSError, urllib.error.URLError) as error:
        receiver.fail(f"{url} did not recompute request {payload.get('rid')}: {error}")
    except Exception as error:  # a thread boundary
        log.exception("recomputing request %s failed", payload.get("rid"))
        receiver.fail(f"{url} did not recompute request {payload.get('rid')}: {type(error).__name__}: {error}")
