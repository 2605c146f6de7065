"""The table of a demo run, without a run."""

from __future__ import annotations

import re

import pytest

from pdlink.cli.demo import _show
from pdlink.cli.output import console
from pdlink_engines.reference.demo.result import DemoResult, RequestResult


@pytest.mark.parametrize(("num_ranks", "names"), [(1, ["decode"]), (2, ["decode-0", "decode-1"])])
def test_decode_ranks_are_named_as_in_the_progress(
    capsys: pytest.CaptureFixture[str], num_ranks: int, names: list[str]
) -> None:
    one = RequestResult("request-0", "a prompt", pulled={tp: [64, 32] for tp in range(num_ranks)})
    layers = [{"latent": [0, 1]}, {"latent": [2]}]
    _show(console(), DemoResult("tiny", 2, 1, num_ranks, "ipc", layers, 192, [128, 64], [0, 0], [one]))
    assert re.findall(r"pulled by (\S+)", capsys.readouterr().out) == names
