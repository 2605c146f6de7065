"""`pdlink bootstrap` as a process: it serves, ends in order, and refuses what it cannot listen at."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdlink.address import Address, parse_address
from pdlink.bootstrap.client import BootstrapClient
from pdlink.config import Settings
from pdlink.errors import UnknownInstance
from pdlink.layout import CacheLayout, fingerprint
from pdlink.layout.components import latent

BOOTSTRAP = [sys.executable, "-m", "pdlink", "bootstrap"]


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(
        [*BOOTSTRAP, *options],
        capture_output=True,
        text=True,
        timeout=40,
        env=env,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    child = subprocess.Popen([*BOOTSTRAP, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        found = re.fullmatch(r"bootstrap serves at (\S+)\n", line)
        assert found, line
        yield child, parse_address(found[1])
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with served("--bind", "127.0.0.1:0") as (child, address):
        client = BootstrapClient((address,), Settings())
        try:
            with pytest.raises(UnknownInstance):
                client.resolve("nobody", fingerprint(CacheLayout(1, (latent(64, [0], bytes_per_token=8),))))
        finally:
            client.close()
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
        assert (child.returncode, err) == (0, "")
        assert out == "bootstrap stops\n"


def test_a_port_in_use_is_refused_in_one_line() -> None:
    with served("--bind", "127.0.0.1:0") as (_, address):
        done = run("--bind", str(address))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert str(address) in done.stderr


def test_a_port_of_another_program_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("--bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("bind", ["localhost", "127.0.0.1:70000", "[::1:80", "192.0.2.1:7400"])
def test_an_address_that_cannot_be_used_is_named(bind: str) -> None:
    done = run("--bind", bind)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert bind in done.stderr


def test_a_wildcard_needs_a_host_to_tell_peers() -> None:
    wildcard = ".".join("0000")
    refused = run("--bind", f"{wildcard}:0")
    assert refused.returncode == 2
    assert "PDLINK_ADVERTISE_HOST" in refused.stderr
    with served("--bind", f"{wildcard}:0", "--advertise-host", "127.0.0.1") as (_, address):
        assert address.host == "127.0.0.1"


def test_a_wrong_environment_setting_is_refused_in_one_line() -> None:
    done = run("--bind", "127.0.0.1:0", PDLINK_REGISTRATION_LEASE="5")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean PDLINK_REGISTRATION_LEASE_S?" in done.stderr
