"""Whole requests by every way over one backend, in a process of its own: transport libraries stay loaded until it ends.

Run by `test_staged_backends` with the backend's name; prints the ways that were taken as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import sys

from tests.link.rig import DEADLINE_S, PAGE_SIZE, assert_whole, make_layout
from tests.link.staged import assert_slots_back, publish_scattered, staged_site

NUM_PAGES = 24


def main(backend: str) -> None:
    taken = {}
    with contextlib.ExitStack() as stack:
        site = staged_site(stack, backends=backend, staging_slots=2, staging_slot_bytes=256 << 10)
        layout = make_layout(6)
        owners = site.prefill(layout, 2, num_pages=64, way="auto")
        for way in ("staged", "auto", "direct"):
            decode = site.decode(layout, name=f"dec-{way}", num_pages=64, way=way)
            for number in range(3):
                name = f"{way}{number}"
                target = {"kv": site.scatter(decode.pool, NUM_PAGES)}
                receiver = decode.worker.receive(name, site.instance, target, NUM_PAGES * PAGE_SIZE)
                publish_scattered(site, owners, NUM_PAGES, name)
                result = receiver.wait(DEADLINE_S)
                assert decode.pool.find_wrong(name, target) is None
                if not number:
                    assert_whole(decode, name, target)
                taken[way] = sorted({one for ways in result.ways.values() for one in ways})
            if way != "direct":
                assert_slots_back([decode.node, *(owner.node for owner in owners)])
    print(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1])
