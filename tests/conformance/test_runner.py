"""The runner of the conformance suite: what it leaves out and refuses, and what a failure costs the next one."""

import pytest

from pdlink.errors import InvalidInput
from pdlink.testing.conformance import MemorySource, Result, Runner, Setup, scenario_names

NAME = scenario_names()[0]


def test_a_scenario_that_a_setup_leaves_out_is_skipped_with_its_reason():
    runner = Runner(Setup("ipc", leaves_out={NAME: "no such pages"}))
    assert runner.run(NAME) == Result(NAME, "skipped", "no such pages")


def test_unknown_scenarios_are_refused_to_run_and_to_leave_out():
    with pytest.raises(InvalidInput, match="no conformance scenario is called 'haste'"):
        Runner(Setup("ipc")).run("haste")
    with pytest.raises(InvalidInput, match="no conformance scenario is called 'haste'"):
        Runner(Setup("ipc", leaves_out={"haste": "for a reason"}))


def test_a_setup_reaches_another_process_as_it_is():
    setup = Setup("nixl", env={"A": "b"}, memory=MemorySource.CUDA, devices=(0, 1), leaves_out={NAME: "why"})
    assert Setup.from_json(setup.to_json()) == setup


@pytest.mark.parametrize("field", [{"devices": (0, -1)}, {"big_pages": 0}, {"start_timeout_s": 0}, {"watch_s": -1}])
def test_figures_below_their_least_are_refused(field):
    with pytest.raises(InvalidInput, match="below its least value"):
        Setup("ipc", **field)


def test_a_failed_scenario_is_reported_and_the_next_one_gets_a_new_process():
    """`ipc` cannot serve private memory; what a failure left in its process is nobody else's trouble."""
    runner = Runner(Setup("ipc", memory=MemorySource.PRIVATE))
    result = runner.run(NAME)
    assert result.outcome == "failed"
    assert "said nothing" not in result.detail
    assert runner.run(scenario_names()[1]).outcome == "failed"
    assert runner.close() == 0
