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

SHM = Path("/dev/shm")
# In the environment of everything that a run starts, so that orphans can be told from strangers.
MARK = "PYTEST_RUN_OF_PDLINK"
WIND_DOWN_S = 3.0
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


def pytest_configure(config: pytest.Config) -> None:
    # Nothing is fetched from a model hub, and a developer's own settings do not decide what is tested.
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in [name for name in os.environ if name.startswith("PDLINK_")]:
        del os.environ[name]
    if not is_worker(config):
        os.environ[MARK] = uuid.uuid4().hex
    config.stash[FAULTS] = []
    config.stash[SEGMENTS_BEFORE] = segments()


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def segments() -> set[str]:
    """The names of the shared-memory segments of pdlink, whoever made them."""
    return {path.name for path in SHM.glob("pdlink*")} if SHM.is_dir() else set()


def held_by(process: psutil.Process) -> set[str]:
    """The names under /dev/shm that `process` maps or has open; none where it is gone or another user's."""
    try:
        paths = [item.path for item in [*process.memory_maps(), *process.open_files()]]
    except (psutil.Error, OSError):
        return set()
    return {Path(path).name for path in paths if path.startswith(f"{SHM}/")}


def is_of_this_run(process: psutil.Process) -> bool:
    """Whether this run started `process`: by its ancestry, or, for an orphan, by its environment."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getpid() in _line(process) or process.environ().get(MARK) == os.environ[MARK]
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


def left_segments(before: set[str]) -> list[str]:
    """Segments that are new since `before`, stay, and that no process of another run holds."""
    until = time.monotonic() + WIND_DOWN_S
    while new := segments() - before:
        others = (process for process in psutil.process_iter() if not is_of_this_run(process))
        left = (new - set().union(*map(held_by, others))) & segments()
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
    before = segments()
    yield
    if left := left_segments(before):
        pytest.fail(f"left in {SHM}: {', '.join(left)}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if is_worker(config):
        return
    faults = config.stash[FAULTS]
    until = time.monotonic() + WIND_DOWN_S
    while (left := [item for item in left_processes() if not is_helper_of_python(item)]) and time.monotonic() < until:
        psutil.wait_procs(left, timeout=0.1)
    faults += [f"process {process.pid} lives on: {_command(process)}" for process in left]
    faults += [f"shared memory {name} lies on in {SHM}" for name in left_segments(config.stash[SEGMENTS_BEFORE])]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", ())) if reporter else 0
    if skipped and os.environ.get("CI") == "true":
        faults.append(f"{skipped} tests were skipped; in CI every test must run")
    if faults and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if faults := config.stash[FAULTS]:
        terminalreporter.section("left behind", red=True)
        for fault in faults:
            terminalreporter.line(f"ERROR: {fault}", red=True)
