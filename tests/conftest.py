"""Owns what every test run shares: a clean environment, and the check that a run leaves nothing behind.

"Nothing" is shared-memory segments of ours and processes that a test started. Both are looked for when the run ends,
because tests on several workers see each other's; on one worker each test is held to its own segments as well.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests import backend_counts, blame, gpus, order, processes

SHM = Path("/dev/shm")
FAULTS = pytest.StashKey[list[str]]()
SEGMENTS_BEFORE = pytest.StashKey[set[str]]()

hypothesis.settings.register_profile(
    "pdlink",
    # A slow or busy machine is no failure; each test's own time limit ends a hang.
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
    print_blob=True,
)
hypothesis.settings.load_profile("pdlink")


def pytest_addoption(parser: pytest.Parser) -> None:
    backend_counts.add_option(parser)
    parser.addini("segments", "the names of the shared memory that a run answers for", default="pdlink*")
    parser.addini("wind_down_s", "how long what a test leaves may take to go by itself, seconds", default="60")


def pytest_configure(config: pytest.Config) -> None:
    # Nothing is fetched from a model hub, and a developer's own settings do not decide what is tested.
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in [name for name in os.environ if name.startswith("PDLINK_")]:
        del os.environ[name]
    if not is_worker(config):
        os.environ[blame.RUN] = uuid.uuid4().hex
    config.pluginmanager.register(blame)
    config.pluginmanager.register(gpus)
    config.pluginmanager.register(order)
    config.pluginmanager.register(backend_counts.BackendCounts())
    config.stash[FAULTS] = []
    config.stash[SEGMENTS_BEFORE] = segments(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test's own time limit lengthens that of all tests: a short one would be a bet on the machine."""
    least_s = float(config.getini("timeout") or 0)
    for item in items:
        mark = item.get_closest_marker("timeout")
        if mark and mark.args and mark.args[0] < least_s:
            item.add_marker(pytest.mark.timeout(least_s), append=False)


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def segments(config: pytest.Config) -> set[str]:
    """The names of the shared-memory segments of pdlink, whoever made them."""
    return {path.name for path in SHM.glob(config.getini("segments"))} if SHM.is_dir() else set()


def held_by(process: psutil.Process) -> set[str]:
    """The names under /dev/shm that `process` maps or has open; none where it is gone or another user's."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
        paths = [line.split(maxsplit=5)[-1] for line in maps.splitlines() if f"{SHM}/" in line]
        paths += [item.path for item in process.open_files()]
    except (psutil.Error, OSError):
        return set()
    return {Path(path).name for path in paths if path.startswith(f"{SHM}/")}


def is_of_this_run(process: psutil.Process) -> bool:
    """Whether this run started `process`: by its ancestry, or, for an orphan, by its environment."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getpid() in _line(process) or process.environ().get(blame.RUN) == os.environ[blame.RUN]
    except (psutil.Error, OSError):
        return False


def _line(process: psutil.Process) -> list[int]:
    return [process.pid, *(parent.pid for parent in process.parents())]


def left_processes() -> list[psutil.Process]:
    """Processes that this run started and that still live, this one aside."""
    known = _line(psutil.Process())
    return [process for process in psutil.process_iter() if process.pid not in known and is_of_this_run(process)]


def is_helper_of_python(process: psutil.Process) -> bool:
    """multiprocessing's own servers end with the process that they serve, which is this one."""
    servers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
    try:
        return process.ppid() == os.getpid() and any(name in " ".join(process.cmdline()) for name in servers)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(gone meanwhile)"


def wind_down_s(config: pytest.Config) -> float:
    return float(config.getini("wind_down_s"))


def left_segments(config: pytest.Config, before: set[str]) -> list[str]:
    """Segments that are new since `before`, stay, and that no process of another run holds."""
    until = time.monotonic() + wind_down_s(config)
    while new := segments(config) - before:
        others = (process for process in psutil.process_iter() if not is_of_this_run(process))
        left = (new - set().union(*map(held_by, others))) & segments(config)
        if not left or time.monotonic() >= until:
            return sorted(left)
        time.sleep(0.1)
    return []


@pytest.fixture(autouse=True)
def _no_segment_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a segment; with several workers, whose segments mix, the end of the run tells."""
    if is_worker(request.config):
        yield
        return
    before = segments(request.config)
    yield
    if left := left_segments(request.config, before):
        pytest.fail(f"left in {SHM}: {', '.join(left)}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if is_worker(config):
        return
    faults = config.stash[FAULTS]
    until = time.monotonic() + wind_down_s(config)
    while (left := [item for item in left_processes() if not is_helper_of_python(item)]) and time.monotonic() < until:
        psutil.wait_procs(left, timeout=0.1)
    faults += [f"process {process.pid} lives on: {_command(process)}" for process in left]
    lost = left_segments(config, config.stash[SEGMENTS_BEFORE])
    faults += [f"shared memory {name} lies on in {SHM}" for name in lost]
    # The next run is not to suffer from this one.
    processes.kill_all(lambda: [process.pid for process in left if process.is_running() and is_of_this_run(process)])
    for name in lost:
        (SHM / name).unlink(missing_ok=True)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = sum(not gpus.is_allowed(one) for one in reporter.stats.get("skipped", ())) if reporter else 0
    if skipped and os.environ.get("CI") == "true":
        faults.append(f"{skipped} tests were skipped; in CI every test must run")
    if faults and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if faults := config.stash[FAULTS]:
        terminalreporter.section("left behind", red=True)
        for fault in faults:
            terminalreporter.line(f"ERROR: {fault}", red=True)
