import logging
import sys

import pytest

from pdlink.backends import registry
from pdlink.backends.base import Backend, Capabilities, Peer, PullStatus, Settled
from pdlink.backends.ipc import IpcBackend
from pdlink.backends.registry import choose, factory, known_backends, open_backends, parse_backends
from pdlink.errors import BackendUnavailable, ConfigError, PeerGone
from pdlink.layout import MemoryKind

PLUGIN = """
from tests.backends.test_registry import Plugin

class Acme(Plugin):
    name = "acme"

class Far(Plugin):
    name = "far"
    def __init__(self):
        from pdlink.errors import BackendUnavailable
        raise BackendUnavailable("no such fabric here; load its driver")

class Misnamed(Plugin):
    name = "something else"

class Broken(Plugin):
    def __init__(self):
        raise RuntimeError("a bug of theirs")

def needy():
    import a_module_that_is_not_installed
"""
ENTRY_POINTS = """[pdlink.backends]
acme = acme_transport:Acme
far = acme_transport:Far
needy = acme_transport:needy
absent = acme_transport:Absent
misnamed = acme_transport:Misnamed
broken = acme_transport:Broken
ipc = acme_transport:Acme
"""


class Plugin(Backend):
    """A third party's backend that reaches whoever says so."""

    name = "plugin"
    capabilities = Capabilities(frozenset({MemoryKind.HOST}))
    opened: list = []  # noqa: RUF012 - what the tests look at

    def __init__(self):
        self.closed = False
        self.connected = []
        Plugin.opened.append(self)

    def register(self, region):
        pass

    def deregister(self, region):
        pass

    def endpoint(self):
        return b"reach me"

    def connect(self, peer):
        if peer.endpoint != b"reach me":
            raise PeerGone(f"{peer.worker_id} hung up")
        self.connected.append(peer)

    def disconnect(self, peer):
        pass

    def submit(self, batch):
        raise AssertionError("nothing is pulled here")

    def poll(self, handle):
        return PullStatus.DONE

    def settle(self, handle):
        return Settled.QUIET

    def fence(self, peer):
        return (peer.worker_id,)

    def close(self):
        self.closed = True


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution on the path that brings backends of its own."""
    (tmp_path / "acme_transport.py").write_text(PLUGIN)
    info = tmp_path / "acme_transport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-transport\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    Plugin.opened.clear()
    yield
    sys.modules.pop("acme_transport", None)


def test_auto_means_the_built_in_backends_that_expose_nothing_best_first():
    assert {"ipc", "nixl", "mooncake"} <= set(known_backends())
    assert parse_backends("auto") == parse_backends(" auto ") == ("ipc", "nixl")
    assert parse_backends(" ipc ") == ("ipc",)


@pytest.mark.parametrize("text", ["icp", "", "ipc,", "auto,ipc", "IPC"])
def test_an_unknown_name_is_refused_with_the_known_ones(text):
    with pytest.raises(ConfigError, match=r"unknown backend '.*'; known ones: ipc"):
        parse_backends(text)


def test_a_name_given_twice_is_refused():
    with pytest.raises(ConfigError, match="'ipc, ipc' names one twice"):
        parse_backends("ipc, ipc")


def test_nothing_is_imported_before_a_backend_is_made(installed):
    make = factory("acme")
    assert "acme_transport" not in sys.modules
    assert make().name == "acme"
    assert "acme_transport" in sys.modules


def test_an_entry_point_adds_a_backend_and_cannot_take_a_built_in_name(installed):
    assert {"acme", "far", "needy"} <= set(known_backends())
    assert known_backends().count("ipc") == 1
    opened = open_backends("acme, ipc")
    assert list(opened) == ["acme", "ipc"]
    assert isinstance(opened["ipc"], IpcBackend)
    for backend in opened.values():
        backend.close()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("far", "no such fabric here; load its driver"),
        ("needy", r"backend needy is not installed: No module named 'a_module_that_is_not_installed'"),
        ("absent", "backend absent is not installed"),
        ("misnamed", "backend misnamed calls itself 'something else'"),
    ],
)
def test_a_named_backend_that_cannot_work_here_is_an_error_and_the_others_are_closed(installed, name, says):
    with pytest.raises(BackendUnavailable, match=says):
        open_backends(f"acme,{name}")
    (acme,) = [one for one in Plugin.opened if one.name == "acme"]
    assert acme.closed


def test_a_bug_of_a_backend_is_not_hidden_and_the_others_are_closed(installed):
    with pytest.raises(RuntimeError, match="a bug of theirs"):
        open_backends("acme,broken")
    assert Plugin.opened[0].closed


def test_auto_leaves_out_what_cannot_work_here_and_logs_why(installed, monkeypatch, caplog):
    monkeypatch.setattr(registry, "AUTO_ORDER", ("far", "acme", "needy"))
    with caplog.at_level(logging.INFO, "pdlink.backends"):
        opened = open_backends("auto")
    assert list(opened) == ["acme"]
    logged = [record.getMessage() for record in caplog.records]
    assert any("backend far is not used: no such fabric here" in text for text in logged)
    assert any("backend needy is not used" in text for text in logged)


def test_auto_with_nothing_that_works_is_an_error_with_every_reason(installed, monkeypatch):
    monkeypatch.setattr(registry, "AUTO_ORDER", ("far", "needy"))
    with pytest.raises(BackendUnavailable, match=r"no backend works here.*far: no such.*needy: backend needy is"):
        open_backends("auto")


class Named(Plugin):
    def __init__(self, name):
        super().__init__()
        self.name = name


def test_the_first_own_backend_that_reaches_the_peer_is_chosen_with_a_reason_for_each_other(caplog):
    own = {name: Named(name) for name in ("fast", "broken", "good", "slow")}
    offered = {"slow": b"reach me", "good": b"reach me", "broken": b"gone", "theirs": b"reach me"}
    with caplog.at_level(logging.INFO, "pdlink.backends"):
        choice = choose(own, "w3", 17, offered)
    assert choice.backend is own["good"]
    assert own["good"].connected == [Peer("w3", 17, b"reach me")]
    assert own["slow"].connected == []
    assert choice.rejected == {
        "fast": "w3 does not offer it (it offers slow, good, broken, theirs)",
        "broken": "w3 hung up",
    }
    (record,) = caplog.records
    assert "pull from w3 over good" in record.getMessage()
    assert "w3 hung up" in record.getMessage()


def test_without_a_common_backend_every_reason_is_given():
    own = {name: Named(name) for name in ("fast", "broken")}
    with pytest.raises(BackendUnavailable) as caught:
        choose(own, "w3", 17, {"broken": b"gone"})
    assert str(caught.value) == (
        "no common backend with w3: fast: w3 does not offer it (it offers broken); broken: w3 hung up; "
        "set PDLINK_BACKENDS alike on both sides"
    )
    with pytest.raises(BackendUnavailable, match="it offers none"):
        choose(own, "w3", 17, {})
    with pytest.raises(BackendUnavailable, match="none is open here"):
        choose({}, "w3", 17, {"broken": b"gone"})
