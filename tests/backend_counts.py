"""Owns the marker `backend`: how many tests ran on each backend, and the least that a run may have run.

A test that moves bytes over a backend says so with `pytest.mark.backend("ipc")` and the like. Every run prints the
counts; `--backend-minimum SECTION` fails it when fewer ran than that section of `tests/backend_minimum.toml` says.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

PROPERTY = "backend"
OPTION = "--backend-minimum"
FILE = Path("tests", "backend_minimum.toml")
SHORTFALLS = pytest.StashKey[list[str]]()


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="SECTION", help=f"fail when fewer tests ran on a backend than {FILE} says there")


class BackendCounts:
    """A pytest plugin. `num_ran` counts tests whose own code ran, whether they passed or not; no skipped one."""

    def __init__(self) -> None:
        self.num_ran: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Raises `UsageError` for a backend that the file of least counts does not know, which nobody would miss."""
        known = {name for section in minimums(config).values() for name in section}
        for item in items:
            for mark in item.iter_markers("backend"):
                (name,) = mark.args
                if known and name not in known:
                    raise pytest.UsageError(f"{item.nodeid} names backend {name!r}, which is not in {FILE}")
                if (PROPERTY, name) not in item.user_properties:
                    item.user_properties.append((PROPERTY, name))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Where several workers run tests, the process that started them hears every report."""
        if report.when == "call" and report.outcome != "skipped":
            self.num_ran.update(name for key, name in report.user_properties if key == PROPERTY)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        section = config.getoption(OPTION)
        if section is None or hasattr(config, "workerinput"):
            return
        config.stash[SHORTFALLS] = shortfalls(self.num_ran, minimums(config), section)
        if config.stash[SHORTFALLS] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        names = [*dict.fromkeys(name for section in minimums(config).values() for name in section)]
        if self.num_ran or config.getoption(OPTION):
            counts = ", ".join(f"{name} {self.num_ran[name]}" for name in names or sorted(self.num_ran))
            terminalreporter.line(f"tests per backend: {counts}")
        for line in config.stash.get(SHORTFALLS, []):
            terminalreporter.line(f"ERROR: {line}", red=True)


def minimums(config: pytest.Config) -> Mapping[str, Mapping[str, int]]:
    """Section -> backend -> the least number of tests; empty without the file."""
    path = config.rootpath / FILE
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def shortfalls(num_ran: Mapping[str, int], known: Mapping[str, Mapping[str, int]], section: str) -> list[str]:
    """What is wrong with the counts of a run, one line for each backend."""
    if section not in known:
        return [f"{FILE} has no section {section!r}; it has {', '.join(known) or 'none'}"]
    return [
        f"{num_ran.get(name, 0)} tests ran on backend {name}, and section {section!r} of {FILE} wants at least {least}"
        for name, least in known[section].items()
        if num_ran.get(name, 0) < least
    ]
