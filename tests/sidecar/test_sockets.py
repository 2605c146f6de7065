"""Where a sidecar's sockets may lie, who may connect, and what is left there."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pdlink.config import load_settings
from pdlink.errors import AccessDenied, AddressError, DeadlineExceeded, InvalidInput, PeerGone
from pdlink.sidecar import SidecarGone, connect, lifeline, stream
from pdlink.sidecar.healthy import MAX_WATCHES
from pdlink.sidecar.server import SidecarServer
from pdlink.sidecar.sockets import MAX_PATH_BYTES, Place, check_place, check_socket
from pdlink.v1 import sidecar_pb2 as pb
from pdlink.v1 import sidecar_pb2_grpc as rpc


def bound(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    return made


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(InvalidInput, match=r"can be changed by other users .* mode 700"):
        check_place(tmp_path / "a.sock")
    with pytest.raises(InvalidInput, match="can be changed"):
        connect(tmp_path / "a.sock")
    tmp_path.chmod(0o700)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InvalidInput, match="can be changed by other users"):
        check_place(tmp_path / "a.sock")


def test_a_socket_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.sock"
    with bound(path):
        mine = path.lstat()
        theirs = os.stat_result((mine.st_mode, *mine[1:4], mine.st_uid + 1, *mine[5:10]))
        monkeypatch.setattr(Path, "lstat", lambda _: theirs)
        with pytest.raises(InvalidInput, match=rf"belongs to user {mine.st_uid + 1}.* run both as one user"):
            check_socket(path)


def test_a_path_that_no_socket_can_have_is_refused_with_the_most(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"the most is .* a shorter one"):
        Place(tmp_path / ("a" * MAX_PATH_BYTES))
    with pytest.raises(InvalidInput, match=r"No such file.* make one of mode 700"):
        check_place(tmp_path / "nowhere" / "a.sock")


def test_a_file_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.touch()
    with pytest.raises(InvalidInput, match="is no socket"):
        connect(path)


def test_a_sidecar_leaves_a_file_alone_that_is_no_socket(tmp_path: Path) -> None:
    """A path of a configuration file, given by mistake, or a name that belongs to somebody else."""
    path, beside = tmp_path / "settings.yaml", tmp_path / "a.sock.notes.rpc"
    for one in (path, beside):
        one.write_text("log: info")
    with pytest.raises(InvalidInput, match=r"settings\.yaml that is no socket; give another path"):
        Place(path)
    link = tmp_path / "link.sock"
    link.symlink_to(path)
    with pytest.raises(InvalidInput, match="that is no socket"):
        Place(link)
    Place(tmp_path / "a.sock").close()
    assert [one.read_text() for one in (path, beside, link)] == ["log: info"] * 3


def test_a_sidecar_that_binds_every_interface_needs_a_host_to_tell_peers(tmp_path: Path) -> None:
    wildcard = ".".join("0000")
    with pytest.raises(AddressError, match="set PDLINK_ADVERTISE_HOST to the address that peers reach"):
        SidecarServer.start(tmp_path / "a.sock", load_settings({}, bind_host=wildcard))
    assert list(tmp_path.iterdir()) == []
    SidecarServer.start(tmp_path / "a.sock", load_settings({}, bind_host=wildcard, advertise_host="127.0.0.1")).close()


def test_grpc_health_and_reflection_answer_at_the_socket_of_a_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with SidecarServer.start(path, load_settings({})), grpc.insecure_channel(f"unix:{path}") as channel:
        for name in ("", "pdlink.v1.Sidecar"):
            asked = health_pb2.HealthCheckRequest(service=name)
            said = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=30)
            assert said.status == health_pb2.HealthCheckResponse.SERVING
        assert "pdlink.v1.Sidecar" in ProtoReflectionDescriptorDatabase(channel).get_services()
        watches = [health_pb2_grpc.HealthStub(channel).Watch(asked) for _ in range(8)]
        assert {next(one).status for one in watches} == {health_pb2.HealthCheckResponse.SERVING}
        # More watches than there are threads keep no engine out, not even one that is refused.
        assert rpc.SidecarStub(channel).Open(pb.OpenRequest(), timeout=30).HasField("error")
        for one in watches:
            one.cancel()


def test_watches_that_come_and_go_hold_up_nothing(tmp_path: Path) -> None:
    """A watcher that leaves while others are told something, again and again; more than there are threads for them."""
    path = tmp_path / "a.sock"
    with SidecarServer.start(path, load_settings({})) as server, grpc.insecure_channel(f"unix:{path}") as channel:
        stub, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        for _ in range(60):
            watches = [stub.Watch(asked) for _ in range(2 * MAX_WATCHES)]
            next(watches[0])
            for one in watches:
                one.cancel()
            assert stub.Check(asked, timeout=30).status == health_pb2.HealthCheckResponse.SERVING
        last = stub.Watch(asked, timeout=60)
        assert next(last).status == health_pb2.HealthCheckResponse.SERVING
        server.close()
        assert next(last).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_where_nobody_listens_the_engine_is_told_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(SidecarGone, match="pdlink sidecar --socket"):
        connect(tmp_path / "a.sock")


def test_one_place_has_one_sidecar(tmp_path: Path) -> None:
    first = Place(tmp_path / "a.sock")
    with pytest.raises(InvalidInput, match=r"serves at .* already"):
        Place(tmp_path / "a.sock")
    first.close()
    first.close()
    Place(tmp_path / "a.sock").close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_sidecar_left_is_removed_and_what_is_served_stays(tmp_path: Path) -> None:
    for name in ("a.sock", "a.sock.1.rpc", "a.sock.1.life"):
        bound(tmp_path / name).close()
    with bound(tmp_path / "a.sock.2.rpc") as served, bound(tmp_path / "b.sock.1.rpc"):
        served.listen()
        place = Place(tmp_path / "a.sock")
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["a.sock.2.rpc", "a.sock.lock", "b.sock.1.rpc"]
    place.close()


def test_a_lifeline_is_for_this_user_alone_and_tells_who_is_there(tmp_path: Path) -> None:
    path = tmp_path / "life"
    listener = lifeline.Listener(path)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    ours = lifeline.connect(path, 30.0)
    theirs = listener.accept(30.0)
    assert theirs is not None
    assert ours.pid == theirs.pid == os.getpid()
    assert not theirs.wait_ended(0)
    ours.hang_up()
    assert set(theirs.watched()) & lifeline.wait_any(theirs.watched())
    for one in (ours, theirs, listener, listener):
        one.close()
    assert not path.exists()
    with pytest.raises(PeerGone, match="does not listen"):
        lifeline.connect(path, 30.0)


def test_a_lifeline_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = lifeline.Listener(tmp_path / "life")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.connect(str(tmp_path / "life"))
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(AccessDenied, match=rf"process {os.getpid()} of user {mine}"):
            listener.accept(30.0)
        assert made.recv(1) == b""
    listener.close()


def test_a_process_waits_for_its_engine_no_longer_than_it_may(tmp_path: Path) -> None:
    listener = lifeline.Listener(tmp_path / "life")
    reader, writer = os.pipe()
    with pytest.raises(DeadlineExceeded):
        listener.accept(0.01, reader)
    os.close(writer)
    assert listener.accept(30.0, reader) is None  # whoever started it has ended
    os.close(reader)
    listener.close()


def test_an_engine_that_refuses_the_stream_leaves_no_lifeline_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rpc").write_text("no socket")
    opened = pb.Opened(socket=str(tmp_path / "rpc"), lifeline=str(tmp_path / "life"))
    monkeypatch.setattr(stream, "_open", lambda path, timeout_s: opened)
    listener = lifeline.Listener(tmp_path / "life")
    with pytest.raises(InvalidInput, match="is no socket"):
        stream.EngineStream(tmp_path / "a.sock", 30.0)
    with pytest.raises(DeadlineExceeded):
        listener.accept(0.0)
    listener.close()
