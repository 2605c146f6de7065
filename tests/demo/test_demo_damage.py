"""Damage that is done on purpose is found, and named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.demo.command import run_command

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("demo")]


@pytest.mark.parametrize(
    "damage",
    [
        "flip",
        pytest.param("skip-owner", marks=pytest.mark.slow),
        pytest.param("stale-scratch", marks=pytest.mark.slow),
        pytest.param("swap-layers", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_damage_exits_1_and_names_component_layer_and_page(damage: str, tmp_path: Path) -> None:
    ended = run_command(
        "demo", "--model", "glm-dsa-tiny", "--cp", "2", "--new-tokens", "4", "--inject", damage, "--json",
        "--dump", str(tmp_path / "dump"),
    )  # fmt: skip
    assert ended.code == 1
    found = ended.json
    assert found["bytes_equal"] is False
    assert found["passed"] is False
    assert re.search(r"component '\w+', layer \d+, page \d+ differs", found["failures"][0])
    assert len(ended.error_lines) == 1
    assert "differs" in ended.error_lines[0]
    # The script that imports no pdlink comes to the same verdict.
    script = Path(__file__).with_name("check_dump.py")
    checked = processes.run([sys.executable, "-I", str(script), str(tmp_path / "dump")])
    assert checked.returncode == 1
    assert "differs" in checked.stdout
