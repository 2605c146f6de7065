"""Settings of a YAML file: below flags and the environment, as text, refused by line, and never quoted in an error."""

import logging
from pathlib import Path

import pytest

from pdlink.config import Origin, Settings, Source, load_settings, trace_settings
from pdlink.errors import ConfigError

SECRET = "b7f2c6e19d"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pdlink.yaml"


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(file):
    file.write_text("drain_timeout_s: 1\nconfirm_timeout_s: 2\nresolve_timeout_s: 3\n")
    env = {"PDLINK_CONFIRM_TIMEOUT_S": "20", "PDLINK_RESOLVE_TIMEOUT_S": "30"}
    loaded = trace_settings(env, file=str(file), resolve_timeout_s=300.0)
    settings = loaded.settings
    assert (settings.drain_timeout_s, settings.confirm_timeout_s, settings.resolve_timeout_s) == (1, 20, 300)
    assert settings.transfer_timeout_s == Settings().transfer_timeout_s
    assert set(loaded.sources) == set(Settings.model_fields)
    names = ("drain_timeout_s", "confirm_timeout_s", "resolve_timeout_s", "transfer_timeout_s")
    assert [loaded.sources[name] for name in names] == [
        Source(Origin.FILE, f"{file}: drain_timeout_s"),
        Source(Origin.ENVIRONMENT, "PDLINK_CONFIRM_TIMEOUT_S"),
        Source(Origin.FLAG),
        Source(Origin.DEFAULT),
    ]


def test_the_environment_may_name_the_file_and_a_flag_another(file, tmp_path):
    file.write_text("max_peers: 5\n")
    other = tmp_path / "other.yaml"
    other.write_text("max_peers: 6\n")
    env = {"PDLINK_CONFIG": str(file)}
    assert load_settings(env).max_peers == 5
    assert load_settings(env, file=str(other)).max_peers == 6


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_sets_nothing(file, text):
    file.write_text(text)
    assert load_settings({}, file=str(file)) == Settings()


def test_values_mean_what_the_same_text_means_in_the_environment(file):
    file.write_text("control_curve: on\nverify_digests: yes\nadvertise_host: 10.1\nlog: WARNING\ntoken: 0123\n")
    settings = load_settings({}, file=str(file))
    assert (settings.control_curve, settings.verify_digests, settings.advertise_host) == ("on", True, "10.1")
    assert settings.log == "warning"
    assert settings.token is not None
    assert settings.token.get_secret_value() == "0123"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drain_timout_s: 1", r"line 1: unknown setting 'drain_timout_s'; did you mean drain_timeout_s\?"),
        ("max_peers: 1\nmax_peers: 2", "line 2: max_peers stands there twice"),
        ("max_peers: [1]", "line 1: max_peers takes one value, not several"),
        ("- max_peers", "line 1: settings are lines of `name: value`, and nothing else"),
        ("max_peers", "and nothing else"),
        ("max_peers: 1\n max_ppers: 'x", "line 2: not YAML"),
        ("max_peers: soon", r"pdlink.yaml: max_peers='soon' cannot be used"),
        ("max_peers:", r"pdlink.yaml: max_peers='' cannot be used"),
        ("? [a]\n: b", "unknown setting ''"),
        ("[" * 5000, "not YAML"),
        ("max_peers: \x01", "not YAML"),
    ],
)
def test_a_fault_of_the_file_is_refused_with_its_place(file, text, said):
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_settings({}, file=str(file))


def test_a_file_that_cannot_be_read_is_named(file):
    with pytest.raises(ConfigError, match=r"pdlink\.yaml cannot be read: No such file"):
        load_settings({}, file=str(file))
    file.write_bytes(b"max_peers: \xff\n")
    with pytest.raises(ConfigError, match="not text in UTF-8, at byte 11"):
        load_settings({}, file=str(file))
    file.write_bytes(b" " * (1 << 20) + b" ")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        load_settings({}, file=str(file))


@pytest.mark.parametrize(
    "line", ["token: *{}", "token: '{}", "token: {}: x", "token: [{}]", "token: %{}\n- x", "tken: {}"]
)
def test_no_error_quotes_a_value(file, line):
    file.write_text(line.format(SECRET))
    with pytest.raises(ConfigError) as caught:
        load_settings({}, file=str(file))
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.__cause__)


def test_a_secret_in_a_file_that_others_may_read_is_a_warning(file, caplog):
    file.write_text(f"token: {SECRET}\n")
    file.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        load_settings({}, file=str(file))
        assert caplog.messages == []
        file.chmod(0o640)
        load_settings({}, file=str(file))
    assert caplog.messages == [f"{file} holds token, and others may read that file; chmod 600 it"]
