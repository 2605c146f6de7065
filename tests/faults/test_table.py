"""The judge of a soak: every kind of damage in its file is found, and it needs nothing of pdlink for that."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdlink.testing.pattern import page_pattern
from tests import processes
from tests.faults import table
from tests.faults.kinds import FAULTS

LAYOUT = {"latent": {"page_bytes": 128, "layers": [0, 1]}, "index_k": {"page_bytes": 40, "layers": [1]}}
SCRIPT = Path(table.__file__)
Line = dict[str, Any]
pytestmark = pytest.mark.faults


def census(**changed: Any) -> dict[str, Any]:
    held = {"threads": {"MainThread": 1}, "natives": 3, "fds": 20, "fd_kinds": {}, "segments": 8, "regions": {"ipc": 8}}
    return held | {"free_slots": 8, "free_pages": 96, "live": 0} | changed


def request(name: str, state: str = "done", **changed: Any) -> dict[str, Any]:
    hashes = table.wanted_hashes(name, 2, LAYOUT)
    made = {"id": name, "pages": 2, "when": "under way", "state": state, "ended_s": 0.5, "ends": 1, "why": ""}
    made |= {"aux": name if state == "done" else None, "hashes": hashes, "senders": {"rank0": "released"}}
    return made | {"later": {"state": state, "ends": 1, "hashes": copy.deepcopy(hashes)}} | changed


def line(fault: str = "kill prefill", *requests: dict[str, Any], **changed: Any) -> Line:
    held = {"pid_before": 7, "pid_after": 7, "before": census(), "after": census()}
    made = {
        "line": "fault",
        "number": 1,
        "fault": fault,
        "backend": "ipc",
        "transport": "ipc",
        "recovery_s": 0.2,
        "lacking": "",
        "died": [],
        "touched": "",
    }
    made |= {"requests": list(requests or (request("a"), request("b", "failed"))), "processes": {"reader0": held}}
    folded = table.fold(table.wanted_hashes("z", 1, LAYOUT))
    made |= {"since_last": [["z", 1, "done", folded, "z"]], "deadlines": {"verdict_s": 15.0, "recovery_s": 25.0}}
    return made | changed


def judge(*lines: Line) -> table.Verdict:
    """Of the last line."""
    judge = table.Judge(LAYOUT)
    return [judge.judge(one) for one in lines][-1]


def test_the_pattern_is_worked_out_a_second_time() -> None:
    for position in (0, 3, 700):
        page = page_pattern("some transfer", "index_k", 5, position, 1001)
        assert table.wanted_hash("some transfer", "index_k", 5, position, 1001) == table.hash_page(page.tobytes())


def test_the_judge_imports_nothing_that_it_judges() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    assert not [name for name in names if name.split(".")[0] in ("pdlink", "tests", "pdlink_engines")]
    alone = processes.run([sys.executable, "-I", str(SCRIPT)])
    assert alone.returncode == 1
    assert "usage" in alone.stderr


def test_a_good_line_brings_no_complaint() -> None:
    verdict = judge(line())
    assert verdict.complaints == []
    assert (verdict.num_under_way, verdict.num_failed) == (2, 1)


def died(name: str, code: int = table.ABORTED) -> dict[str, Any]:
    return {"name": name, "code": code, "after_s": 2.5}


def changed_hash(one: dict[str, Any]) -> dict[str, Any]:
    damaged = copy.deepcopy(one)
    damaged["hashes"]["latent/1"][1] = "0" * 12
    return damaged


def changed_later(one: dict[str, Any]) -> dict[str, Any]:
    damaged = copy.deepcopy(one)
    damaged["later"]["hashes"]["index_k/1"][0] = "0" * 12
    return damaged


def process(**changed: Any) -> dict[str, Any]:
    return {"reader0": {"pid_before": 7, "pid_after": 7, "before": census(), "after": census(**changed)}}


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [
        ("wrong", line("kill prefill", changed_hash(request("a")))),
        ("wrong", line("kill prefill", changed_later(request("a")))),
        ("wrong", line("kill prefill", changed_later(request("a", "failed")))),
        ("wrong", line("kill prefill", request("a", aux="b"))),
        ("wrong", line(touched="'latent' layer 1, page -1, from byte 0")),
        ("wrong", line(since_last=[["z", 1, "done", "0" * 12, "z"]])),
        ("wrong", line(since_last=[["z", 1, "done", table.fold(table.wanted_hashes("z", 1, LAYOUT)), "y"]])),
        ("lost", line(since_last=[["z", 1, "failed", "", None]])),
        ("lost", line("kill one bootstrap", request("a", "failed"))),
        ("lost", line("kill all bootstraps", request("a", "failed"))),
        ("lost", line("kill prefill", request("a", "failed", when="before"))),
        ("lost", line("kill prefill", request("a", ends=2))),
        ("lost", line("kill prefill", request("a", ends=0))),
        ("lost", line("kill prefill", request("a", later={"state": "failed", "ends": 1, "hashes": {}}))),
        ("lost", line("kill prefill", request("a", senders={"rank0": "aborted"}))),
        ("hangs", line("kill prefill", request("a", "none"))),
        ("hangs", line("kill prefill", request("a", "failed", ended_s=15.5))),
        ("hangs", line("kill prefill", request("a", senders={"rank1": "none"}))),
        ("hangs", line(recovery_s=None)),
        ("hangs", line(recovery_s=25.5)),
        ("hangs", line(lacking="rank1 died")),
        ("lost", line(died=[died("rank1")])),
        ("lost", line("kill decode", died=[died("rank1")])),
        ("lost", line("kill decode", transport="nixl-tcp", died=[died("rank1", code=-11)])),
        ("lost", line("kill decode", transport="nixl-tcp", died=[died("reader0")])),
        ("lost", line("kill one bootstrap", transport="nixl-tcp", died=[died("rank1")])),
        ("leaks", line(processes=process(fds=21))),
        ("leaks", line(processes=process(threads={"MainThread": 1, "pdlink-pull": 1}))),
        ("leaks", line(processes=process(natives=4))),
        ("leaks", line(processes=process(segments=9))),
        ("leaks", line(processes=process(regions={"ipc": 7}))),
        ("leaks", line(processes=process(free_pages=95))),
        ("leaks", line(processes=process(free_slots=7))),
        ("leaks", line(processes=process(live=1))),
        ("leaks", line(processes={"reader0": {"pid_before": 7, "pid_after": None, "before": census(), "after": None}})),
    ],
)
def test_each_kind_of_damage_is_found(kind: str, damaged: Line) -> None:
    assert getattr(judge(damaged), kind) != []


def test_the_victims_of_a_fault_may_fail_and_nobody_else() -> None:
    assert judge(line("kill all bootstraps", request("a", "failed", when="during"))).complaints == []
    assert judge(line("slow link of decode", request("a", "failed"))).lost != []


def test_an_owner_that_ucx_aborts_belongs_to_the_fault_that_silenced_its_reader() -> None:
    for fault in sorted(table.FALL_SILENT):
        assert judge(line(fault, transport="nixl-tcp", died=[died("rank1")])).complaints == []


def moved(life: int, before: dict[str, Any] | None, after: dict[str, Any]) -> Line:
    """A fault before and after which one process was counted. None: that life of it had not begun."""
    held = {"pid_before": life if before else life - 1, "pid_after": life, "before": before or census(), "after": after}
    return line(processes={"reader0": held})


GROWTHS = {
    "file": lambda number: census(fds=20 + number),
    "thread": lambda number: census(threads={"MainThread": 1, "pdlink-pull": number}),
    "native thread": lambda number: census(natives=3 + number),
    "segment": lambda number: census(segments=8 + number),
    "region": lambda number: census(regions={"ipc": 8 + number}),
    "page": lambda number: census(free_pages=96 - number),
    "slot": lambda number: census(free_slots=8 - number),
}


@pytest.mark.parametrize("what", GROWTHS)
def test_a_leak_of_one_for_each_fault_is_found_at_each_fault(what: str) -> None:
    held = GROWTHS[what]
    verdicts = table.Judge(LAYOUT)
    for number in range(4):
        assert len(verdicts.judge(moved(7, held(number), held(number + 1))).leaks) == 1


def test_what_a_process_has_held_at_rest_before_it_may_hold_again_and_no_more() -> None:
    """A connection that was not there when it was counted is there the next time."""
    low, high = census(fds=18), census(fds=20)
    assert judge(moved(7, high, low), moved(7, low, high)).leaks == []
    assert judge(moved(7, high, low), moved(7, low, census(fds=21))).leaks != []
    assert (
        judge(moved(7, high, low), moved(7, low, census(fds=19)), moved(7, census(fds=19), census(fds=21))).leaks != []
    )


@pytest.mark.parametrize(("transport", "what"), table.LOOSE.items())
def test_a_library_may_take_one_more_for_each_peer_and_a_leak_is_found_at_each_fault_beyond(
    transport: str, what: str
) -> None:
    """One peer: the process may hold 20, and 21, and 20 again, as often as it likes."""
    judge = table.Judge(LAYOUT)
    counts = [20, 21, 20, 21, 20, 21, 22, 23, 24, 24]
    found = []
    for before, after in itertools.pairwise(counts):
        one = moved(7, census(**{what: before}), census(**{what: after})) | {"transport": transport}
        one["processes"]["rank0"] = one["processes"]["reader0"] | {"before": census(), "after": census()}
        found.append(len(judge.judge(one).leaks))
    assert found == [0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_every_life_of_a_process_has_its_own_mark() -> None:
    high, low = census(fds=30), census(fds=20)
    assert judge(moved(7, high, high), moved(8, None, low)).leaks == []
    assert judge(moved(7, high, high), moved(8, None, low), moved(8, low, census(fds=21))).leaks != []
    assert judge(moved(7, high, high), moved(7, low, census(fds=21)) | {"cluster": 2}).leaks != []


def test_every_leave_to_fail_is_that_of_a_fault() -> None:
    assert {one.name for one in FAULTS} >= table.EVERYTHING | table.LATER_ONES | table.FALL_SILENT


def test_the_table_counts_and_its_exit_code_tells(tmp_path: Path) -> None:
    header = {"line": "header", "seed": 1, "layout": LAYOUT}
    lines = [header, line(), line(recovery_s=0.4), line("kill decode", request("a", "gone"), recovery_s=1.0)]
    path = tmp_path / "soak.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    done = run(path)
    assert done.returncode == 0, done.stderr
    table_of = {row["fault"]: row for row in json.loads(done.stdout)["table"]}
    row = table_of["kill prefill"]
    assert (row["injected"], row["recovery p50 s"], row["recovery max s"]) == (2, 0.3, 0.4)
    assert table_of["all"]["injected"] == 3
    path.write_text("".join(json.dumps(one) + "\n" for one in [*lines, line(processes=process(fds=21))]))
    done = run(path)
    assert done.returncode == 1
    assert "reader0: fds 21, 20 before" in done.stderr


def test_what_a_cluster_leaves_is_told(tmp_path: Path) -> None:
    good: Line = {"line": "end", "cluster": 0, "backend": "ipc", "exit_codes": {"rank0": 0}, "segments": []}
    assert table.judge_end(good) == []
    assert table.judge_end(good | {"exit_codes": {"rank0": -6}}) == ["rank0 ended with code -6"]
    assert table.judge_end(good | {"segments": ["pdlink-7-a"]}) == ["pdlink-7-a lies on in /dev/shm"]
    path = tmp_path / "soak.jsonl"
    lines = [{"line": "header", "seed": 1, "layout": LAYOUT}, line(), good | {"segments": ["pdlink-7-a"]}]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert run(path).returncode == 1


@pytest.mark.parametrize("text", [None, "", "{}", '{"line": "head', '{"line": "fault"}\n'])
def test_a_file_that_is_no_soak_is_refused_in_a_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "soak.jsonl"
    if text is not None:
        path.write_text(text)
    done = run(path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{path} is no whole file of a soak: ")
    assert done.stderr.count("\n") == 1


def run(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(SCRIPT), str(path), "--json"]
    return processes.run(command)
