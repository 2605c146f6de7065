"""A real Prometheus scrapes a running link, and what it answers over its own HTTP API is what moved."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlink.address import Address
from tests.link.rig import PAGE_SIZE, Site, make_layout
from tests.observability.asking import ask
from tests.processes import PATIENCE_S, started, wait_until
from tests.sidecar import rig as sidecars

PROMETHEUS = shutil.which("prometheus")
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
scrape_configs:
  - job_name: pdlink
    static_configs:
      - targets: [{targets}]
"""
# Below what Linux gives to clients, so that nobody takes the port before Prometheus binds it.
PORTS = range(18_000, 32_000)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.backend("ipc"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(PROMETHEUS is None, reason="needs the program prometheus (Debian package prometheus)"),
]


def free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[Address]) -> Iterator[Address]:
    """A Prometheus that scrapes `targets`, once it says that it is ready."""
    address = Address("127.0.0.1", free_port())
    (folder / "prometheus.yml").write_text(CONFIG.format(targets=", ".join(f"'{one}'" for one in targets)))
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("wb") as log, started(command, stdout=log, stderr=subprocess.STDOUT) as process:

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                return ask(address, "/-/ready")[0] == 200
            return False

        assert wait_until(is_ready), (folder / "log").read_text()
        yield address


def query(address: Address, expression: str) -> float | None:
    """The value of one expression now, or None where there is none yet."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        said = json.load(answer)
    assert said["status"] == "success", said
    results = said["data"]["result"]
    return float(results[0]["value"][1]) if results else None


def comes_to(address: Address, expression: str, value: float) -> bool:
    return wait_until(lambda: query(address, expression) == value)


def test_a_real_prometheus_reads_the_bytes_that_moved(site: Site, tmp_path: Path) -> None:
    layout = make_layout(8)
    owners, decode = site.prefill(layout, 2, http_bind="127.0.0.1:0"), site.decode(layout, http_bind="127.0.0.1:0")
    targets = [one.node.http_address for one in (*owners, decode)]
    moved = 0
    with prometheus(tmp_path, targets) as address:
        for number in range(5):
            pages = site.scatter(decode.pool, 3)
            receiver = decode.worker.receive(f"t{number}", site.instance, {"kv": pages}, 3 * PAGE_SIZE)
            for owner in owners:
                mine = site.scatter(owner.pool, 3)
                owner.open(f"t{number}", {"kv": mine}).publish(mine, last=True)
            moved += sum(receiver.wait(PATIENCE_S).num_bytes.values())
        assert moved == 5 * 3 * 8 * PAGE_SIZE * (656 + 132)
        for expression, value in {
            "sum(pdlink_transfer_bytes_total)": moved,
            'sum(pdlink_transfer_bytes_total{backend="ipc",way="mapped"})': moved,
            'sum(pdlink_transfers_total{state="done"})': 5,
            'sum(pdlink_requests_total{state="released"})': 2 * 5,
            "sum(pdlink_transfer_seconds_count)": 5,
            'sum(pdlink_transfer_seconds_bucket{le="+Inf"})': 5,
            "sum(pdlink_ready)": len(targets),
            "sum(up)": len(targets),
        }.items():
            assert comes_to(address, expression, value), f"{expression} is {query(address, expression)}"


def test_a_real_prometheus_reads_the_bytes_that_moved_between_sidecars(
    stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    rig = sidecars.Rig(stack, Path(stack.enter_context(sidecars.folder_for_sockets())))
    servers = [rig.server(name, http_bind="127.0.0.1:0") for name in ("pre.sock", "dec.sock")]
    prefill, decode = rig.prefill(rig.connect(servers[0].path)), rig.decode(rig.connect(servers[1].path))
    moved = 0
    with prometheus(tmp_path, [one.http_address for one in servers]) as address:
        for number in range(4):
            sender = prefill.open(f"t{number}", [5, 2, 9])
            receiver = decode.worker.receive(f"t{number}", rig.instance, {"kv": [1, 8, 3]}, 3 * sidecars.PAGE_SIZE)
            sender.publish([5, 2, 9], last=True)
            moved += sum(receiver.wait(PATIENCE_S).num_bytes.values())
        assert moved == 4 * 3 * sidecars.NUM_LAYERS * sidecars.PAGE_SIZE * (656 + 132)
        for expression, value in {
            "sum(pdlink_transfer_bytes_total)": moved,
            'sum(pdlink_transfers_total{state="done"})': 4,
            'sum(pdlink_requests_total{state="released"})': 4,
            "sum(pdlink_sidecar_engines)": 2,
            "sum(pdlink_ready)": 2,
            "sum(up)": 2,
        }.items():
            assert comes_to(address, expression, value), f"{expression} is {query(address, expression)}"
        # What a process had counted outlives it.
        sidecars.kill(decode.node.pid)
        assert comes_to(address, 'sum(pdlink_sidecar_engines_ended_total{how="failed"})', 1)
        assert query(address, "sum(pdlink_transfer_bytes_total)") == moved
