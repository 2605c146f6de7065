"""The benches with GPUs: a rank that is killed in the loop, and pulls from several owners at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdlink.cli.main import main

pytestmark = [pytest.mark.gpu(2), pytest.mark.slow, pytest.mark.timeout(300)]


def rows_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0, capfd.readouterr().err
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    rows: list[dict[str, Any]] = told["rows"] if isinstance(told, dict) else told
    return rows


@pytest.mark.parametrize("reader", ["broadcast", "peer"])
def test_a_rank_that_outlives_another_names_it_and_closes(capfd: pytest.CaptureFixture[str], reader: str) -> None:
    sizes = ["--layers", "6", "--pool-tokens", "8192", "--live-tokens", "4096", "--chunk-tokens", "64"]
    rest = ["--device", "cuda", "--ahead", "--reader", reader, "--kill-rank", "1", "--timeout-s", "20"]
    (row,) = rows_of(capfd, "bench", "loop", *sizes, *rest)
    (other,) = row["others"]
    assert (other["rank"], other["outcome"], other["names_rank"]) == (0, "raised", True), other


def test_two_readers_pull_from_two_owners_on_two_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--owners", "2", "--readers", "2", "--page-bytes", "41984", "--num-pages", "64", "--layers", "5"]
    (row,) = rows_of(capfd, "bench", "transfer", *sizes, "--device", "cuda", "--backend", "ipc", "--scattered")
    assert (row["owners"], row["readers"], row["layers_by_owner"]) == (2, 2, [3, 2])
    assert row["gbps"] > 0
    assert row["raw_gbps"] > 0
    assert row["links_gbps"] > 0
