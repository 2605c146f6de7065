"""Every run says how many tests ran on each backend; a run that is held to a least number fails below it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.backend_counts import FILE, OPTION, shortfalls
from tests.house.runs import run_pytest
from tests.house.tree import REPO

SAMPLE = """
import pytest

@pytest.mark.backend("carrier")
@pytest.mark.parametrize("number", range(3))
def test_moves(number):
    assert number != FAILING

@pytest.mark.backend("carrier")
@pytest.mark.backend("pigeon")
def test_moves_over_both():
    pass

@pytest.mark.backend("pigeon")
def test_cannot_move():
    pytest.skip("no wind")

@pytest.mark.backend("pigeon")
@pytest.mark.skip(reason="no wind")
def test_is_not_to_move():
    pass

def test_moves_nothing():
    pass
"""
LEAST = """
[fast]
carrier = 4
pigeon = {pigeon}
owl = 0
"""


def run(folder: Path, pigeon: int, *options: str, failing: int = -1):
    (folder / FILE).parent.mkdir()
    (folder / FILE).write_text(LEAST.format(pigeon=pigeon))
    return run_pytest(folder, SAMPLE.replace("FAILING", str(failing)), *options)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_tests_that_ran_are_counted_and_skipped_ones_are_not(tmp_path: Path, workers: tuple[str, ...]) -> None:
    done = run(tmp_path, 1, *workers, OPTION, "fast")
    assert done.returncode == 0, done.stdout
    assert "\ntests per backend: carrier 4, pigeon 1, owl 0\n" in done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_run_below_the_least_number_fails_with_both_figures(tmp_path: Path, workers: tuple[str, ...]) -> None:
    done = run(tmp_path, 2, *workers, OPTION, "fast")
    assert done.returncode == 1, done.stdout
    assert (
        "\nERROR: 1 tests ran on backend pigeon, and section 'fast' of tests/backend_minimum.toml wants at least 2\n"
    ) in done.stdout
    assert "backend carrier, and" not in done.stdout


def test_a_run_that_is_held_to_nothing_only_tells(tmp_path: Path) -> None:
    done = run(tmp_path, 100)
    assert done.returncode == 0, done.stdout
    assert "tests per backend: carrier 4, pigeon 1, owl 0" in done.stdout


def test_a_test_that_fails_has_run(tmp_path: Path) -> None:
    done = run(tmp_path, 1, OPTION, "fast", failing=1)
    assert done.returncode == 1
    assert "tests per backend: carrier 4, pigeon 1, owl 0" in done.stdout


def test_a_section_that_does_not_exist_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, 1, OPTION, "fats")
    assert done.returncode == 1
    assert "ERROR: tests/backend_minimum.toml has no section 'fats'; it has fast" in done.stdout


def test_a_backend_that_nobody_counts_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text("[fast]\npigeon = 1\n")
    done = run_pytest(tmp_path, SAMPLE)
    assert done.returncode == 4
    assert "names backend 'carrier', which is not in tests/backend_minimum.toml" in done.stdout + done.stderr


def test_a_backend_of_another_section_is_not_missed() -> None:
    assert shortfalls({"a": 1}, {"fast": {"a": 1}, "slow": {"b": 9}}, "fast") == []


def test_ci_holds_each_of_its_runs_to_its_section() -> None:
    sections = tomllib.loads((REPO / FILE).read_text(encoding="utf-8"))
    script = (REPO / ".ci" / "run").read_text(encoding="utf-8")
    assert sorted(re.findall(rf"{OPTION} (\w+)", script)) == sorted(set(sections) - {"gpu"})
    for name in ("fast", "slow"):
        assert min(sections[name].values()) > 0, "a backend without any test"
