"""What the sglang plug-in checks when it starts: versions, limits of sglang, names and credentials."""

from __future__ import annotations

import re

import pytest

from pdlink.config import load_settings
from pdlink.errors import ConfigError, InvalidInput
from pdlink_engines.sglang import hooks
from pdlink_engines.sglang.options import check_release, check_settings
from pdlink_engines.sglang.version import check_version
from tests.sglang.nursery import REPO
from tests.sglang.servers import ON_CPU

WAIT_S = 60.0


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_the_version_that_the_plug_in_was_made_for_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.24", "0.5.2", "0.5.230", "0.5.23rc1", "0.6.0"])
def test_another_version_is_refused_with_both(version: str) -> None:
    with pytest.raises(InvalidInput, match=f"sglang {version} is installed.*0.5.23"):
        check_version(version)


@pytest.mark.parametrize(("drain_s", "release_s"), [(20, 23), (27, 30), (86_400, 30)])
def test_pages_that_sglang_would_free_while_pdlink_may_write_them_are_refused(drain_s: float, release_s: float) -> None:
    settings = load_settings({}, drain_timeout_s=drain_s, abort_ack_timeout_s=1)
    release = f"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT={release_s}"
    with pytest.raises(ConfigError, match=f"{release} is too short for PDLINK_DRAIN_TIMEOUT_S={drain_s}:"):
        check_release(settings, True, release_s)


def test_pages_are_held_long_enough_by_default_and_where_sglang_waits_longer() -> None:
    check_release(load_settings({}), True, 30.0)
    check_release(load_settings({}, drain_timeout_s=86_400), True, 86_404.0)
    with pytest.raises(ConfigError, match="KV_RELEASE is off"):
        check_release(load_settings({}), False, 30.0)


def test_the_readme_runs_servers_on_cpu_as_the_tests_do() -> None:
    text = (REPO / "engines" / "sglang" / "README.md").read_text(encoding="utf-8")
    told = re.search(r'^ON_CPU="([^"]*)"$', text, re.MULTILINE)
    assert told
    assert told[1].split() == ON_CPU.split()


def test_the_name_to_serve_under_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.backend_name() == "pdlink"
    monkeypatch.setenv(hooks.SETTING, "nixl")
    assert hooks.backend_name() == "nixl"
    monkeypatch.setenv(hooks.SETTING, "mori")
    with pytest.raises(ConfigError, match="mori"):
        hooks.backend_name()


def test_credentials_that_cannot_be_used_are_refused_with_the_other_settings() -> None:
    with pytest.raises(ConfigError, match=r"PDLINK_TLS_CA='/nowhere\.pem' cannot be read"):
        check_settings(load_settings({}, tls_ca="/nowhere.pem"))
    assert check_settings(load_settings({}, token="0123456789abcdef")).token is not None
