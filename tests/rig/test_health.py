"""The health check of the rig's containers, against servers that answer well, badly and not at all."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.rig.rig import REPO


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def check(where: str) -> tuple[int, str]:
    """Exit code and what it says."""
    command = [sys.executable, "-IS", str(REPO / "docker" / "health"), where]
    done = processes.run(command, timeout_s=60, stderr=subprocess.STDOUT)
    return done.returncode, str(done.stdout)


def test_a_server_that_answers_well_is_well(server: str) -> None:
    assert check(f"{server}/healthz") == (0, "")


def test_a_bad_status_is_said(server: str) -> None:
    code, said = check(f"{server}/readyz")
    assert code == 1
    assert "status 503" in said


def test_nobody_there_is_said() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and listens not
        where = f"http://127.0.0.1:{held.getsockname()[1]}/healthz"
        code, said = check(where)
    assert code == 1
    assert said.startswith(where)


def test_a_socket_that_is_listened_to_is_well(tmp_path: Path) -> None:
    path = tmp_path / "link.sock"
    assert check(f"unix:{path}")[0] == 1
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert check(f"unix:{path}") == (0, "")


@pytest.mark.parametrize("where", ["https://127.0.0.1:1/", "http://127.0.0.1/healthz"])
def test_what_cannot_be_asked_is_said(where: str) -> None:
    assert check(where)[0] == 1


def test_a_container_that_serves_nothing_is_content() -> None:
    assert check("") == (0, "")
