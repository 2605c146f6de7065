"""What a sidecar tells probes and scrapers: one page for all its engines, and ready only with its transports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdlink.sidecar import SidecarNode
from pdlink.sidecar.server import SidecarServer
from tests import processes
from tests.observability.asking import Scrape, probe
from tests.processes import PATIENCE_S, wait_until
from tests.sidecar.rig import (
    NUM_LAYERS,
    PAGE_SIZE,
    REPO,
    Decode,
    Prefill,
    Rig,
    folder_for_sockets,
    is_gone,
    kill,
    serve,
    serve_at_last,
    serving,
)

pytestmark = pytest.mark.backend("ipc")

SOURCE, TARGET = [4, 0, 9], [1, 12, 7]
MOVED = len(TARGET) * NUM_LAYERS * PAGE_SIZE * (656 + 132)
HTTP = {"http_bind": "127.0.0.1:0"}


@dataclass
class Watched:
    """A sidecar with a prefill and a decode engine, each with a process of its own."""

    rig: Rig
    server: SidecarServer
    prefill: Prefill
    decode: Decode
    num_served: int = 0

    def serving_pid(self) -> int:
        """The process of the decode engine."""
        assert isinstance(self.decode.node, SidecarNode)
        return serving(self.decode.node)

    def serve(self) -> None:
        self.num_served += 1
        serve(self.rig, self.prefill, self.decode, f"t{self.num_served}", SOURCE, TARGET)

    def comes_to(self, value: float, name: str, **labels: str) -> bool:
        return wait_until(lambda: self.scrape().sum(name, **labels) == value)

    def scrape(self) -> Scrape:
        return Scrape(self.server.http_address)

    def complains(self, path: str, reason: str) -> bool:
        """Whether the probe fails, and gives a reason that begins so."""
        status, said = probe(self.server.http_address, path)
        return status == 503 and any(str(one).startswith(reason) for one in said["reasons"])

    def says(self, path: str, status: int) -> dict[str, object]:
        """What the probe says once it has that status."""
        assert wait_until(lambda: probe(self.server.http_address, path)[0] == status), probe(
            self.server.http_address, path
        )
        return probe(self.server.http_address, path)[1]


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with folder_for_sockets() as folder, contextlib.ExitStack() as stack:
        rig = Rig(stack, Path(folder))
        server = rig.server("all.sock", **HTTP)
        prefill, decode = rig.prefill(rig.connect(server.path)), rig.decode(rig.connect(server.path))
        yield Watched(rig, server, prefill, decode)


def test_one_page_has_what_all_engines_moved(watched: Watched) -> None:
    before = watched.scrape()
    for _ in range(2):
        watched.serve()
    assert watched.comes_to(
        before.sum("pdlink_requests_total", state="released") + 2, "pdlink_requests_total", state="released"
    )
    said = watched.scrape()
    for name, added in {
        "pdlink_transfer_bytes_total": 2 * MOVED,
        "pdlink_transfers_total": 2,
        "pdlink_transfer_seconds_count": 2,
        "pdlink_transfer_failures_total": 0,
    }.items():
        assert said.sum(name) == before.sum(name) + added, name
    assert said.sum("pdlink_transfer_seconds_bucket", le="+Inf") == said.sum("pdlink_transfer_seconds_count")
    assert said.sum("pdlink_sidecar_engines") == 2
    assert said.sum("pdlink_peers", state="connected") == 1
    assert said.sum("pdlink_healthy") == 1
    assert "# TYPE pdlink_transfer_bytes_total counter" in said.text
    names = [(one.name, tuple(sorted(one.labels.items()))) for one in said.samples]
    assert len(names) == len(set(names))


def test_it_is_ready_with_its_transports_and_names_every_part(watched: Watched) -> None:
    said = watched.says("/readyz", 200)
    assert (said["ok"], said["reasons"]) == (True, [])
    parts = said["parts"]
    assert parts["transports"] == parts["sidecar"] == ""
    assert sum(name.startswith("engine process ") and name.endswith(": decode dec") for name in parts) == 1


def test_what_a_killed_process_had_counted_stays_and_its_gauges_go(watched: Watched) -> None:
    watched.serve()
    pid = watched.serving_pid()
    before = watched.scrape()
    assert before.sum("pdlink_peers", state="connected") == 1
    kill(pid)
    assert wait_until(lambda: is_gone(pid) and watched.decode.node.health().ok)
    assert watched.comes_to(1, "pdlink_sidecar_engines_ended_total", how="failed")
    assert watched.comes_to(2, "pdlink_sidecar_engines")
    assert watched.comes_to(0, "pdlink_peers")
    assert watched.scrape().sum("pdlink_transfer_bytes_total") == before.sum("pdlink_transfer_bytes_total")
    serve_at_last(watched.rig, watched.prefill, watched.decode, "again", SOURCE, TARGET)
    assert watched.comes_to(before.sum("pdlink_transfer_bytes_total") + MOVED, "pdlink_transfer_bytes_total")


def test_a_process_that_stands_still_makes_the_sidecar_unwell_until_it_goes_on(watched: Watched) -> None:
    pid = watched.serving_pid()
    watched.says("/healthz", 200)
    kill(pid, signal.SIGSTOP)
    try:
        for path in ("/healthz", "/readyz"):
            said = f"engine process {pid}: it has not answered for "
            assert wait_until(lambda path=path, said=said: watched.complains(path, said)), path
    finally:
        kill(pid, signal.SIGCONT)
    watched.says("/healthz", 200)


@pytest.mark.slow
def test_a_rank_that_no_bootstrap_has_makes_it_not_ready(watched: Watched) -> None:
    with contextlib.ExitStack() as stack:
        rig = Rig(stack, watched.rig.folder)
        rig.prefill(rig.connect(watched.server.path), "lost")
        watched.says("/readyz", 200)
        rig.bootstrap.close()
        said = watched.says("/readyz", 503)
        assert str(rig.bootstrap.address) in said["reasons"][0]
    watched.says("/readyz", 200)


@contextlib.contextmanager
def command(path: Path, *options: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`pdlink sidecar` at `path`, with health and metrics."""
    line = [sys.executable, "-m", "pdlink", "sidecar", "--socket", str(path), "--http-bind", "127.0.0.1:0", *options]
    env = {**os.environ, **environ}
    with processes.started(line, stdout=subprocess.PIPE, text=True, cwd=REPO, env=env) as process:
        yield process


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout.readline().startswith("pdlink sidecar listens at ")
    return process.stdout.readline().removeprefix("health and metrics at http://").strip()


@pytest.mark.slow
def test_without_the_transports_that_it_is_to_have_it_is_not_ready_and_says_why() -> None:
    with folder_for_sockets() as folder, command(Path(folder) / "s", "--backends", "nixl", UCX_TLS="nosuch") as process:
        address = address_of(process)

        def reasons() -> list[str]:
            return [one for one in probe(address, "/readyz")[1]["reasons"] if "being tried" not in one]

        assert wait_until(lambda: bool(reasons()))
        assert probe(address, "/readyz")[0] == 503
        assert "nixl" in reasons()[0]
        assert probe(address, "/healthz")[0] == 200
        assert Scrape(address).sum("pdlink_ready") == 0


@pytest.mark.slow
def test_what_a_killed_sidecar_has_left_of_its_counts_is_gone_with_the_next_one() -> None:
    with folder_for_sockets() as folder:
        path = Path(folder) / "s"
        with command(path) as process:
            address_of(process)
            process.kill()
            process.wait(PATIENCE_S)
        (left,) = path.parent.glob("s.*.metrics")
        with command(path) as process:
            address_of(process)
            assert not left.exists()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        assert list(path.parent.iterdir()) == []
