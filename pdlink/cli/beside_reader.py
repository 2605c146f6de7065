"""Owns the decode side of `pdlink bench sidecar`, as a process of its own: it pulls request after request until it is
told to stop, and says how much came.
"""

from __future__ import annotations

import itertools
import json
import select
import sys
import time
from collections import deque

from pdlink.address import parse_address
from pdlink.cli.beside_engine import INSTANCE, NUM_LIVE, PAGE_SIZE, PATTERN, make_layout, make_pool
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.runtime.node import Node
from pdlink.testing.parent import Parent

LOOK_S = 0.1


def main() -> None:
    parent, told = Parent(), json.loads(sys.stdin.readline() or "{}")
    if not told:
        return
    layout, num_pages = make_layout(told["num_layers"]), int(told["num_pages"])
    pool = make_pool(layout, NUM_LIVE * num_pages, told["on_gpu"], told["device"])
    prefill = PrefillInstance(INSTANCE, (parse_address(told["bootstrap"]),))
    with Node(load_settings()) as node:
        worker = node.decode("decode", layout, pool.regions)
        parent.say("ready")
        numbers = itertools.count()
        live: deque[tuple[list[int], Receiver]] = deque()
        num_done, first, last, newest, ways = 0, 0.0, 0.0, list[int](), set[str]()
        while not is_told_to_stop():
            while len(live) < NUM_LIVE:
                number = next(numbers)
                start = number % NUM_LIVE * num_pages
                pages = list(range(start, start + num_pages))
                receiver = worker.receive(f"request-{number}", prefill, {"kv": pages}, num_pages * PAGE_SIZE)
                live.append((pages, receiver))
            try:
                result = live[0][1].wait(LOOK_S)
            except DeadlineExceeded:
                continue
            except TransferFailed:
                break  # the engine has ended, and aborts what it had not finished
            newest, _ = live.popleft()
            last = time.monotonic()
            first = first or last
            num_done += 1
            ways.update(str(one) for of_owner in result.ways.values() for one in of_owner)
        for _, receiver in live:
            receiver.abort()
        if not is_told_to_stop():
            sys.stdin.readline()
        worker.close()
        nbytes = sum(one.page_bytes for one in pool.regions) * num_pages
        rate = (num_done - 1) * nbytes / (last - first) if num_done > 1 else 0.0
        wrong = pool.find_wrong(PATTERN, {"kv": newest}) if newest else None
        parent.say({"num_requests": num_done, "bytes_per_s": rate, "ways": sorted(ways), "wrong": str(wrong or "")})
        sys.stdin.read()
    pool.close()


def is_told_to_stop() -> bool:
    """Whether the parent has said something, or ended; nothing is read."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
