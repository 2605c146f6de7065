"""Owns the process that plays the prefill side of a scenario: it fills pages, serves them, and does as it is told.

Run as `python -m pdlink.testing.conformance.owner_process SETUP SPEC`. One line of JSON tells the endpoints and regions
of its ranks; then it answers one line for each one that it is sent, until its standard input ends.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import asdict
from typing import Any

from pdlink.backends.base import Backend
from pdlink.errors import InvalidInput
from pdlink.testing.conformance.owner import Spec
from pdlink.testing.conformance.pool import make_pool
from pdlink.testing.conformance.setup import Setup
from pdlink.testing.parent import Parent
from pdlink.testing.pattern import PatternPool


class _Rank:
    def __init__(self, setup: Setup, spec: Spec) -> None:
        size = (spec.num_layers, spec.num_pages, spec.page_bytes, spec.gap)
        self.pool: PatternPool = make_pool(setup.memory, *size, sparse=spec.sparse, device=setup.devices[0])
        self.pool.fill(spec.transfer_id, {"kv": range(spec.num_pages)})
        self.backend: Backend = setup.make()
        for region in self.pool.regions[::-1] if spec.backwards else self.pool.regions:
            self.backend.register(region)

    def facts(self) -> dict[str, Any]:
        endpoint = base64.b64encode(self.backend.endpoint()).decode()
        self.backend.serve("owner", 1)
        return {"endpoint": endpoint, "regions": [asdict(one) for one in self.pool.regions]}

    def deregister(self) -> None:
        for region in self.pool.regions:
            self.backend.deregister(region)

    def close(self) -> None:
        self.backend.close()
        self.pool.close()


def main(setup_text: str, spec_text: str) -> None:
    parent = Parent()
    setup, spec = Setup.from_json(setup_text), Spec(**json.loads(spec_text))
    ranks = [_Rank(setup, spec) for _ in range(spec.num_ranks)]
    parent.say({"ranks": [rank.facts() for rank in ranks]})
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] != "deregister":
            raise InvalidInput(f"an owner cannot {question['do']!r}")
        for rank in ranks:
            rank.deregister()
        parent.say({"done": True})
    for rank in ranks:
        rank.close()
    sys.exit(spec.exit_code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
