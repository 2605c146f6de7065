import pytest
from pydantic import ValidationError

from pdlink.config import Settings, load_settings
from pdlink.errors import ConfigError


def test_the_defaults_stand_without_an_environment():
    assert load_settings({}) == Settings()


def test_a_variable_beats_the_default_and_an_argument_beats_the_variable():
    env = {"PDLINK_DRAIN_TIMEOUT_S": "7.5"}
    assert load_settings(env).drain_timeout_s == 7.5
    assert load_settings(env, drain_timeout_s=3.0).drain_timeout_s == 3.0
    assert load_settings(env, drain_timeout_s=None).drain_timeout_s == 7.5


def test_the_process_environment_is_read_when_asked(monkeypatch):
    monkeypatch.setenv("PDLINK_BIND_HOST", "10.1.2.3")
    assert load_settings().bind_host == "10.1.2.3"


def test_variables_of_others_are_left_alone():
    assert load_settings({"HOME": "/root", "NOT_PDLINK_X": "1", "PDLINK_CONFIG": ""}) == Settings()


def test_a_mistyped_variable_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"PDLINK_DRAIN_TIMOUT_S='1'; did you mean PDLINK_DRAIN_TIMEOUT_S\?"):
        load_settings({"PDLINK_DRAIN_TIMOUT_S": "1"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DRAIN_TIMEOUT_S", "0"),
        ("DRAIN_TIMEOUT_S", "-1"),
        ("DRAIN_TIMEOUT_S", "soon"),
        ("DRAIN_TIMEOUT_S", "nan"),
        ("DRAIN_TIMEOUT_S", "inf"),
        ("DRAIN_TIMEOUT_S", "86401"),
        ("MAX_AUX_BYTES", "65537"),
        ("MAX_FRAME_BYTES", "10"),
        ("MAX_TRANSFERS", "0"),
        ("VERIFY_DIGESTS", "perhaps"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name, text):
    with pytest.raises(ConfigError, match=f"PDLINK_{name}='{text}' cannot be used"):
        load_settings({f"PDLINK_{name}": text})


def test_an_unknown_argument_is_refused():
    with pytest.raises(ConfigError, match="PDLINK_SPEED"):
        load_settings({}, speed=1)


def test_settings_never_change():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().bind_host = "x"  # type: ignore[misc]
