"""Asking several addresses, addresses where something else stands, and following an instance."""

import http.server
import queue
import random
import re
import socket
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pdlink.address import Address
from pdlink.bootstrap import service_wire, wire
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.directory import Directory
from pdlink.bootstrap.messages import PrefillServerInfo, Side
from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.bootstrap.rpc import BootstrapUnreachable, Link
from pdlink.config import Settings
from pdlink.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    PdlinkError,
    StateError,
    UnknownInstance,
)
from pdlink.events import Events
from pdlink.health import Health
from pdlink.layout import fingerprint
from pdlink.v1 import bootstrap_pb2 as pb
from tests.bootstrap.values import PRINT, make_instance, make_layout
from tests.ports import held_port

NAME = "prefill-a"
WAIT_S = 60.0


def register(server, *registrations):
    link = Link(server.address)
    for one in registrations:
        link.call("Register", pb.RegisterRequest(registration=service_wire.pack_registration(one)), WAIT_S)
    link.close()


def withdraw(server, registration):
    link = Link(server.address)
    link.call("Withdraw", pb.WithdrawRequest(worker=service_wire.pack_key(registration.key)), WAIT_S)
    link.close()


@pytest.fixture
def dead_address(stack):
    """Makes addresses where nothing listens."""
    return lambda: Address("127.0.0.1", stack.enter_context(held_port()))


class Garbage(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(random.Random(3).randbytes(512))


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


class Threaded(socketserver.ThreadingTCPServer):
    daemon_threads = True


@pytest.fixture
def strangers(stack):
    """Address of something that is not pdlink, by kind."""

    def start(kind):
        if kind == "silent":
            sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            return Address("127.0.0.1", sock.getsockname()[1])
        if kind == "another gRPC":
            server = grpc.server(ThreadPoolExecutor(1))
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            stack.callback(lambda: server.stop(0).wait())
            return Address("127.0.0.1", port)
        handler = {"http": Quiet, "garbage": Garbage}[kind]
        server = stack.enter_context(Threaded(("127.0.0.1", 0), handler))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        return Address("127.0.0.1", server.server_address[1])

    return start


STRANGERS = ["http", "silent", "garbage", "another gRPC"]


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_peer_that_is_not_pdlink_is_named_within_the_timeout(strangers, client, kind):
    address = strangers(kind)
    is_silent = kind == "silent"
    with pytest.raises(DeadlineExceeded if is_silent else BootstrapUnreachable) as refused:
        client(address).resolve(NAME, PRINT, timeout_s=1.0 if is_silent else WAIT_S)
    assert str(address) in str(refused.value)
    assert "pdlink bootstrap" in str(refused.value)


def test_an_address_where_nothing_listens_is_named(client, dead_address):
    address = dead_address()
    with pytest.raises(BootstrapUnreachable, match=f"nothing listens at bootstrap address {address}"):
        client(address).resolve(NAME, PRINT)


@pytest.mark.parametrize("kind", STRANGERS)
def test_the_next_address_is_asked_when_one_is_not_pdlink(strangers, serve, client, dead_address, kind):
    server = serve()
    register(server, *make_instance())
    info = client(strangers(kind), dead_address(), server.address).resolve(NAME, PRINT, timeout_s=9.0)
    assert len(info.ranks) == 2


def test_the_next_address_is_asked_when_one_does_not_have_the_instance_ready(serve, client):
    empty, half, full = serve(), serve(), serve()
    register(half, make_instance()[0])
    register(full, *make_instance())
    assert len(client(empty.address, half.address, full.address).resolve(NAME, PRINT).ranks) == 2


def test_silent_addresses_share_the_time_that_is_given(strangers, client):
    silent = strangers("silent"), strangers("silent")
    with pytest.raises(DeadlineExceeded) as late:
        client(*silent).resolve(NAME, PRINT, timeout_s=2.0)
    said = re.findall(r"bootstrap (\S+) did not answer within ([\d.]+) s", str(late.value))
    assert [address for address, _ in said] == [str(one) for one in silent]
    assert all(0 < float(waited_s) < 1.5 for _, waited_s in said)


def test_an_error_lists_what_each_address_said(serve, client, dead_address):
    empty, half, dead = serve(), serve(), dead_address()
    register(half, make_instance()[0])
    with pytest.raises(NotReady) as waiting:
        client(empty.address, half.address, dead).resolve(NAME, PRINT)
    text = str(waiting.value)
    assert f"{empty.address}: nobody has registered" in text
    assert f"{half.address}: instance 'prefill-a' is not ready" in text
    assert f"nothing listens at bootstrap address {dead}" in text
    with pytest.raises(UnknownInstance):
        client(empty.address, empty.address).resolve(NAME, PRINT)
    with pytest.raises(BootstrapUnreachable):
        client(dead, dead_address()).resolve(NAME, PRINT)


def test_an_incompatible_instance_is_final(serve, client):
    first, second = serve(), serve()
    register(first, *make_instance(make_layout(page_size=32)))
    register(second, *make_instance())
    with pytest.raises(IncompatibleInstance):
        client(first.address, second.address).resolve(NAME, PRINT)


def test_waiting_ends_when_the_last_rank_has_come(serve, client):
    server = serve()
    first, second = make_instance()
    register(server, first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client(server.address).wait_ready, NAME, PRINT, WAIT_S)
        register(server, second)
        assert len(waiting.result(WAIT_S).ranks) == 2


def test_waiting_ends_with_the_reason_though_the_last_attempt_was_cut_short(client, monkeypatch):
    answers = iter([NotReady("rank cp1 has not registered")])
    asking = client(Address("127.0.0.1", 9))

    def resolve(*_):
        raise next(answers, DeadlineExceeded("did not answer within 0.016 s"))

    monkeypatch.setattr(asking, "resolve", resolve)
    with pytest.raises(NotReady, match=r"cp1 has not registered \(waited 0\.25 s\)"):
        asking.wait_ready(NAME, PRINT, 0.25)


def test_waiting_ends_with_what_was_said_last(serve, client):
    server = serve()
    with pytest.raises(UnknownInstance, match=r"waited 2 s"):
        client(server.address).wait_ready(NAME, PRINT, 2.0)
    register(server, make_instance()[0])
    with pytest.raises(IncompatibleInstance):
        client(server.address).wait_ready(NAME, fingerprint(make_layout(page_size=32)), WAIT_S)


def test_a_client_needs_an_address_and_a_name_and_to_be_open(client, dead_address):
    with pytest.raises(InvalidInput, match="at least one bootstrap address"):
        BootstrapClient([])
    one = client(dead_address())
    with pytest.raises(InvalidInput, match="instance ''"):
        one.resolve("", PRINT)
    one.close()
    one.close()
    with pytest.raises(StateError, match="closed"):
        one.resolve(NAME, PRINT)
    with pytest.raises(StateError, match="closed"):
        one.watch(NAME, PRINT, print)


class FakeBootstrap:
    """A gRPC server that answers Resolve with any bytes."""

    def __init__(self, stack, answer):
        handler = grpc.unary_unary_rpc_method_handler(lambda data, context: answer)
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("pdlink.v1.Bootstrap", {"Resolve": handler}),)
        )
        self.address = Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
        server.start()
        stack.callback(lambda: server.stop(0).wait())


def answer_of(registrations, version=1):
    one = registrations[0]
    ranks = tuple(each.rank for each in registrations)
    return PrefillServerInfo(
        one.instance, one.protocol, one.layout, fingerprint(one.layout), one.sizes, one.kinds, ranks, version
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "has nothing in it"),
        (b"\xff\xff", "are not a pdlink ResolveResponse"),
        (pb.ResolveResponse(refusal=pb.Refusal()).SerializeToString(), "without a reason"),
        (pb.ResolveResponse(info=pb.PrefillServerInfo()).SerializeToString(), "protocol range 0..0"),
        (
            pb.ResolveResponse(info=service_wire.pack_info(answer_of(make_instance(instance="b")))).SerializeToString(),
            "answered instance 'b' when asked for 'prefill-a'",
        ),
        (
            pb.ResolveResponse(
                info=service_wire.pack_info(answer_of(make_instance(make_layout(page_size=32))))
            ).SerializeToString(),
            "index_k.page_size is 32 on prefill and 64 on decode",
        ),
        (
            pb.ResolveResponse(info=service_wire.pack_info(answer_of(make_instance()[:1]))).SerializeToString(),
            "rank dp0.pp0.cp1.tp0 has not registered",
        ),
    ],
)
def test_decode_trusts_no_answer_that_it_has_not_checked_itself(stack, client, answer, words):
    with pytest.raises(PdlinkError, match=words):
        client(FakeBootstrap(stack, answer).address).resolve(NAME, PRINT)


class Follower:
    """A callback that queues what it is told."""

    def __init__(self):
        self.answers = queue.Queue()

    def __call__(self, answer):
        self.answers.put(answer)

    def next(self):
        return self.answers.get(timeout=WAIT_S)

    def until(self, kind):
        while True:
            answer = self.next()
            if isinstance(answer, kind):
                return answer


def test_a_watch_tells_every_change_of_an_instance_without_waiting_for_a_tick(serve, client, monkeypatch):
    monkeypatch.setattr("pdlink.bootstrap.server.EXPIRY_INTERVAL_S", 3600.0)
    server, follow = serve(), Follower()
    client(server.address).watch(NAME, PRINT, follow)
    assert isinstance(follow.next(), UnknownInstance)
    first, second = make_instance()
    register(server, first)
    assert "cp1" in str(follow.next())
    register(server, second)
    assert follow.next().ranks == (first.rank, second.rank)
    register(server, make_instance(incarnation=2)[0])
    assert [one.incarnation for one in follow.next().ranks] == [2, 1]
    withdraw(server, second)
    assert isinstance(follow.next(), NotReady)


def test_a_watch_tells_an_incompatible_instance_and_its_correction(serve, client):
    server, follow = serve(), Follower()
    register(server, make_instance(make_layout(page_size=32))[0])
    client(server.address).watch(NAME, PRINT, follow)
    refused = follow.next()
    assert isinstance(refused, IncompatibleInstance)
    assert [one.worker_id for one in refused.endpoints] == ["w0"]
    register(server, *make_instance(incarnation=2))
    assert len(follow.until(PrefillServerInfo).ranks) == 2


def test_a_watch_tells_when_leases_run_out(serve, client):
    now = [0.0]
    server, follow = serve(clock=lambda: now[0], settings=Settings(registration_lease_s=10)), Follower()
    register(server, *make_instance())
    client(server.address).watch(NAME, PRINT, follow)
    assert len(follow.next().ranks) == 2
    now[0] = 9.9
    assert client(server.address).resolve(NAME, PRINT)
    now[0] = 10.0
    assert isinstance(follow.next(), UnknownInstance)
    with pytest.raises(UnknownInstance):
        client(server.address).resolve(NAME, PRINT)


def test_a_watch_says_nothing_that_it_has_said(serve, client):
    """One service does not repeat itself, and rounds over several are not repeated either."""
    server, empty, asked, follow = serve(), serve(), threading.Semaphore(0), Follower()
    first, second = make_instance()
    register(server, first)
    link = Link(server.address)
    answers = iter(link.stream("Watch", pb.WatchRequest(instance=NAME, decode=wire.pack_side(Side.of(make_layout())))))
    assert pb.WatchResponse.FromString(next(answers)).WhichOneof("answer") == "not_ready"
    register(server, make_instance(incarnation=2)[0])
    client(server.address).watch(NAME, PRINT, lambda answer: asked.release())
    assert asked.acquire(timeout=WAIT_S)  # the service has been round since
    client(empty.address, server.address).watch(NAME, PRINT, follow)
    assert isinstance(follow.next(), NotReady)
    rounds = threading.Semaphore(0)
    with pytest.MonkeyPatch.context() as patch:
        side = Directory.side
        patch.setattr(Directory, "side", lambda *args: (rounds.release(), side(*args))[1])
        for _ in range(4):
            assert rounds.acquire(timeout=WAIT_S)
    register(server, second)
    assert pb.WatchResponse.FromString(next(answers)).WhichOneof("answer") == "info"
    assert isinstance(follow.next(), PrefillServerInfo)
    link.close()


def test_a_watch_goes_past_an_address_that_does_not_have_the_instance(serve, client):
    empty, full, follow = serve(), serve(), Follower()
    register(full, *make_instance())
    client(empty.address, full.address).watch(NAME, PRINT, follow)
    assert isinstance(follow.next(), PrefillServerInfo)


def test_a_watch_goes_on_at_another_address(serve, client, dead_address):
    first, second, follow = serve(), serve(), Follower()
    register(first, *make_instance())
    client(dead_address(), first.address, second.address).watch(NAME, PRINT, follow)
    assert follow.next().ranks[0].incarnation == 1
    register(second, *make_instance(incarnation=2))
    first.close()
    assert follow.until(PrefillServerInfo).ranks[0].incarnation == 2


def test_a_watch_outlives_a_restart_of_its_only_service(serve, client, caplog):
    server, follow = serve(), Follower()
    register(server, *make_instance())
    client(server.address).watch(NAME, PRINT, follow)
    assert follow.next().ranks[0].incarnation == 1
    server.close()
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    register(serve(server.address), *make_instance(incarnation=2))
    assert follow.until(PrefillServerInfo).ranks[0].incarnation == 2


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_watch_tells_when_what_it_asks_is_not_pdlink(strangers, client, kind):
    address, follow = strangers(kind), Follower()
    watch = client(address, settings=Settings(resolve_timeout_s=0.5)).watch(NAME, PRINT, follow)
    assert str(address) in str(follow.next())
    assert watch.is_alive


def test_a_watch_ends_with_close_and_says_nothing_after(serve, client):
    server, follow = serve(), Follower()
    watch = client(server.address).watch(NAME, PRINT, follow)
    follow.next()
    watch.close()
    watch.close()
    assert not watch.is_alive
    register(server, *make_instance())
    assert follow.answers.empty()
    assert watch.failure is None


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit("mine")], ids=lambda one: repr(one))
def test_a_callback_that_raises_ends_its_watch_and_is_reported(serve, client, error):
    died, deaths = threading.Event(), []
    events = Events()
    health = Health(events)

    def raises(answer):
        raise error

    def told(death):
        deaths.append(death)
        died.set()

    watch = client(serve().address, events=events).watch(NAME, PRINT, raises, told)
    assert died.wait(WAIT_S)
    assert watch.failure is error
    assert health.report().reasons == (deaths[0].text,)
    watch.close()
    watch.close()
