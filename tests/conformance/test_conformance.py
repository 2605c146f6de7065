"""Every backend passes one set of scenarios, against the real library."""

import pytest

from pdlink.testing.conformance import MemorySource, Runner, Setup, scenario_names
from tests.backends.needs import mooncake_missing

SETUPS = {
    "ipc": Setup("ipc", memory=MemorySource.SHARED, idle_s=0.1, watch_s=0.3),
    "nixl-cma": Setup("nixl", "nixl over cma", idle_s=1.0, watch_s=0.5),
    # UCX over tcp may abort an owner that finds both requests and the end of their connection; see nixl_engine.
    "nixl-tcp": Setup(
        "nixl", "nixl over tcp", env={"UCX_TLS": "tcp,cuda_copy"}, idle_s=1.0, watch_s=1.0, owners_may_end=True
    ),
    "mooncake-tcp": Setup("mooncake", label="mooncake over tcp", fence_timeout_s=5.0),
}
MISSING = {"mooncake-tcp": mooncake_missing()}
"""Setup -> what this machine lacks for it."""


# In a hurry shared memory and one network engine stand for all.
QUICK = ("ipc", "nixl-tcp")
PARAMS = [
    pytest.param(name, marks=[pytest.mark.backend(name), *([] if name in QUICK else [pytest.mark.slow])])
    for name in SETUPS
]


@pytest.fixture(scope="module", params=PARAMS)
def runner(request):
    if reason := MISSING.get(request.param):
        pytest.skip(reason)
    made = Runner(SETUPS[request.param])
    yield made
    assert made.close() == 0, f"a process that used {made.setup.title} does not end well"


@pytest.mark.parametrize("scenario", scenario_names())
def test_conformance(runner, scenario):
    result = runner.run(scenario)
    if result.outcome == "skipped":
        pytest.skip(result.detail)
    assert result.outcome == "passed", result.detail
