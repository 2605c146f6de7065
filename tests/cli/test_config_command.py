"""`pdlink config show`: every setting with its source, secrets hidden, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlink.cli import main as command
from pdlink.config import Settings

SECRET = "c0ffee5ec2e7"


def show(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert command.main(["config", "show", *options]) == 0
    return capsys.readouterr().out


def test_json_has_every_setting_and_where_it_came_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pdlink.yaml"
    file.write_text("max_peers: 7\nway: direct\n")
    monkeypatch.setenv("PDLINK_DRAIN_TIMEOUT_S", "3")
    said = json.loads(show(capsys, "--json", "--config", str(file), "--set", "way=staged"))
    assert set(said) == set(Settings.model_fields)
    assert said["max_peers"] == {"value": 7, "from": "file", "where": f"{file}: max_peers"}
    assert said["drain_timeout_s"] == {"value": 3.0, "from": "environment", "where": "PDLINK_DRAIN_TIMEOUT_S"}
    assert said["way"] == {"value": "staged", "from": "flag", "where": ""}
    assert said["backends"] == {"value": "auto", "from": "default", "where": ""}


def test_the_table_has_a_line_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(capsys).splitlines()
    assert [line.split()[0] for line in lines[1:] if line.strip()] == list(Settings.model_fields)


def test_only_what_was_changed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLINK_MAX_PEERS", "9")
    lines = [line.split() for line in show(capsys, "--changed").splitlines() if line.strip()]
    assert lines == [["setting", "value", "from"], ["max_peers", "9", "PDLINK_MAX_PEERS"]]


@pytest.mark.parametrize("options", [(), ("--json",), ("--changed",)])
def test_a_secret_is_never_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PDLINK_TOKEN", SECRET)
    said = show(capsys, *options)
    assert SECRET not in said
    assert "***" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_pers=1", "--set max_pers: unknown setting; did you mean max_peers?"),
        ("max_peers", "--set takes NAME=VALUE, and 'max_peers' has no value"),
        ("max_peers=soon", "option or argument max_peers='soon' cannot be used: give a whole number from 1"),
        (f"token={SECRET}", "--set token: every user of this machine could read it there; set token_file"),
    ],
)
def test_an_assignment_that_cannot_be_used_is_refused(capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    assert command.main(["config", "show", "--set", text]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert SECRET not in captured.err


def test_all_that_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLINK_LOG", "loud")
    monkeypatch.setenv("PDLINK_MAX_PEERS", "0")
    assert command.main(["config", "show"]) == 2
    alone = capsys.readouterr().err
    assert alone.startswith("error: 2 values cannot be used: (1) environment setting PDLINK_")
    assert command.main(["config", "show", "--set", "way", "--set", f"token={SECRET}", "--set", "staging_slots=x"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: 5 values cannot be used: (1) ")
    for one in (
        "'way' has no value",
        "set token_file",
        "staging_slots='x'",
        "PDLINK_MAX_PEERS='0'",
        "PDLINK_LOG='loud'",
    ):
        assert one in said
    assert SECRET not in said


def test_without_a_command_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["config"]) == 0
    assert "show" in capsys.readouterr().out
