"""How the mooncake library is loaded, what it is told when it cannot work here, and what one engine of it does."""

import os
import socket
import struct
import sys
from pathlib import Path

import pytest

from pdlink.backends import mooncake_engine
from pdlink.backends.mooncake_engine import DONE, FAILED, PENDING, Engine, load
from pdlink.backends.registry import open_backends
from pdlink.errors import BackendError, BackendUnavailable, RegionError
from pdlink.testing.conformance.pool import PrivateBlock
from tests import processes
from tests.backends.needs import needs_mooncake

NAMES = ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_INTRANODE_NVLINK", "MC_LOG_LEVEL", "MC_USE_IPV6", "MC_TCP_LANES_PER_PEER")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As if nobody had set anything; what a test's `load` sets does not outlive it."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory"),
            "backend mooncake needs libibverbs.so.1; install the Debian package libibverbs1",
        ),
        (
            ImportError("libnuma.so.1: cannot open shared object file: No such file or directory"),
            "backend mooncake needs libnuma.so.1; install the Debian package libnuma1",
        ),
        (ImportError("undefined symbol: xyz"), "the mooncake library cannot be loaded: undefined symbol: xyz"),
        (
            ModuleNotFoundError("No module named 'mooncake'"),
            r"backend mooncake is not installed \(No module named 'mooncake'\); pip install 'pdlink\[mooncake-cpu\]'",
        ),
    ],
)
def test_a_library_that_does_not_load_is_one_line_with_what_to_install(monkeypatch, error, says):
    def fail(name):
        raise error

    monkeypatch.setattr(mooncake_engine, "import_module", fail)
    with pytest.raises(BackendUnavailable, match=f"^{says}") as caught:
        open_backends("mooncake")
    assert "\n" not in str(caught.value)
    opened = open_backends("auto")
    assert "mooncake" not in opened
    for backend in opened.values():
        backend.close()


@pytest.mark.parametrize(
    ("protocol", "variable", "other"),
    [("tcp", "MC_FORCE_HCA", "rdma"), ("rdma", "MC_FORCE_TCP", "tcp"), ("tcp", "MC_INTRANODE_NVLINK", "nvlink_intra")],
)
def test_a_variable_that_forces_another_protocol_is_refused_with_both(monkeypatch, protocol, variable, other):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(BackendUnavailable, match=f"over {other} because {variable} is set, and .* is {protocol}"):
        load("127.0.0.1", protocol)


@needs_mooncake
def test_what_an_operator_has_set_for_the_library_stays(monkeypatch):
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    load("127.0.0.1", "tcp")
    assert [os.environ.get(name) for name in ("MC_LOG_LEVEL", "MC_FORCE_TCP")] == ["INFO", "1"]
    assert "MC_USE_IPV6" not in os.environ


@needs_mooncake
def test_nvlink_is_refused_where_the_library_would_use_tcp_in_its_place(monkeypatch):
    with pytest.raises(BackendUnavailable, match="built without CUDA and would use tcp for nvlink_intra; pip install"):
        load("127.0.0.1", "nvlink_intra")


@needs_mooncake
def test_rdma_without_a_device_is_refused_and_never_becomes_tcp():
    script = """
from pdlink.backends.mooncake_engine import Engine
from pdlink.errors import BackendUnavailable
try:
    Engine("127.0.0.1", "rdma")
except BackendUnavailable as error:
    print(error)
"""
    devices = Path("/sys/class/infiniband")
    if devices.is_dir() and any(devices.iterdir()):
        pytest.skip("this machine has an RDMA device")
    done = processes.run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    assert "mooncake does not start with protocol rdma on 127.0.0.1; the library's own lines" in done.stdout
    assert "No available RNIC" in done.stderr


@pytest.fixture
def engines():
    made = [Engine("127.0.0.1", "tcp") for _ in range(2)]
    yield made
    for engine in made:
        engine.close()
        engine.close()


@pytest.fixture
def block():
    made = PrivateBlock(1 << 16)
    yield made
    made.close()


def ended(engine, posted):
    while (state := engine.check(posted)) == PENDING:
        pass
    return state


@needs_mooncake
def test_an_engine_reads_what_the_other_offers_and_nothing_else(engines, block):
    ours, theirs = engines
    block.array[:100] = 7
    start = block.address
    theirs.offer([(start, start + 100)])
    assert ended(ours, ours.read(theirs.session, [start + 1000], [start], [100])) == DONE
    assert block.array[1000:1100].tolist() == [7] * 100
    assert ended(ours, ours.read(theirs.session, [start + 1000], [start], [101])) == FAILED
    theirs.offer([(start + 50, start + 100)])
    assert ended(ours, ours.read(theirs.session, [start + 1000], [start], [100])) == FAILED
    assert ended(ours, ours.read(theirs.session, [start + 1000], [start + 50], [50])) == DONE


@needs_mooncake
def test_memory_that_overlaps_is_refused_with_the_librarys_code(engines, block):
    start = block.address
    with pytest.raises(RegionError, match=r"code -7: it overlaps memory that it knows"):
        engines[0].offer([(start, start + 100), (start + 50, start + 200)])


@needs_mooncake
def test_a_session_where_nobody_listens_is_an_error(engines, block):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        session = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(BackendError, match=f"cannot read from {session}; the library's own lines"):
        engines[0].read(session, [block.address], [block.address], [8])


@needs_mooncake
def test_the_end_of_an_engine_does_not_wait_a_second_with_the_gil_held(engines):
    port = int(engines[0].session.rpartition(":")[2])
    listener = mooncake_engine._hurry(port)
    assert listener is not None
    with listener:
        assert listener.getsockname()[1] == port
        assert struct.unpack("ll", listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))[0] == 0


@needs_mooncake
def test_an_engine_that_is_in_use_is_not_said_to_be_ended():
    engine = Engine("127.0.0.1", "tcp")
    user = engine._engine
    with pytest.raises(BackendError, match="cannot be ended while it is in use"):
        engine.close()
    del user
    engine.close()
