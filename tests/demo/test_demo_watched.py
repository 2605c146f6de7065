"""The demo while somebody scrapes it: what its ranks show of the reads of each other's layers, and of what moved."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

import pytest

from pdlink.address import Address
from tests import processes
from tests.demo.command import COMMAND, TIMEOUT_S
from tests.observability.asking import Scrape
from tests.observability.test_prometheus import free_port

NUM_PORTS = 8
NUM_RUNS = 5
OPTIONS = ("--model", "glm-dsa-tiny", "--cp", "2", "--backend", "ipc", "--new-tokens", "8", "--json")
SEEN = {
    "pdlink_layer_reads_total": {},
    "pdlink_layer_fetch_bytes_total": {},
    "pdlink_layer_fetch_seconds_count": {"reader": "broadcast"},
    "pdlink_transfer_bytes_total": {"backend": "ipc"},
    "pdlink_scratch_hits_total": {},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("demo")
@pytest.mark.backend("ipc")
def test_a_scrape_of_a_running_demo_shows_reads_hits_fetches_and_bytes() -> None:
    """A demo is over within seconds: what no scrape met in one run, one meets in another."""
    most = dict.fromkeys(SEEN, 0.0)
    for _ in range(NUM_RUNS):
        scrape_demo(most)
        if all(most.values()):
            break
    assert {name for name, value in most.items() if not value} == set()


def scrape_demo(most: dict[str, float]) -> None:
    """Run a demo, scrape it all the while, and keep the most of each figure that was seen."""
    first = free_port()
    ports = range(first, first + NUM_PORTS)
    env = {**os.environ, "PDLINK_HTTP_BIND": f"127.0.0.1:{ports[0]}-{ports[-1]}"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with processes.started([COMMAND, "demo", *OPTIONS], env=env, **streams) as demo:
        give_up = time.monotonic() + TIMEOUT_S
        while demo.poll() is None and time.monotonic() < give_up:
            for port in ports:
                with contextlib.suppress(OSError, AssertionError):
                    said = Scrape(Address("127.0.0.1", port))
                    most.update({name: max(most[name], said.sum(name, **labels)) for name, labels in SEEN.items()})
            time.sleep(0.05)
        assert demo.wait(TIMEOUT_S) == 0, demo.stdout.read()
