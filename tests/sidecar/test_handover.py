"""File descriptors go from an engine to the process that serves it, each to whom it is for, and none is left open."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlink.errors import DeadlineExceeded, FrameError, PeerGone
from pdlink.sidecar import handover
from pdlink.sidecar.handover import MAX_AT_ONCE, TICKET_BYTES, Desk, hand_over
from tests.processes import PATIENCE_S
from tests.sidecar.rig import folder_for_sockets


@pytest.fixture
def path() -> Iterator[Path]:
    before = num_files()
    with folder_for_sockets() as folder:
        yield Path(folder) / "a.fds"
    assert num_files() == before


@pytest.fixture
def desk(path: Path) -> Iterator[Desk]:
    desk = Desk(path)
    yield desk
    desk.close()
    desk.close()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory(text: bytes) -> int:
    fd = os.memfd_create("handed")
    os.write(fd, text)
    return fd


def close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


@pytest.mark.parametrize("count", [1, MAX_AT_ONCE, 2 * MAX_AT_ONCE + 3])
def test_every_descriptor_arrives_in_its_place(path: Path, desk: Desk, count: int) -> None:
    mine = [memory(str(number).encode()) for number in range(count)]
    theirs = desk.take(hand_over(path, mine), count, PATIENCE_S)
    close(mine)
    assert [os.pread(fd, 16, 0) for fd in theirs] == [str(number).encode() for number in range(count)]
    assert not any(os.get_inheritable(fd) for fd in theirs)
    close(theirs)


def test_each_taker_has_what_came_under_its_ticket(path: Path, desk: Desk) -> None:
    mine = [memory(b"first"), memory(b"second")]
    tickets = [hand_over(path, [fd]) for fd in mine]
    close(mine)
    (second,), (first,) = (desk.take(one, 1, PATIENCE_S) for one in reversed(tickets))
    assert (os.pread(first, 16, 0), os.pread(second, 16, 0)) == (b"first", b"second")
    close([first, second])


def test_nothing_is_waited_for_where_nothing_was_handed_over(desk: Desk) -> None:
    assert desk.take(b"", 0, PATIENCE_S) == []


def test_a_wrong_count_is_refused_with_both_and_closes_what_came(path: Path, desk: Desk) -> None:
    fd = memory(b"")
    for count in (1, 3):
        ticket = hand_over(path, [fd, fd])
        with pytest.raises(FrameError, match=rf"2 file descriptors were handed over, and {count} blocks"):
            desk.take(ticket, count, PATIENCE_S)
    os.close(fd)


def test_what_never_comes_ends_the_wait(path: Path, desk: Desk) -> None:
    with pytest.raises(DeadlineExceeded, match="has not handed over"):
        desk.take(bytes(TICKET_BYTES), 1, 0.05)
    with pytest.raises(FrameError, match="ticket of 3 bytes"):
        desk.take(b"abc", 1, PATIENCE_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as slow:
        slow.connect(str(path))
        with pytest.raises(DeadlineExceeded, match="not finished"):
            desk.take(bytes(TICKET_BYTES), 1, 0.05)


@pytest.mark.parametrize("messages", [[b"short"], [b"x" * 17], [b"a" * 16, b"b" * 16]])
def test_what_comes_under_no_ticket_or_two_is_refused_and_closed(path: Path, desk: Desk, messages: list[bytes]) -> None:
    fd = memory(b"")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
        sender.connect(str(path))
        for one in messages:
            socket.send_fds(sender, [one], [fd])
    os.close(fd)
    with pytest.raises(FrameError, match="under two tickets"):
        desk.take(b"a" * 16, 1, PATIENCE_S)


def test_what_is_cut_off_is_refused(path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_AT_ONCE", 1)
    fd = memory(b"")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sender:
        sender.connect(str(path))
        sender.sendmsg([b"a" * 16], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * 40))])
    os.close(fd)
    with pytest.raises(FrameError, match="cut off"):
        desk.take(b"a" * 16, 40, PATIENCE_S)


def test_where_nobody_listens_that_is_said(path: Path) -> None:
    with pytest.raises(PeerGone, match="takes no memory at"):
        hand_over(path, [0])


def test_the_socket_is_this_users_alone_and_goes_with_the_desk(path: Path) -> None:
    desk = Desk(path)
    assert path.stat().st_mode & 0o777 == 0o600
    taken: list[Exception] = []

    def take() -> None:
        try:
            desk.take(bytes(TICKET_BYTES), 1, 0.5)
        except (PeerGone, DeadlineExceeded) as error:
            taken.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert len(taken) == 1
    desk.close()
    assert not path.exists()
