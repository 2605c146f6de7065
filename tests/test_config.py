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
    with pytest.raises(ConfigError, match=r"unknown setting max_pers=1; did you mean max_peers\?"):
        load_settings({}, max_pers=1)


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("WAY", "quick", "use auto, direct or staged"),
        ("LOG", "loud", "use debug, info, warning, error or critical"),
        ("TRACING", "perhaps", "use true or false"),
        ("DRAIN_TIMEOUT_S", "soon", "give seconds as a number above 0 and at most 86400"),
        ("MAX_AUX_BYTES", "65537", "give a whole number from 0 to 65536"),
        ("MAX_TRANSFERS", "0", "give a whole number of at least 1"),
    ],
)
def test_a_refusal_says_who_gave_the_value_and_what_to_give(name, text, advice):
    with pytest.raises(ConfigError) as caught:
        load_settings({f"PDLINK_{name}": text})
    assert str(caught.value) == f"environment setting PDLINK_{name}='{text}' cannot be used: {advice}"
    with pytest.raises(ConfigError) as caught:
        load_settings({}, **{name.lower(): text})
    assert str(caught.value) == f"option or argument {name.lower()}='{text}' cannot be used: {advice}"


def test_every_setting_says_what_it_takes():
    for name, field in Settings.model_fields.items():
        with pytest.raises(ConfigError) as caught:
            load_settings({}, **{name: object()})
        (problem,) = caught.value.problems
        assert f" {name}=" in problem
        assert problem.partition(" cannot be used: ")[2].startswith(("use ", "give ")), field


def test_everything_that_is_wrong_is_told_at_once_with_where_it_stands(tmp_path):
    file = tmp_path / "pdlink.yaml"
    file.write_text("max_peers: none\nmax_pers: 3\nway: quick\nway: direct\nlog: info\n")
    env = {"PDLINK_VERIFY_DIGESTS": "perhaps", "PDLINK_DRAIN_TIMOUT_S": "1", "PDLINK_TOKN": "b7f2c6e19d"}
    with pytest.raises(ConfigError) as caught:
        load_settings(env, file=str(file), staging_slots=-1)
    told = {one.partition("; ")[0].partition(" cannot")[0] for one in caught.value.problems}
    assert told == {
        "environment setting PDLINK_VERIFY_DIGESTS='perhaps'",
        "option or argument staging_slots=-1",
        f"setting in {file}: max_peers='none'",
        f"setting in {file}: way='quick'",
        "unknown environment setting PDLINK_DRAIN_TIMOUT_S='1'",
        "unknown environment setting PDLINK_TOKN=***",
        f"{file}: line 2: unknown setting 'max_pers'",
        f"{file}: line 4: way stands there twice",
    }
    assert str(caught.value).startswith("8 values cannot be used: (1) ")
    assert "; (8) " in str(caught.value)


def test_a_file_that_cannot_be_read_hides_no_other_fault():
    with pytest.raises(ConfigError) as caught:
        load_settings({"PDLINK_WAY": "quick"}, file="/nowhere.yaml")
    first, second = caught.value.problems
    assert "/nowhere.yaml cannot be read" in first
    assert "PDLINK_WAY='quick'" in second


def test_settings_never_change():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().bind_host = "x"  # type: ignore[misc]
