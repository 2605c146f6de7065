"""Owns prefill ranks as processes of their own, which can be stopped and killed. What runs there is `rank_process`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pdlink.testing.child import Child
from tests.link.rig import Site

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0


class Rank:
    """One rank of instance `pre`. `wait_ready` before it is told anything; it ends with `stack`."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        site: Site,
        rank: int,
        *,
        num_layers: int,
        cp: int,
        num_pages: int = 16,
        **settings: object,
    ) -> None:
        self.process = Child(f"rank {rank}", "tests.link.rank_process", env={"PYTHONPATH": str(ROOT)})
        stack.callback(self.process.close)
        port = site.bootstrap.address.port
        who = {"num_layers": num_layers, "cp": cp, "rank": rank, "num_pages": num_pages, "port": port}
        self.process.say({**who, "settings": settings})

    def wait_ready(self) -> None:
        assert self.process.hear(START_TIMEOUT_S) == {"ready": True}

    def tell(self, **command: object) -> str:
        """Do something about a request (`id`), and answer its state."""
        return str(self.process.ask(ANSWER_TIMEOUT_S, **command)["state"])

    def publish(self, transfer_id: str, pages: list[int]) -> None:
        """Open a request with its bytes in `pages`, and publish all of them."""
        self.tell(do="open", id=transfer_id, pages=pages)
        self.tell(do="publish", id=transfer_id, pages=pages, last=True)


def start_ranks(
    stack: contextlib.ExitStack, site: Site, cp: int, num_layers: int, num_pages: int = 16, **settings: object
) -> list[Rank]:
    """All ranks of the instance, registered."""
    size = {"num_layers": num_layers, "cp": cp, "num_pages": num_pages}
    ranks = [Rank(stack, site, number, **size, **settings) for number in range(cp)]
    for rank in ranks:
        rank.wait_ready()
    return ranks
