"""`pdlink plan --decode`: who pulls what from whom, and why two instances do not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdlink.cli.main import main

GLM = ("--prefill", "pp2cp4tp1", "--decode", "tp8", "--model", "glm-5.2")
GQA = ("--layers", "8", "--kv-heads", "8", "--head-dim", "128")


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *options, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    value: dict[str, Any] = json.loads(captured.out)
    return value


def text(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *options]) == 0
    return capsys.readouterr().out


def test_glm_over_two_stages_shows_one_line_for_each_prefill_rank(capsys: pytest.CaptureFixture[str]) -> None:
    lines = text(capsys, *GLM).splitlines()
    assert lines[0] == "GLM-5.2, 78 layers: prefill pp2cp4 (split) -> decode tp8"
    assert lines[1] == "a request of 8,192 tokens, 128 pages of 64"
    rows = [line.split() for line in lines if line.startswith(" pp ")]
    assert [row[4] for row in rows] == ["0-9", "10-19", "20-29", "30-38", "39-48", "49-58", "59-68", "69-77"]
    assert {" ".join(row[5:7]) for row in rows} == {"tp 0-7"}
    # 10 layers of 128 pages, a latent row of 1,152 B and an indexer key of 132 B a token; one page is one descriptor.
    assert rows[0][7:] == ["100.3", "MiB", "2,560", "802.5", "MiB"]
    assert "prefill pp 0 cp 0 gives most: 802.5 MiB, 1.03 x the mean of all" in lines
    assert "decode tp 0 takes most: 782.4 MiB, 1.00 x the mean of all" in lines
    assert "(GLM-5.2's own layout)" in lines[-1]


@pytest.mark.parametrize(
    ("options", "times", "why"),
    [
        (GLM, 8, "it has no heads to split, so each of 8 decode tp ranks keeps all of it"),
        ((*GLM[:2], "--decode", "pp2tp4"), 4, "each of 4 decode tp ranks keeps all of it"),
        (("--decode", "tp8dcp4"), 2, "8 decode tp ranks hold the same, and dcp 4 of them share a copy"),
        (("--decode", "tp8dcp8"), 1, ""),
        ((*GQA, "--decode", "tp16"), 2, "tp 16 is more than the 8 heads, so 2 decode tp ranks hold the same one"),
        ((*GQA, "--decode", "tp3"), 1, ""),
    ],
)
def test_how_often_each_byte_is_pulled_is_told(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], times: int, why: str
) -> None:
    value = plan(capsys, *options)
    row = 8 * 8 * 128 * 2 * 2 if "--kv-heads" in options else 78 * (1152 + 132)  # all layers of a token
    assert value["cache_bytes"] == 8192 * row
    assert (value["pulls_of_each_byte"], value["bytes"]) == (times, times * 8192 * row)
    often = f"{times} times: " if times > 1 else "once"
    assert f"and each byte of it is pulled {often}" in (out := text(capsys, *options))
    assert why in out


def test_who_gives_or_takes_more_is_told_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    out = text(capsys, *GLM)
    assert (
        "note: prefill: 39 layers of a stage do not divide by cp 4: the first 3 ranks own 10, the other owns 9\n" in out
    )
    out = text(capsys, "--prefill", "cp2", "--decode", "tp3", *GQA)
    assert "note: decode: 8 KV heads do not divide by tp 3: the first 2 tp ranks hold 3, the other holds 2\n" in out
    assert "note: prefill" not in out
    out = text(capsys, "--prefill", "cp4tp2", "--decode", "tp2")
    assert "note: prefill: 2 ranks hold the same layers, of which decode pulls some from each\n" in out


def test_a_pair_counts_the_indexer_keys_of_the_model_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "indexer keys on all 78 layers; on the 21 alone" in text(capsys, *GLM).splitlines()[-1]
    own = plan(capsys, *GLM, "--indexers", "own")
    assert own["cache_bytes"] == 8192 * (78 * 1152 + 21 * 132)
    last = text(capsys, *GLM, "--indexers", "own").splitlines()[-1]
    assert "on the 21 of 78 layers alone" in last
    assert "--indexers every" in last


def test_json_has_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, *GLM)
    assert (value["fits"], value["refused"]) == (True, [])
    assert (value["prefill"], value["decode"]) == (
        {"dp": 1, "pp": 2, "cp": 4, "tp": 1},
        {"dp": 1, "pp": 1, "tp": 8, "dcp": 1},
    )
    assert len(value["pairs"]) == 64
    first = value["pairs"][0]
    assert (first["prefill"], first["decode"]) == ("dp0.pp0.cp0.tp0", "dp0.pp0.tp0")
    assert first["layers"] == {"latent": [[0, 9]], "index_k": [[0, 9]]}
    assert first["bytes"] == 8192 * 10 * (1152 + 132)
    assert first["descriptors"] == 128 * 20
    assert value["bytes"] == 8 * 8192 * 78 * (1152 + 132) == sum(value["bytes_per_prefill_rank"].values())
    assert set(value["bytes_per_decode_rank"].values()) == {8192 * 78 * (1152 + 132)}
    assert value["prefill_imbalance"] == pytest.approx(80 / 78)
    assert value["decode_imbalance"] == 1


def test_heads_are_named_where_a_rank_takes_some_only(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--prefill", "cp2tp2", "--decode", "pp2tp4", *GQA, "--tokens", "64")
    assert [one["heads"]["k"] for one in value["pairs"] if one["prefill"] == "dp0.pp0.cp0.tp1"] == [[4, 6], [6, 8]]
    assert "heads" in text(capsys, "--prefill", "cp2tp2", "--decode", "pp2tp4", *GQA)
    # Tensor-parallel ranks alike: each takes all of the heads that its counterpart holds, in whole pages.
    alike = plan(capsys, "--prefill", "cp2tp4", "--decode", "tp4", *GQA, "--tokens", "64")
    assert {one["descriptors"] for one in alike["pairs"]} == {4 * 2}


def test_heads_that_no_side_divides_evenly_are_paired_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--prefill", "tp3", "--decode", "tp5", *GQA, "--tokens", "64")
    assert [(one["prefill"][-3:], one["decode"][-3:], *one["heads"]["k"]) for one in value["pairs"]] == [
        ("tp0", "tp0", 0, 2),
        ("tp0", "tp1", 2, 3),
        ("tp1", "tp1", 3, 4),
        ("tp1", "tp2", 4, 6),
        ("tp2", "tp3", 6, 7),
        ("tp2", "tp4", 7, 8),
    ]


def test_a_model_that_runs_here_is_spread_as_the_demo_spreads_it(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--prefill", "pp2cp2", "--decode", "tp2", "--model", "smollm2", "--page-size", "16")
    assert {tuple(one["heads"]["k"]) for one in value["pairs"]} == {(0, 2), (2, 3)}


def test_layers_of_many_replicas_are_counted_rather_than_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "10 of 0-18" in text(capsys, "--prefill", "cp4tp2", "--decode", "tp2")


def test_an_instance_with_idle_ranks_or_shared_tokens_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = text(capsys, "--prefill", "dp2cp4", "--decode", "tp4dcp2", "--layers", "3", "--latent-bytes", "656")
    assert "1 of 4 prefill ranks give nothing" in out
    assert "each of 2 neighbouring decode ranks keeps one of every 2 tokens" in out
    assert "a request stays inside one dp group" in out


def test_sizes_in_one_word_plan_memory_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert text(capsys, "--prefill", "pp2cp4") == text(capsys, "--pp", "2", "--cp", "4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*GLM, "--decode-page-size", "128"), "latent.page_size is 64 on prefill and 128 on decode"),
        ((*GLM, "--decode-page-size", "128"), "start both servers with the same page size"),
        ((*GLM, "--decode-dtype", "float8_e4m3fn"), "latent.dtype is bfloat16 on prefill and float8_e4m3fn on decode"),
        (("--prefill", "cp2", "--decode", "tp2dcp2", *GQA), "dcp=2 does not divide the 1 of tp=2 ranks that hold"),
    ],
)
def test_two_instances_that_do_not_fit_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert main(["plan", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "cannot be paired" in captured.err
    assert main(["plan", *options, "--json"]) == 2
    value = json.loads(capsys.readouterr().out)
    assert value["fits"] is False
    reasons = [one["text"] for one in value["refused"]]
    assert any(said in one for one in [captured.err, *reasons])
    assert reasons


def test_what_follows_from_another_difference_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--prefill", "cp2", "--decode", "tp2", "--decode-page-size", "32"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "latent.page_size is 64 on prefill and 32 on decode; start both servers with the same page size" in said
    assert "page_bytes" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefill", "pp2xp4"), "--prefill 'pp2xp4' has an axis 'xp'; there are dp, pp, cp, tp"),
        (("--decode", "cp8"), "--decode 'cp8' has an axis 'cp'; there are dp, pp, tp, dcp"),
        (("--decode", "tp4dcp3"), "--decode dcp=3 does not divide tp=4"),
        (("--prefill", "cp4", "--cp", "4"), "--prefill cp4 has all sizes"),
        (("--prefill", "cp99999"), "--prefill cp99999 is 99999 ranks; plan at most 4096"),
        (("--prefill", "cp64tp64", "--decode", "tp32"), "more than 65536 pairs of ranks"),
        (
            ("--prefill", "cp2", "--decode", "tp5", *GQA[:2], "--kv-heads", "4", "--head-dim", "8"),
            "decode tp5: --kv-heads 4",
        ),
        (("--decode-page-size", "64"), "go with --decode"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert main(["plan", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
