"""Owns a run of the conformance suite against one backend, from a process that does not load that backend.

With pytest, parametrise over `scenario_names()` and call `Runner.run`; without it, `run_conformance` does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from pdlink.errors import DeadlineExceeded, InvalidInput
from pdlink.testing.child import Child, ChildEnded
from pdlink.testing.conformance.catalogue import SCENARIOS
from pdlink.testing.conformance.setup import Result, Setup


def scenario_names() -> tuple[str, ...]:
    """Every scenario, in the order in which they run."""
    return tuple(SCENARIOS)


class Runner:
    """Runs scenarios in one reader process, and in a new one after a scenario that failed or took it down.

    `close` at the end. Raises `InvalidInput` for a setup that leaves out an unknown scenario.
    """

    def __init__(self, setup: Setup) -> None:
        for name in setup.leaves_out:
            _check_known(name)
        self.setup = setup
        self._reader: Child | None = None

    def run(self, name: str) -> Result:
        """Run one scenario. Raises `InvalidInput` for an unknown name."""
        _check_known(name)
        if reason := self.setup.leaves_out.get(name):
            return Result(name, "skipped", reason)
        timeout_s = self.setup.scenario_timeout_s
        if self._reader is None:
            arguments = [self.setup.to_json()]
            self._reader = Child("reader", "pdlink.testing.conformance.reader", arguments, self.setup.env)
        try:
            result = Result(scenario=name, **self._reader.ask(timeout_s, scenario=name))
        except (ChildEnded, DeadlineExceeded) as error:
            result = Result(name, "failed", str(error), timeout_s)
        if result.failed:
            self._end_reader()  # who knows what it left there
        return result

    def close(self) -> int:
        """End the reader; returns its exit code, which is 0 unless a library decided otherwise."""
        reader, self._reader = self._reader, None
        return reader.close() if reader else 0

    def _end_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader:
            with suppress(ChildEnded):
                reader.kill()
            reader.close()


def _check_known(name: str) -> None:
    if name not in SCENARIOS:
        raise InvalidInput(f"no conformance scenario is called {name!r}; known ones: {', '.join(SCENARIOS)}")


def run_conformance(
    setup: Setup, names: Sequence[str] = (), report: Callable[[Result], None] | None = None
) -> tuple[Result, ...]:
    """Run `names` (all scenarios by default) and return how each ended, and last how the reader's process did."""
    results = []
    for result in _results(setup, names or scenario_names()):
        results.append(result)
        if report:
            report(result)
    return tuple(results)


def _results(setup: Setup, names: Sequence[str]) -> Iterator[Result]:
    runner = Runner(setup)
    try:
        for name in names:
            yield runner.run(name)
    finally:
        code = runner.close()
    detail = f"the reader's process ended with code {code}" if code else ""
    yield Result("the_readers_process_ends_well", "failed" if code else "passed", detail)
