"""What joins two GPUs is read from what the driver's tool says, and not guessed."""

from __future__ import annotations

import pytest

from pdlink.cli.transfer_gpus import Gpus, link_of

HEADER = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\x1b[0m\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (HEADER + "GPU0\t X \tNV18\t0-15\t0\nGPU1\tNV18\t X \t0-15\t0\n", "nvlink"),
        (HEADER + "GPU0\t X \tPHB\t0-15\t0\nGPU1\tPHB\t X \t0-15\t0\n", "pcie"),
        (HEADER + "GPU0\t X \tSYS\t0-15\t0\nGPU1\tSYS\t X \t0-15\t0\n", "pcie"),
        (HEADER, "unknown"),
        ("", "unknown"),
    ],
)
def test_the_link_of_the_first_two_is_named(text: str, found: str) -> None:
    assert link_of(text) == found


def test_one_gpu_is_both_ends() -> None:
    assert (Gpus(1, "gpu").devices, Gpus(2, "nvlink").devices, Gpus(8, "nvlink").devices) == ((0, 0), (0, 1), (0, 1))
