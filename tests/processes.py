"""Owns the processes that tests start: each ends with its whole family, however its test ends. It knows no program.

A family is found by a mark in its environment: also those whose parents are gone, in whatever session they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
"""How long a test waits for what must come: no figure of pdlink's, and far above what a slow and busy machine takes."""
FAMILIES = "PYTEST_FAMILIES_OF_PDLINK"
LOOK_S = 0.02
SWEEP_S = 10.0
EXEC_S = 0.1


@contextlib.contextmanager
def started(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    wind_down_s: float | None = PATIENCE_S,
    **options: Any,
) -> Iterator[subprocess.Popen[Any]]:
    """A process that is there until the end of the block; `options` are `Popen`'s, and `env` is all of its environment.

    At the end it is killed if it still runs, and its family with it. Of one that ended by itself, nothing may be left:
    raises `AssertionError` where a descendant lives on for `wind_down_s` (`None`: that is no failure of it).
    """
    mark, environ = uuid.uuid4().hex, dict(os.environ if env is None else env)
    environ[FAMILIES] = f"{os.environ.get(FAMILIES, '')}:{mark}"
    process = subprocess.Popen([str(word) for word in command], env=environ, **options)
    has_ended = False
    try:
        yield process
        has_ended = process.poll() is not None
        if has_ended and wind_down_s is not None and not wait_until(lambda: not family(mark), wind_down_s):
            raise AssertionError(f"processes {family(mark)} outlive {process.args}, which started them")
    finally:
        kill_all(lambda: family(mark))
        process.kill()
        if process.wait(PATIENCE_S) < 0:
            sweep()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def sweep() -> None:
    """Remove the shared memory that killed processes could not; whoever still looks into one of them holds it up."""
    from pdlink.backends import shm

    def is_clean() -> bool:
        shm.sweep_stale()
        owners = {int(path.name.split("-")[1]) for path in Path(shm.SHM_DIR).glob(f"{shm.PREFIX}[0-9]*-*")}
        return not any(is_over(pid) for pid in owners)

    wait_until(is_clean, SWEEP_S)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float = PATIENCE_S,
    check: bool = False,
    env: Mapping[str, str] | None = None,
    text: bool = True,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`; both outputs are captured unless `options` say otherwise, and standard input is empty."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with started(command, env=env, text=text, **pipes) as process:
        out, err = process.communicate(timeout=timeout_s)
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    assert not check or done.returncode == 0, f"{command} exited with {done.returncode}:\n{out}{err}"
    return done


def wait_until(holds: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Whether it comes to hold in time."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= give_up:
            return False
        time.sleep(LOOK_S)
    return True


def kill_all(find: Callable[[], list[int]]) -> None:
    """Kill what `find` finds until it finds nothing more: a process may start another one while others are killed. On
    return nothing of them is left but zombies."""
    give_up = time.monotonic() + PATIENCE_S
    killed: set[int] = set()
    while found := find():
        killed.update(found)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < give_up, f"processes {found} cannot be killed"
        time.sleep(LOOK_S)
    assert wait_until(lambda: all(map(is_over, killed))), f"processes {killed} do not end"


def is_over(pid: int) -> bool:
    """Whether the process has ended, waited for or not, and holds no file any more. Of one that is killed, memory (and
    its environment with it) goes before files and their locks, and one thread before the other."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return True


def family(mark: str) -> list[int]:
    """The processes of that family which live: dead ones that nobody has waited for have no environment any more."""
    return in_environment(lambda names: mark in names.get(FAMILIES, ""))


def in_environment(matches: Callable[[dict[str, str]], bool]) -> list[int]:
    """The other processes of this user whose environment, as it was when they were started, matches."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            data = _environment(pid)
        except OSError:  # it is another user's, or has just gone
            continue
        names = dict(one.split("=", 1) for one in data.decode(errors="replace").split("\0") if "=" in one)
        if pid != os.getpid() and matches(names):
            found.append(pid)
    return found


def _environment(pid: int) -> bytes:
    """As the kernel shows it. A process that has just become another program shows none for a moment: it is looked at
    again, for up to `EXEC_S`. Threads of the kernel and dead processes, which are no program, have none. Raises
    `OSError`."""
    give_up = time.monotonic() + EXEC_S
    while not (data := Path(f"/proc/{pid}/environ").read_bytes()):
        if time.monotonic() >= give_up or not os.readlink(f"/proc/{pid}/exe"):
            break
        time.sleep(EXEC_S / 50)
    return data
