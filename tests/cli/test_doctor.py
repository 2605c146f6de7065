"""`pdlink doctor`: what is not well has a fix, a real transfer is made, and what crashes is a finding."""

from __future__ import annotations

import json
import resource
import socket
import sys
from pathlib import Path

import pytest

from pdlink.cli import doctor_machine as machine
from pdlink.cli import doctor_parts as parts
from pdlink.cli import main as command
from pdlink.cli.doctor_finding import ERROR, OK, WARNING, Finding
from pdlink.cli.doctor_settings import named
from pdlink.config import Settings, load_settings

UNLIMITED = resource.RLIM_INFINITY


def test_fast_looks_at_the_machine_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_child", lambda *_: pytest.fail("a process was started"))
    assert command.main(["doctor", "--fast", "--json"]) in (0, 1)
    said = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in said["findings"]]
    assert names[:2] == ["settings", "interpreter"]
    assert {"shared memory", "open files", "memlock", "verbs devices", "control sockets", "reach"} <= set(names)
    for one in said["findings"]:
        assert set(one) == {"name", "state", "text", "fix"}
        assert bool(one["fix"]) == (one["state"] != OK)
    assert said["ok"] == all(one["state"] != ERROR for one in said["findings"])


def test_settings_that_cannot_be_used_are_an_error_and_the_rest_is_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLINK_MAX_PERS", "4")
    assert command.main(["doctor", "--fast"]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("error   settings: unknown environment setting PDLINK_MAX_PERS='4'; did you mean")
    assert lines[1].strip().startswith("-> ")
    assert any(line.startswith("ok      interpreter") for line in lines)
    assert "1 of" in captured.err


def test_a_finding_that_is_not_well_needs_a_fix() -> None:
    for state, fix in ((ERROR, ""), (WARNING, ""), (OK, "do it"), ("bad", "do it")):
        with pytest.raises(ValueError, match="finding 'x'"):
            Finding("x", state, "text", fix)


def test_little_shared_memory_is_told_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shm(tmp_path / "none").state == ERROR
    plenty = 1 << 62
    for least, little, state in ((plenty, plenty, ERROR), (0, plenty, WARNING), (0, 0, OK)):
        monkeypatch.setattr(machine, "LEAST_SHM", least)
        monkeypatch.setattr(machine, "LITTLE_SHM", little)
        found = machine.shm(tmp_path)
        assert (found.state, found.text.split()[0]) == (state, str(tmp_path))
        assert ("shm-size" in found.fix) == (state != OK)


@pytest.mark.parametrize(
    ("soft", "hard", "state"),
    [(1024, 1024, WARNING), (1024, 1 << 20, WARNING), (1 << 20, 1 << 20, OK), (UNLIMITED, UNLIMITED, OK)],
)
def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, state: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    found = {one.name: one for one in machine.limits(Settings())}
    assert found["open files"].state == state


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ({}, OK),
        ({"bind_host": "192.0.2.1"}, WARNING),
        ({"bind_host": "192.0.2.1", "token": "0123456789abcdef"}, OK),
    ],
)
def test_an_open_address_without_credentials_is_a_warning(settings: dict[str, str], state: str) -> None:
    found = {one.name: one for one in machine.ports(load_settings({}, **settings))}
    assert found["reach"].state == state
    assert found["control sockets"].state == (ERROR if settings else OK)
    assert "0123456789abcdef" not in str(found)


def found(**settings: str) -> dict[str, Finding]:
    return {one.name: one for one in named(load_settings({}, **settings))}


def test_settings_that_name_nothing_have_no_lines() -> None:
    assert found() == {}


def test_files_of_secrets_are_read_and_who_else_may_read_them_is_told(tmp_path: Path) -> None:
    token, nowhere = tmp_path / "token", tmp_path / "nowhere.pem"
    token.write_text("a-token-of-enough-length")
    token.chmod(0o600)
    assert found(token_file=str(token))["credentials"].text == "no TLS, a token"
    token.chmod(0o644)
    told = found(token_file=str(token))["credentials"]
    assert (told.state, told.fix) == (WARNING, f"chmod 600 {token}")
    told = found(tls_ca=str(nowhere))["credentials"]
    assert told.state == ERROR
    assert f"PDLINK_TLS_CA='{nowhere}' cannot be read" in told.text


def test_the_place_of_a_sidecar_and_the_address_of_probes_are_tried(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    assert found(sidecar_socket=str(path))["sidecar socket"].state == OK
    path.touch()
    told = found(sidecar_socket=str(path))["sidecar socket"]
    assert told.state == ERROR
    assert "is no socket" in told.text
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        told = found(http_bind=taken)["probes"]
        assert (told.state, told.text) == (
            WARNING,
            f"PDLINK_HTTP_BIND={taken} is taken: something serves there already",
        )
    assert found(http_bind=taken)["probes"] == Finding("probes", OK, f"{taken} can be bound")


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal 11"),
        ("raise SystemExit('no such device')", "ended with exit code 1: no such device"),
        ("print('hello')", "ended with exit code 0"),
    ],
)
def test_a_process_that_does_not_answer_is_an_error(ending: str, said: str) -> None:
    found = parts._child("nixl", [sys.executable, "-c", ending])
    assert isinstance(found, Finding)
    assert found.state == ERROR
    assert said in found.text
    assert found.fix.startswith("run it by itself")


def test_a_process_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CHILD_TIMEOUT_S", 0.5)
    found = parts._child("nixl", [sys.executable, "-c", "import time; time.sleep(300)"])
    assert isinstance(found, Finding)
    assert "nothing came of it for 0.5 s" in found.text


def test_a_transport_that_moves_wrong_bytes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")  # nothing to ipc
    monkeypatch.setattr(parts, "_child", lambda *_: {"ok": False, "wrong_layers": [1]})
    found = parts.transport("ipc")
    assert (found.state, found.text) == (ERROR, "part of pdlink: layers [1] arrived wrong")


def test_hooks_that_do_not_take_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "version_of", {"sglang": "9.9"}.get)
    monkeypatch.setattr(parts, "_child", lambda *_: {"error": "sglang 9.9 is not 0.5.23", "name": ""})
    sglang, vllm = parts.engines()
    assert (sglang.state, vllm.state) == (ERROR, OK)
    assert "do not take: sglang 9.9" in sglang.text


@pytest.mark.slow
@pytest.mark.backend("ipc")
def test_a_real_transfer_over_loopback_is_made() -> None:
    found = parts.transport("ipc")
    assert found.state == OK, found
    assert "1,179,648 bytes over loopback" in found.text


@pytest.mark.slow
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    found = {one.name: one for one in parts.torch()}
    assert found["torch"].state == OK
    assert "CUDA" in found
