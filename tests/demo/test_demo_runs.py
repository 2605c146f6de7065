"""The demo runs real models over real ranks, and proves bytes and tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.demo.command import Ended, run_command

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("demo")]
MODELS = ("glm-dsa-tiny", "smollm2")


# In a hurry one run of each model stands for the others.
QUICK = {("glm-dsa-tiny", 3), ("smollm2", 2)}
RUNS = [
    pytest.param((model, cp), id=f"{model}-cp{cp}", marks=[] if (model, cp) in QUICK else pytest.mark.slow)
    for model in MODELS
    for cp in (2, 3, 4)
]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, Ended, Path]:
    model, cp = request.param
    dump = tmp_path_factory.mktemp("dump")
    ended = run_command("demo", "--model", model, "--cp", str(cp), "--new-tokens", "8", "--dump", str(dump), "--json")
    return model, cp, ended, dump


def test_bytes_and_tokens_are_equal(run: tuple[str, int, Ended, Path]) -> None:
    _, _, ended, _ = run
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["bytes_equal"] is True
    assert found["tokens_equal"] is True
    assert all(one["logit_difference"] <= 1e-3 and one["tie"] is None for one in found["requests"])
    assert found["text"] == found["requests"][0]["text"]
    assert found["text"].strip()
    assert found["backend"] == "ipc"


def test_every_rank_holds_and_gives_its_own_layers_only(run: tuple[str, int, Ended, Path]) -> None:
    _, cp, ended, _ = run
    found = ended.json
    assert len(found["kv_bytes_per_rank"]) == len(found["pulled_bytes_per_owner"]) == cp
    assert sum(found["kv_bytes_per_rank"]) == found["kv_bytes_unsplit"]
    assert max(found["kv_bytes_per_rank"]) < found["kv_bytes_unsplit"]
    # What is pulled from a rank is in proportion to what it holds.
    total = sum(found["pulled_bytes_per_owner"])
    for held, pulled in zip(found["kv_bytes_per_rank"], found["pulled_bytes_per_owner"], strict=True):
        assert pulled * found["kv_bytes_unsplit"] == held * total
    layers = [layer for rank in found["layers_per_rank"] for layer in rank[next(iter(rank))]]
    assert layers == sorted(set(layers))


def test_a_prefix_that_an_earlier_request_computed_is_reused(run: tuple[str, int, Ended, Path]) -> None:
    first, second = run[2].json["requests"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > 0
    assert second["cached_tokens"] % 16 == 0


def test_a_script_without_pdlink_confirms_the_dump(run: tuple[str, int, Ended, Path]) -> None:
    script = Path(__file__).with_name("check_dump.py")
    assert "pdlink" not in [line.split()[1] for line in script.read_text().splitlines() if line.startswith("import")]
    checked = subprocess.run(
        [sys.executable, "-I", str(script), str(run[3])], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_a_prompt_is_shown_as_it_is() -> None:
    prompt = "[/foo] a [red]b[/red] :smile: " + "x" * 300
    ended = run_command("demo", "--model", "glm-dsa-tiny", "--cp", "1", "--new-tokens", "2", "--prompt", prompt)
    assert ended.code == 0, ended.err
    shown = next(line for line in ended.out.splitlines() if line.startswith("request-0: "))
    assert shown.startswith("request-0: [/foo] a [red]b[/red] :smile: xxx")
    assert shown.endswith(f"... ({len(prompt)} characters)")
