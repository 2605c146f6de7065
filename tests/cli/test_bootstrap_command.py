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
from pathlib import Path

import pytest

from pdlink.address import Address, parse_address
from pdlink.bootstrap.client import BootstrapClient
from pdlink.config import Settings, load_settings
from pdlink.errors import AccessDenied, UnknownInstance
from pdlink.layout import CacheLayout, fingerprint
from pdlink.layout.components import latent
from tests import processes
from tests.security.pki import Pki

BOOTSTRAP = [sys.executable, "-m", "pdlink", "bootstrap"]


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return processes.run([*BOOTSTRAP, *options], env=env)


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.started([*BOOTSTRAP, *options], text=True, **pipes) as child:
        line = child.stdout.readline()
        found = re.fullmatch(r"bootstrap serves at (\S+)\n", line)
        assert found, line
        yield child, parse_address(found[1])


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
        out, err = child.communicate(timeout=processes.PATIENCE_S)
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


def test_it_serves_with_the_certificate_and_token_of_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLINK_LOG", "info")
    pki = Pki.make(tmp_path)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in pki.mutual_server.items()]
    with served("--bind", "127.0.0.1:0", "--token-file", str(token), *options) as (child, address):
        good = load_settings({}, **pki.mutual_client, token_file=str(token))
        layout = CacheLayout(1, (latent(64, [0], bytes_per_token=8),))
        with BootstrapClient((address,), good) as client, pytest.raises(UnknownInstance):
            client.resolve("nobody", fingerprint(layout))
        other = load_settings({}, **pki.mutual_client, token="fedcba9876543210")
        with BootstrapClient((address,), other) as client, pytest.raises(AccessDenied, match="wrong token"):
            client.resolve("nobody", fingerprint(layout))
        child.terminate()
        _, said = child.communicate(timeout=processes.PATIENCE_S)
    assert "TLS with client certificates, a token" in said
    assert f"bootstrap {address} refused 127.0.0.1: wrong token" in said
    assert "0123456789abcdef" not in said
    assert "fedcba9876543210" not in said


def test_credentials_that_cannot_be_used_are_one_line_and_exit_2(tmp_path: Path) -> None:
    ended = run("--bind", "127.0.0.1:0", "--tls-certificate", str(tmp_path / "none.pem"), "--tls-key", "k")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert f"PDLINK_TLS_CERTIFICATE='{tmp_path}/none.pem' cannot be read" in line
