"""A test that needs GPUs is skipped where there are too few, counted, and no excuse for any other skip."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.runs import run_pytest

NEEDS_A_GPU = """
import pytest

@pytest.fixture
def device():
    raise AssertionError("set up without a device")

@pytest.mark.gpu(1000)
def test_needs_many_gpus(device):
    pass
"""
SKIPS = "import pytest\n\ndef test_skips():\n    pytest.skip('no such device')\n"


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_test_without_its_gpus_is_skipped_and_counted_in_ci_too(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_pytest(tmp_path, NEEDS_A_GPU, "-rs", *options, CI="true")
    assert done.returncode == 0, done.stdout
    assert "needs 1000 GPUs, and torch" in done.stdout
    assert "\n1 tests that need a GPU were skipped\n" in done.stdout


def test_the_skip_of_a_gpu_test_excuses_no_other(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, NEEDS_A_GPU + SKIPS, CI="true")
    assert done.returncode == 1
    assert "ERROR: 1 tests were skipped" in done.stdout
    assert "1 tests that need a GPU were skipped" in done.stdout


def test_a_gpu_test_that_skips_by_itself_is_a_skip_like_any_other(tmp_path: Path) -> None:
    source = SKIPS.replace("def test_skips", "@pytest.mark.gpu(0)\ndef test_skips")
    assert run_pytest(tmp_path, source, CI="true").returncode == 1


def test_no_device_is_looked_for_unless_a_test_needs_one(tmp_path: Path) -> None:
    source = NEEDS_A_GPU + "\ndef test_is_plain():\n    import sys\n    assert 'torch' not in sys.modules\n"
    done = run_pytest(tmp_path, source, "-m", "not gpu")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
