"""The demo runs real models over real ranks, and proves bytes and tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import processes
from tests.demo.command import Ended, run_command

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("demo")]


@dataclass(frozen=True)
class Topology:
    """A model, prefill pp x cp, and decode tp."""

    model: str
    pp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return f"{self.model}-pp{self.pp}cp{self.cp}-tp{self.tp}"

    @property
    def num_prefill(self) -> int:
        return self.pp * self.cp


# The small model goes through all shapes; real weights, a minute of a processor each time, through those that differ in
# what is cut: layers, heads, and both.
SIZES = {
    "glm-dsa-tiny": [(1, 1, 2), (1, 3, 1), (1, 4, 1), (2, 2, 2), (2, 3, 1), (2, 4, 2)],
    "smollm2": [(1, 2, 2), (1, 4, 1), (2, 2, 2)],
}
# In a hurry one run stands for the others, and in CI a few.
QUICK = (Topology("glm-dsa-tiny", 2, 2, 2),)
IN_CI = (Topology("glm-dsa-tiny", 1, 3, 1), Topology("glm-dsa-tiny", 2, 4, 2), Topology("smollm2", 2, 2, 2))
TOPOLOGIES = [Topology(model, *sizes) for model, every in SIZES.items() for sizes in every]


def marks_of(one: Topology) -> list[pytest.MarkDecorator]:
    if one in QUICK:
        return []
    return [pytest.mark.slow] if one in IN_CI else [pytest.mark.slow, pytest.mark.thorough]


RUNS = [pytest.param(one, id=str(one), marks=marks_of(one)) for one in TOPOLOGIES]
Run = tuple[Topology, Ended, Path]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    at = request.param
    dump = tmp_path_factory.mktemp("dump")
    sizes = ("--pp", str(at.pp), "--cp", str(at.cp), "--decode-tp", str(at.tp))
    ended = run_command("demo", "--model", at.model, *sizes, "--new-tokens", "8", "--dump", str(dump), "--json")
    return at, ended, dump


def test_bytes_and_tokens_are_equal(run: Run) -> None:
    _, ended, _ = run
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["bytes_equal"] is True
    assert found["tokens_equal"] is True
    assert all(one["logit_difference"] <= 1e-3 and one["tie"] is None for one in found["requests"])
    assert found["text"] == found["requests"][0]["text"]
    assert found["text"].strip()
    assert found["backend"] == "ipc"


def test_every_rank_holds_and_gives_its_own_layers_only(run: Run) -> None:
    at, ended, _ = run
    found = ended.json
    held = found["kv_bytes_per_rank"]
    assert len(held) == len(found["pulled_bytes_per_owner"]) == at.num_prefill
    assert sum(held) == found["kv_bytes_unsplit"]
    assert (max(held) < found["kv_bytes_unsplit"]) is (len(held) > 1)
    assert len(found["pulled_bytes_per_pair"]) == at.tp
    # What a decode rank pulls from each is in proportion to what that holds.
    for pulled in found["pulled_bytes_per_pair"]:
        assert [one * found["kv_bytes_unsplit"] for one in pulled] == [one * sum(pulled) for one in held]
    assert found["pulled_bytes_per_owner"] == [sum(pair) for pair in zip(*found["pulled_bytes_per_pair"], strict=True)]
    layers = [layer for rank in found["layers_per_rank"] for layer in rank[next(iter(rank))]]
    assert layers == sorted(set(layers))


def test_a_prefix_that_an_earlier_request_computed_is_reused(run: Run) -> None:
    first, second = run[1].json["requests"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > 0
    assert second["cached_tokens"] % 16 == 0


def test_a_script_without_pdlink_confirms_the_dump(run: Run) -> None:
    script = Path(__file__).with_name("check_dump.py")
    assert "pdlink" not in [line.split()[1] for line in script.read_text().splitlines() if line.startswith("import")]
    checked = processes.run([sys.executable, "-I", str(script), str(run[2])])
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_a_prompt_is_shown_as_it_is() -> None:
    prompt = "[/foo] a [red]b[/red] :smile: " + "x" * 300
    ended = run_command("demo", "--model", "glm-dsa-tiny", "--cp", "1", "--new-tokens", "2", "--prompt", prompt)
    assert ended.code == 0, ended.err
    shown = next(line for line in ended.out.splitlines() if line.startswith("request-0: "))
    assert shown.startswith("request-0: [/foo] a [red]b[/red] :smile: xxx")
    assert shown.endswith(f"... ({len(prompt)} characters)")
