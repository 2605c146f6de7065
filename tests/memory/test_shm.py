"""Shared-memory segments: what they hold, who may map them, and that none is left behind by anyone."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pdlink.backends import shm
from pdlink.backends.shm import SHM_DIR, Location, Segment, attach, locate, sweep_stale, sweep_until_gone
from pdlink.errors import BackendUnavailable, InvalidInput, PeerGone, RegionError, StateError
from pdlink.memory.allocate import allocate
from tests import processes

REPO = Path(__file__).parents[2]
CREATE = "from pdlink.backends.shm import Segment; segment = Segment.create(4096); print(segment.name, flush=True)\n"


def path_of(name: str) -> Path:
    return Path(SHM_DIR) / name


@pytest.fixture
def segment() -> Iterator[Segment]:
    one = Segment.create(10_000)
    yield one
    one.close()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return processes.run([sys.executable, "-c", code], cwd=REPO)


@contextlib.contextmanager
def owning_python() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that lives on, and the name of its segment."""
    command = [sys.executable, "-c", CREATE + "import time; time.sleep(600)"]
    with processes.started(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()


def test_a_segment_is_zero_filled_writable_and_only_for_its_user(segment: Segment) -> None:
    assert not segment.array.any()
    segment.array[:] = 7
    assert (np.asarray(segment.view) == 7).all()
    facts = path_of(segment.name).stat()
    assert facts.st_mode & 0o777 == 0o600
    assert facts.st_size == 10_000
    assert facts.st_blocks * 512 >= 10_000, "every byte is backed from the start"


def test_a_name_carries_the_process_and_never_repeats() -> None:
    segments = [Segment.create(1) for _ in range(20)]
    try:
        assert len({one.name for one in segments}) == 20
        assert all(one.name.startswith(f"pdlink-{os.getpid()}-") for one in segments)
    finally:
        for one in segments:
            one.close()


def test_another_process_maps_what_the_owner_writes(segment: Segment) -> None:
    segment.array[5000] = 9
    code = (
        "from pdlink.backends.shm import attach\n"
        f"one = attach({segment.name!r}, 10_000)\n"
        "print(one.array[5000], one.array.flags.writeable, one.array.nbytes)\n"
        "one.close(); one.close()\n"
    )
    assert run_python(code).stdout == "9 False 10000\n"
    assert path_of(segment.name).exists(), "a reader's end removes nothing"


def test_an_attached_segment_outlives_its_owner(segment: Segment) -> None:
    segment.array[:] = 3
    attached = attach(segment.name, 10_000)
    segment.close()
    assert (attached.array == 3).all()
    attached.close()
    with pytest.raises(StateError):
        _ = attached.array


@pytest.mark.parametrize(
    "name", ["../etc/passwd", "pdlink-1-0123456789abcdef/x", "/pdlink-1-0123456789abcdef", "psm_1", "", "pdlink-1-zz"]
)
def test_a_name_that_is_no_segments_is_refused(name: str) -> None:
    with pytest.raises(RegionError, match="not the name"):
        attach(name, 1)


def test_a_size_that_is_not_the_segments_is_refused(segment: Segment) -> None:
    for nbytes in (9_999, 10_001):
        with pytest.raises(RegionError, match=rf"has 10000 bytes.*{nbytes}"):
            attach(segment.name, nbytes)


def test_a_link_is_not_followed(segment: Segment) -> None:
    link = path_of("pdlink-1-0123456789abcdef")
    link.symlink_to(path_of(segment.name))
    try:
        with pytest.raises(RegionError, match="cannot be opened"):
            attach(link.name, 10_000)
    finally:
        link.unlink()


def test_a_segment_that_is_gone_names_its_owner_as_gone(segment: Segment) -> None:
    segment.close()
    with pytest.raises(PeerGone, match=segment.name):
        attach(segment.name, 10_000)


def test_close_removes_the_file_and_may_be_called_twice(segment: Segment) -> None:
    segment.close()
    segment.close()
    assert segment.is_closed
    assert not path_of(segment.name).exists()
    with pytest.raises(StateError):
        _ = segment.array


def test_views_keep_the_memory_until_they_go(segment: Segment) -> None:
    view = segment.array[4000:]
    tensor = torch.from_numpy(segment.array)
    segment.close()
    view[0] = 5
    assert int(tensor[4000]) == 5
    assert segment.name in Path("/proc/self/maps").read_text()
    del view, tensor
    gc.collect()
    assert segment.name not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_segment_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidInput, match=f"nbytes={nbytes}"):
        Segment.create(nbytes)


def test_too_little_room_is_an_error_up_front() -> None:
    facts = os.statvfs(SHM_DIR)
    wanted = facts.f_blocks * facts.f_frsize * 2
    before = set(os.listdir(SHM_DIR))
    with pytest.raises(BackendUnavailable, match=rf"bytes free and {wanted} are wanted.*--shm-size"):
        Segment.create(wanted)
    assert {name for name in set(os.listdir(SHM_DIR)) - before if name.startswith(f"pdlink-{os.getpid()}-")} == set()


def test_room_that_goes_while_it_is_taken_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at what is free and the taking of it, others may take it."""
    monkeypatch.setattr(shm, "_free_bytes", lambda: 1 << 62)
    facts = os.statvfs(SHM_DIR)
    with pytest.raises(BackendUnavailable, match="are wanted"):
        Segment.create(facts.f_blocks * facts.f_frsize * 2)


def test_addresses_of_own_segments_are_found_and_no_others() -> None:
    one, two = Segment.create(10_000), Segment.create(5_000)
    private = np.zeros(10_000, np.uint8)
    try:
        assert locate(one.address, 10_000) == Location(one.name, 0, 10_000)
        assert locate(one.address + 9_999, 1) == Location(one.name, 9_999, 10_000)
        assert locate(two.address + 17, 100) == Location(two.name, 17, 5_000)
        assert locate(one.address + 9_999, 2) is None, "it must lie inside altogether"
        assert locate(one.address - 1, 2) is None
        assert locate(private.__array_interface__["data"][0], 8) is None
        one.close()
        assert locate(one.address, 1) is None
        assert locate(two.address, 5_000) is not None
    finally:
        one.close()
        two.close()


def test_what_nobody_closed_goes_when_the_process_ends() -> None:
    done = run_python(CREATE)
    name = done.stdout.strip()
    assert done.returncode == 0
    assert not path_of(name).exists()


def test_what_a_killed_process_left_goes_at_the_next_sweep() -> None:
    with owning_python() as (process, name):
        assert name not in sweep_stale(), "its owner lives"
        assert path_of(name).exists()
        process.kill()
        process.wait(processes.PATIENCE_S)
        sweep_until_gone([name], processes.PATIENCE_S)
        assert not path_of(name).exists()


def test_a_lock_that_outlasts_its_owner_for_a_moment_is_waited_for() -> None:
    with owning_python() as (process, name), path_of(name).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        process.kill()
        process.wait(processes.PATIENCE_S)
        sweep_until_gone([name], 0.1)
        assert path_of(name).exists(), "whoever has the lock may live"
        late = threading.Timer(0.1, lambda: fcntl.flock(held, fcntl.LOCK_UN))
        late.start()
        sweep_until_gone([name], processes.PATIENCE_S)
        assert not path_of(name).exists()
        late.join()


def test_the_first_segment_of_a_process_sweeps() -> None:
    with owning_python() as (process, name):
        process.kill()
        process.wait(processes.PATIENCE_S)
        run_python(CREATE)
        assert not path_of(name).exists()


def test_a_reader_does_not_keep_a_dead_owners_segment() -> None:
    with owning_python() as (owner, name):
        attached = attach(name, 4096)
        owner.kill()
        owner.wait(processes.PATIENCE_S)
        sweep_until_gone([name], processes.PATIENCE_S)
        assert not path_of(name).exists()
        assert not attached.array.any()
        attached.close()


def test_a_sweep_leaves_strangers_alone() -> None:
    strangers = [path_of("pdlink-notours"), path_of("pdlink_1_0123456789abcdef")]
    for stranger in strangers:
        stranger.write_bytes(b"x")
    try:
        sweep_stale()
        assert all(stranger.exists() for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.unlink()


def test_a_file_swept_before_its_owner_locked_it_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that comes between the making of the file and the lock."""
    real, swept = os.open, []

    def open_then_sweep(path: str, *args: int) -> int:
        fd = real(path, *args)
        if args[0] & os.O_CREAT and not swept:
            swept.append(os.path.basename(path))
            os.unlink(path)
        return fd

    monkeypatch.setattr(shm.os, "open", open_then_sweep)
    segment = Segment.create(100)
    try:
        assert swept != [segment.name]
        assert path_of(segment.name).exists()
    finally:
        segment.close()


def test_a_forked_child_removes_nothing() -> None:
    code = CREATE + (
        "import os, sys\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    segment.close(); sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "from pdlink.backends.shm import locate, sweep_stale\n"
        "swept = sweep_stale()\n"
        "print(os.path.exists('/dev/shm/' + segment.name), segment.name in swept, bool(locate(segment.address, 1)))\n"
    )
    out = run_python(code).stdout.splitlines()
    assert out[1] == "True False True"
    assert not path_of(out[0]).exists()


def test_a_forked_child_has_segments_of_its_own() -> None:
    code = CREATE + (
        "import os, sys\n"
        "from pdlink.backends.shm import locate\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    own = Segment.create(10)\n"
        "    ok = locate(own.address, 10) is not None and locate(segment.address, 1) is None\n"
        "    sys.exit(0 if ok else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len([n for n in os.listdir('/dev/shm')\n"
        "    if n.startswith(f'pdlink-{child}-')]))\n"
    )
    assert run_python(code).stdout.splitlines()[1] == "0 0"


def test_an_allocation_is_memory_that_peers_can_find() -> None:
    allocation = allocate(4096)
    try:
        assert allocation.tensor.data_ptr() == allocation.address
        assert not allocation.tensor.any()
        allocation.tensor[10] = 4
        assert locate(allocation.address + 10, 1) == Location(allocation.name, 10, 4096)
        attached = attach(allocation.name, 4096)
        assert attached.array[10] == 4
        attached.close()
    finally:
        allocation.close()
        allocation.close()
    with pytest.raises(StateError):
        _ = allocation.tensor


def test_segments_need_no_torch() -> None:
    code = (
        "import sys; import pdlink.backends.shm\n"
        "print([name for name in ('torch', 'multiprocessing.shared_memory') if name in sys.modules])"
    )
    assert run_python(code).stdout == "[]\n"


def test_a_signal_in_the_middle_of_a_change_can_still_close_everything() -> None:
    """A handler runs on the thread that it interrupts, which may hold the lock of the table."""
    code = """
import os, signal, sys
from pdlink.backends import shm

class Interrupting(list):
    def insert(self, at, item):
        super().insert(at, item)
        signal.raise_signal(signal.SIGTERM)

def end(number, frame):
    shm.close_all()
    os._exit(7)

first = shm.Segment.create(64)
print(first.name, flush=True)
shm._TABLE._segments = Interrupting(shm._TABLE._segments)
signal.signal(signal.SIGTERM, end)
shm.Segment.create(64)
"""
    done = run_python(code)
    assert done.returncode == 7, done.stderr
    assert not path_of(done.stdout.strip()).exists()
