"""`pdlink plan`: the figures of named and described layouts, and what it says of bad input."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdlink.cli.main import main
from pdlink.cli.plan import spans
from pdlink_engines.reference.models import model_shape

GIB = 1 << 30


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *options, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    value: dict[str, Any] = json.loads(captured.out)
    return value


def text(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *options]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line with which `plan` refuses these options."""
    assert main(["plan", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_glm_takes_the_documented_memory(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--model", "glm-5.2", "--cp", "4", "--tokens", "8192")
    # (8,192 tokens + one reserved page of 64) x (576 bf16 values + 128 B of key and 4 B of scale) a layer.
    layer = (8192 + 64) * (576 * 2 + 132)
    assert value["unsplit_bytes"] == 78 * layer
    assert value["owned_bytes"] == 20 * layer
    assert value["scratch_bytes"] == 2 * layer
    assert (round(value["unsplit_gib"], 2), round(value["owned_gib"], 2)) == (0.77, 0.20)
    assert value["scratch_gib"] == pytest.approx(2 * layer / GIB)
    assert (value["tokens"], value["reserved_pages"], value["num_pages"]) == (8192, 1, {"kv": 129})


def test_glm_is_split_into_unbroken_ranges_that_cover_every_layer_once(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--model", "glm-5.2", "--cp", "4")
    for component in ("latent", "index_k"):
        assert [one["layers"][component] for one in value["ranks"]] == [[[0, 19]], [[20, 39]], [[40, 58]], [[59, 77]]]


def test_glm_own_layout_has_indexer_keys_on_21_layers_only(capsys: pytest.CaptureFixture[str]) -> None:
    own = plan(capsys, "--model", "glm-5.2", "--cp", "4", "--tokens", "8192")["own_layout"]
    layers = [layer for first, last in own["components"][1]["layers"] for layer in range(first, last + 1)]
    assert layers == [0, 1, *range(2, 78, 4)]
    assert own["unsplit_bytes"] == (8192 + 64) * (78 * 1152 + 21 * 132)
    # The first rank holds layers 0-19, of which 0, 1, 2, 6, 10, 14 and 18 run an indexer.
    assert own["owned_bytes"] == (8192 + 64) * (20 * 1152 + 7 * 132)


def test_glm_indexer_layers_are_those_that_transformers_derives() -> None:
    from transformers import GlmMoeDsaConfig

    from pdlink.layout.models import MODELS

    types = GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3).indexer_types
    assert MODELS["glm-5.2"].index_layers == tuple(layer for layer, kind in enumerate(types) if kind == "full")


def test_the_text_says_what_the_figures_stand_on(capsys: pytest.CaptureFixture[str]) -> None:
    out = text(capsys, "--model", "glm-5.2", "--cp", "4", "--tokens", "8192")
    assert "8,192 tokens in 128 pages of 64, and 1 reserved" in out
    assert "indexer keys on every layer (78 of 78)" in out
    assert "(21 of 78)" in out
    assert "0.77 -> 0.20 GiB" in out
    assert "scratch 0.02 GiB apart" in out
    assert "config.json" in out
    assert "\x1b" not in out


def test_packed_fp8_rows_are_656_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--model", "deepseek-v3.2", "--dtype", "float8_e4m3fn", "--cp", "1")
    assert value["components"][0]["bytes_per_token"] == 656
    assert value["num_layers"] == 61
    assert value["own_layout"] is None


def test_a_single_rank_owns_all_and_needs_no_scratch(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--model", "deepseek-v3.2", "--cp", "1")
    assert value["owned_bytes"] == value["unsplit_bytes"]
    assert value["scratch_bytes"] == 0


def test_a_replicated_plan_saves_nothing_and_needs_no_scratch(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--model", "glm-5.2", "--cp", "4", "--plan", "replicated")
    assert value["owned_bytes"] == value["unsplit_bytes"]
    assert value["scratch_bytes"] == 0
    assert [one["layers"]["latent"] for one in value["ranks"]] == [[[0, 77]]] * 4


def test_more_ranks_than_layers_leave_some_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--layers", "2", "--latent-bytes", "64", "--cp", "3")
    value = plan(capsys, *options)
    idle = value["ranks"][2]
    assert (idle["layers"]["latent"], idle["owned_bytes"]) == ([], 0)
    assert idle["scratch_bytes"] == value["scratch_bytes"] > 0
    out = text(capsys, *options)
    assert "1 of 3 ranks own nothing" in out
    assert "cp 2  none" in out


def test_stages_split_their_own_layers(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--layers", "7", "--latent-bytes", "64", "--pp", "2", "--cp", "2", "--tokens", "1")
    assert [one["layers"]["latent"] for one in value["ranks"]] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 6]]]
    # Unsplit, a rank keeps the four layers of the first stage, each a page of 64 tokens beside the reserved one.
    assert value["unsplit_bytes"] == 4 * 2 * 64 * 64


def test_heads_are_spread_over_tp_ranks_and_kept_whole_past_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--layers", "1", "--kv-heads", "4", "--head-dim", "8", "--page-size", "1", "--tokens", "1")
    sizes = {tp: plan(capsys, *options, "--cp", "1", "--tp", str(tp))["owned_bytes"] for tp in (1, 2, 8)}
    whole = 2 * 2 * 4 * 8 * 2  # pages, k and v, heads, values, bytes
    assert sizes == {1: whole, 2: whole // 2, 8: whole // 4}
    uneven = plan(capsys, *options, "--cp", "1", "--tp", "3")
    assert [one["owned_bytes"] for one in uneven["ranks"]] == [whole // 2, whole // 4, whole // 4]
    assert main(["plan", *options, "--cp", "1", "--tp", "3"]) == 0
    assert "have a head more than the others" in " ".join(capsys.readouterr().out.split())


def test_reference_models_are_planned_as_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--model", "glm-dsa-tiny", "--cp", "3")
    assert value["components"][1]["layers"] == [[0, 1], [3, 3], [6, 6]]
    assert {one["dtype"] for one in value["components"]} == {model_shape("glm-dsa-tiny").dtype}
    assert plan(capsys, "--model", "smollm2")["num_layers"] == 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "glm-5.3"), "unknown model 'glm-5.3'; did you mean glm-5.2?"),
        (("--model", "x"), "known ones: glm-5.2, deepseek-v3.2, "),
        (("--model", "glm-5.2", "--layers", "3"), "--model glm-5.2 names a layout"),
        (("--model", "glm-5.2", "--dtype", "int3"), "dtype 'int3'"),
        (("--model", "smollm2", "--dtype", "bfloat16"), "--dtype 'bfloat16'"),
        (("--layers", "3"), "either --latent-bytes, or --kv-heads and --head-dim"),
        (("--latent-bytes", "3"), "needs --layers"),
        (("--layers", "3", "--latent-bytes", "4", "--dtype", "bfloat"), "did you mean bfloat16?"),
        (("--layers", "3", "--kv-heads", "4"), "--kv-heads 4 and --head-dim 0 go together"),
        (("--layers", "3", "--kv-heads", "4", "--head-dim", "8", "--tp", "5"), "--kv-heads 4 cannot be spread"),
        (("--layers", "3", "--latent-bytes", "8", "--index-bytes", "4"), "--index-bytes 4 must hold"),
        (("--cp", "0"), "--cp '0' cannot be used: give at least 1"),
        (("--cp=two",), "--cp 'two' cannot be used"),
        (("--cp", "64", "--tp", "65"), "is 4160 ranks"),
        (("--tokens", "-1"), "--tokens '-1' cannot be used"),
        (("--plan", "splt"), "'split', 'replicated'"),
        (("--no-such",), "--no-such"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert said in refusal(capsys, *options)


def test_everything_that_is_wrong_is_told_at_once_and_nothing_that_only_follows_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--cp", "0", "--pp=two", "--plan", "x", "--page-size", "1.5", "extra")
    said = refusal(capsys, *sizes, "--model", "glm-5", "--dtype", "bf", "--decode", "cp3")
    assert said.startswith("error: 8 values cannot be used: (1) ")
    for one in (
        "unexpected argument 'extra'",
        "--cp '0' cannot be used: give at least 1",
        "--pp 'two' cannot be used: give a whole number",
        "--plan 'x' cannot be used: 'x' is not one of",
        "--page-size '1.5' cannot be used: give a whole number",
        "unknown model 'glm-5'; did you mean glm-5.2?",
        "--dtype 'bf' is unknown",
        "--decode 'cp3' has an axis 'cp'",
    ):
        assert one in said
    described = refusal(capsys, "--layers", "0", "--kv-heads", "4", "--index-bytes", "4", "--tp", "3", "--dtype", "x")
    assert described.startswith("error: 4 values cannot be used: (1) --layers '0'")
    for one in ("--kv-heads 4 and --head-dim 0 go together", "--index-bytes goes with", "--dtype 'x' is unknown"):
        assert one in described
    assert "needs --layers" not in described
    both = refusal(capsys, "--dtype", "a", "--decode-dtype", "b", "--decode", "tp2")
    assert "(1) --dtype 'a' is not one that glm-5.2 caches" in both
    assert "(2) decode tp2: --decode-dtype 'b' is not one" in both


def test_the_layers_whose_indexer_keys_count_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    every, own = plan(capsys), plan(capsys, "--indexers", "own")
    assert (every["indexers"], own["indexers"]) == ("every", "own")
    assert {name: own[name] for name in every["own_layout"]} == every["own_layout"]
    assert own["own_layout"] is None
    assert "counted here: indexer keys on all 78 layers" in text(capsys)
    said = text(capsys, "--indexers", "own")
    assert "counted here: indexer keys on the 21 of 78 layers alone that run an indexer" in said
    assert "0.71 -> 0.18 GiB" in said
    assert "78 of 78" not in said
    assert "counted here" not in text(capsys, "--model", "deepseek-v3.2")
    assert plan(capsys, "--model", "deepseek-v3.2")["indexers"] is None


def test_uneven_shares_have_their_cause_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ("--layers", "10", "--kv-heads", "6", "--head-dim", "8")
    out = text(capsys, *rows, "--pp", "3", "--cp", "3", "--tp", "4")
    assert "note: 10 layers do not divide by pp 3: the first stage has 4, the other 2 have 3\n" in out
    assert "note: 4 layers of a stage do not divide by cp 3: the first rank owns 2, the other 2 own 1\n" in out
    assert "note: 6 KV heads do not divide by tp 4: the first 2 tp ranks hold 2, the other 2 hold 1\n" in out
    assert "note:" not in text(capsys, *rows, "--cp", "5", "--tp", "3")
    assert "note:" not in text(capsys, *rows, "--cp", "4", "--plan", "replicated")
    assert "note: index_k is on 21 of 78 layers" in text(capsys, "--indexers", "own")


@pytest.mark.parametrize(
    ("layers", "runs"), [((), []), ((3,), [(3, 3)]), ((0, 1, 2, 4, 6, 7), [(0, 2), (4, 4), (6, 7)])]
)
def test_layer_ids_become_runs(layers: tuple[int, ...], runs: list[tuple[int, int]]) -> None:
    assert spans(layers) == runs
