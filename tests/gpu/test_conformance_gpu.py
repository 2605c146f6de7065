"""Every backend passes the conformance scenarios over device memory: the owner on one GPU, the reader on another."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdlink.testing.conformance import MemorySource, Runner, Setup, scenario_names
from tests.backends.needs import nixl_missing, nvlink_missing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON_GPU = {
    "memory": MemorySource.CUDA,
    "idle_s": 1.0,
    "watch_s": 1.0,
    "big_pages": 8192,  # 1 GiB in 16,384 descriptors: a few milliseconds at the link's rate
    # Every process loads torch and makes a CUDA context, and a scenario may start several of them.
    "start_timeout_s": 120.0,
    "scenario_timeout_s": 240.0,
}
SETUPS = {
    "ipc-cuda": Setup("ipc", "ipc over device memory", **ON_GPU),
    "nixl-cuda": Setup("nixl", "nixl over device memory", **ON_GPU),
    "mooncake-nvlink": Setup(
        "mooncake",
        "mooncake over nvlink",
        env={"PDLINK_MOONCAKE_PROTOCOL": "nvlink_intra"},
        leaves_out={
            "an_instance_pulls_from_another_of_its_own_process": (
                "the library opens the owner's memory by CUDA IPC, which a process cannot do with memory of its own"
            ),
        },
        **ON_GPU,
    ),
}
MISSING = {"nixl-cuda": nixl_missing, "mooncake-nvlink": nvlink_missing}
"""Setup -> what tells that this machine lacks something for it, asked where there is a GPU."""
CASES = [
    pytest.param(name, scenario, id=f"{name}-{scenario}", marks=pytest.mark.backend(name))
    for name, setup in SETUPS.items()
    for scenario in scenario_names()
    if scenario not in setup.leaves_out
]


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    import torch

    lacking = MISSING.get(request.param)
    if lacking and (reason := lacking()):
        pytest.skip(reason)
    reader = min(1, torch.cuda.device_count() - 1)
    made = Runner(replace(SETUPS[request.param], devices=(0, reader)))
    yield made
    assert made.close() == 0, f"a process that used {made.setup.title} does not end well"


@pytest.mark.parametrize(("runner", "scenario"), CASES, indirect=["runner"])
def test_conformance_over_device_memory(runner: Runner, scenario: str) -> None:
    result = runner.run(scenario)
    assert result.outcome == "passed", result.detail
