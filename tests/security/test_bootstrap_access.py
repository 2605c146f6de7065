"""Who may call a bootstrap over real gRPC: refused, counted, logged without the secret, and told what to change."""

import datetime
import logging
import queue
import shutil
import socket
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdlink.address import Address
from pdlink.bootstrap import access, arrivals, diagnosis, renewed, service_wire
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.directory import Directory, LeaseStatus
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.rpc import Link
from pdlink.bootstrap.server import NO_CALL
from pdlink.bootstrap.standing import KeeperState
from pdlink.config import load_settings
from pdlink.errors import AccessDenied, NotOwner, NotReady, StaleIncarnation
from pdlink.events import Events
from pdlink.secret import Secret
from pdlink.v1 import bootstrap_pb2 as pb
from tests.bootstrap.values import PRINT, make_instance

NAME = "prefill-a"
TOKEN = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
WAIT_S = 60.0


def settings(**chosen):
    return load_settings({}, **chosen)


def keep(stack, server, *registrations, **chosen):
    """Register, and stay registered until the test ends."""
    for one in registrations or make_instance():
        keeper = stack.enter_context(RegistrationKeeper(one, [server.address], settings(**chosen)))
        keeper.wait_registered(WAIT_S)


def resolve(server, **chosen):
    with BootstrapClient([server.address], settings(**chosen)) as client:
        return client.wait_ready(NAME, PRINT, WAIT_S)


@pytest.mark.parametrize("kind", ["token", "tls", "tls with a token", "mutual", "mutual with a token"])
def test_sides_that_agree_register_renew_resolve_watch_and_withdraw(stack, serve, pki, monkeypatch, kind):
    renewed_once, renew = threading.Event(), Directory.renew

    def see(*asked):
        status = renew(*asked)
        if status is LeaseStatus.RENEWED:
            renewed_once.set()
        return status

    monkeypatch.setattr(Directory, "renew", see)
    token = {"token": TOKEN} if "token" in kind else {}
    mine = {"mutual": pki.mutual_server, "tls": pki.server}.get(kind.split(" ")[0], {}) | token
    theirs = {"mutual": pki.mutual_client, "tls": pki.ca}.get(kind.split(" ")[0], {}) | token
    server = serve(**mine)
    first, second = make_instance()
    keep(stack, server, first, **theirs)
    with RegistrationKeeper(second, [server.address], settings(**theirs)) as keeper:
        keeper.wait_registered(WAIT_S)
        assert len(resolve(server, **theirs).ranks) == 2
        seen = queue.Queue()
        client = stack.enter_context(BootstrapClient([server.address], settings(**theirs)))
        client.watch(NAME, PRINT, seen.put)
        assert len(seen.get(timeout=WAIT_S).ranks) == 2
        keeper.update(second)  # it renews now, not in a third of a lease
        assert renewed_once.wait(WAIT_S)
    assert isinstance(seen.get(timeout=WAIT_S), NotReady)
    assert server.num_workers == 1
    assert server.denials == {}


def test_a_token_that_nobody_asks_for_is_told_once_without_it(stack, serve, caplog):
    server = serve()
    keep(stack, server, token=TOKEN)
    (line,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert line.startswith(f"bootstrap {server.address}: a caller sends a token, but none is asked for here")
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(("chosen", "num_warnings"), [({}, 1), ({"token": TOKEN, "allow_plaintext_secrets": True}, 0)])
def test_a_service_that_others_reach_and_nothing_guards_is_a_warning(serve, caplog, monkeypatch, chosen, num_warnings):
    monkeypatch.setattr(Address, "is_loopback", property(lambda address: False))
    serve(**chosen)
    warned = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warned) == num_warnings
    assert all("plain text, no token: whoever reaches it may register" in text for text in warned)


@pytest.mark.parametrize(("sent", "reason"), [({}, "no token"), ({"token": OTHER}, "wrong token")])
def test_a_caller_without_the_token_is_refused_counted_and_told_what_to_set(serve, told, caplog, sent, reason):
    server = serve(token=TOKEN)
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(AccessDenied, match=f"{reason}; set PDLINK_TOKEN or PDLINK_TOKEN_FILE"):
            resolve(server, **sent)
        with RegistrationKeeper(make_instance()[0], [server.address], settings(**sent)) as keeper:
            with pytest.raises(AccessDenied, match=reason):
                keeper.wait_registered(WAIT_S)
            assert set(keeper.states.values()) == {KeeperState.REFUSED}
        answers, heard = [], threading.Event()
        with BootstrapClient([server.address], settings(**sent)) as client:
            client.watch(NAME, PRINT, lambda answer: (answers.append(answer), heard.set()))
            assert heard.wait(WAIT_S)
        assert isinstance(answers[0], AccessDenied)
    assert server.denials == {reason: 3}
    events = [(one.name, one.fields["reason"], one.fields["peer"]) for one in told if one.name == "bootstrap.denied"]
    assert events == [("bootstrap.denied", reason, "127.0.0.1")] * 3
    assert sum("refused 127.0.0.1" in text for text in caplog.messages) == 1  # each peer and reason once in a while
    for secret in (TOKEN, OTHER):
        assert secret not in caplog.text
        assert secret not in repr(told)
    assert server.num_workers == 0


def test_every_method_but_health_asks_for_the_token(serve):
    server = serve(token=TOKEN)
    with grpc.insecure_channel(str(server.address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        list_services = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(reflection.ServerReflectionInfo(iter([list_services]), timeout=WAIT_S))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", f"Bearer {TOKEN}"),)
        assert list(reflection.ServerReflectionInfo(iter([list_services]), timeout=WAIT_S, metadata=good))
        for method in ("Register", "Renew", "Withdraw", "Resolve", "NoSuch"):
            for metadata in ((), (("authorization", TOKEN),), (("authorization", f"Bearer {TOKEN}x"),)):
                call = channel.unary_unary(f"/pdlink.v1.Bootstrap/{method}")
                with pytest.raises(grpc.RpcError) as refused:
                    call(bytes(1 << 20), timeout=WAIT_S, metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert sum(server.denials.values()) == 16


def refusals(pki):
    """(settings of the server, of the caller, what the caller is told)."""
    over = pki.ours.issue("run-out", life=-datetime.timedelta(hours=1))
    return {
        "plain caller": (pki.server, {}, "serves TLS and this side speaks plain text; set PDLINK_TLS_CA"),
        "plain server": ({}, pki.ca, "speaks plain text and this side TLS; give the bootstrap PDLINK_TLS_CERTIFICATE"),
        "other authority": (pki.theirs.issue("stray"), pki.ca, "not from the CA in PDLINK_TLS_CA"),
        "other name": (pki.server, {**pki.ca, "tls_server_name": "elsewhere"}, "is not for 'elsewhere'.*SERVER_NAME"),
        "server ran out": (over, pki.ca, "certificate has expired; renew the bootstrap's PDLINK_TLS_CERTIFICATE"),
        "no certificate": (pki.mutual_server, pki.ca, "hangs up on a caller without a certificate; set PDLINK_TLS_C"),
        "certificate of another authority": (
            pki.mutual_server,
            {**pki.ca, **pki.theirs.issue("stray")},
            r"hangs up on PDLINK_TLS_CERTIFICATE='.*stray\.pem'.* not from the CA",
        ),
        "certificate ran out": (pki.mutual_server, {**pki.ca, **over}, "hangs up on .*: it has expired, or"),
    }


@pytest.mark.parametrize(
    "which",
    [
        "plain caller",
        "plain server",
        "other authority",
        "other name",
        "server ran out",
        "no certificate",
        "certificate of another authority",
        "certificate ran out",
    ],
)
def test_sides_whose_tls_does_not_fit_are_refused_at_once_counted_and_told_why(
    stack, serve, pki, told, monkeypatch, which
):
    # Certificates that have run out are refused when they are read; here they run out while they are in use.
    monkeypatch.setattr("pdlink.bootstrap.tls._check_pair", lambda *_, **__: None)
    server_has, caller_has, text = refusals(pki)[which]
    server = serve(**server_has)
    monkeypatch.setattr(arrivals, "CALL_TIMEOUT_S", 0.2)
    with pytest.raises(AccessDenied, match=text):
        resolve(server, **caller_has)
    keeper = stack.enter_context(RegistrationKeeper(make_instance()[0], [server.address], settings(**caller_has)))
    with pytest.raises(AccessDenied, match=text):
        keeper.wait_registered(WAIT_S)
    assert server.num_workers == 0
    if server_has:
        told.wait("bootstrap.denied", reason=NO_CALL)
        assert server.denials.keys() == {NO_CALL}
    good = {**pki.mutual_client} if server_has.get("tls_ca") else pki.ca if server_has is pki.server else None
    if good is not None:
        keep(stack, server, **good)
        assert len(resolve(server, **good).ranks) == 2


def test_a_renewed_certificate_and_a_renewed_token_are_taken_without_a_restart(
    stack, serve, pki, tmp_path, monkeypatch
):
    monkeypatch.setattr(renewed, "LOOK_INTERVAL_S", 0.0)
    token, files = tmp_path / "token", {name: str(tmp_path / name) for name in pki.server}

    def install(issued):
        for name, path in files.items():
            shutil.copy(issued[name], path)

    token.write_text(TOKEN)
    install(pki.server)
    server = serve(**files, token_file=str(token))
    keep(stack, server, make_instance()[0], **pki.ca, token_file=str(token))
    with pytest.raises(AccessDenied, match="not from the CA"):
        resolve(server, tls_ca=str(pki.theirs.file), token=TOKEN)
    install(pki.theirs.issue("renewed"))
    token.write_text(f"{OTHER}\n{TOKEN}\n")
    theirs = {"tls_ca": str(pki.theirs.file)}
    keep(stack, server, make_instance()[1], **theirs, token=OTHER)
    assert len(resolve(server, **theirs, token=TOKEN).ranks) == 2
    token.write_text(f"{OTHER}\n")
    with pytest.raises(AccessDenied, match="wrong token"):
        resolve(server, **theirs, token=TOKEN)


def test_a_keeper_whose_token_is_renewed_registers_by_itself(stack, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(renewed, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr("pdlink.bootstrap.keeper.DENIED_INTERVAL_S", 0.05)
    token = tmp_path / "token"
    token.write_text(OTHER)
    server = serve(token=TOKEN)
    registered, events = threading.Event(), Events()
    events.subscribe(lambda event: event.fields.get("state") == "registered" and registered.set())
    chosen = settings(token_file=str(token))
    keeper = stack.enter_context(RegistrationKeeper(make_instance()[0], [server.address], chosen, events=events))
    with pytest.raises(AccessDenied, match="wrong token"):
        keeper.wait_registered(WAIT_S)
    token.write_text(TOKEN)
    assert registered.wait(WAIT_S)
    assert server.num_workers == 1


def test_a_server_that_says_nothing_is_not_taken_for_one_of_another_kind(pki, monkeypatch):
    monkeypatch.setattr(diagnosis, "PROBE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        for chosen in ({}, pki.ca, pki.mutual_client):
            assert diagnosis.why_no_talk(address, access.Access(settings(**chosen))) is None


def test_a_connection_counts_as_refused_when_no_call_has_come_from_it():
    now = [0.0]
    seen = arrivals.Arrivals(lambda: now[0])
    for _ in range(3):
        seen.begin()
    for peer in ("ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.1:1"):
        seen.call(peer)
    assert seen.take_lost() == 0
    now[0] = arrivals.CALL_TIMEOUT_S + 0.1
    assert seen.take_lost() == 1
    assert seen.take_lost() == 0
    seen.begin()
    seen.call("ipv4:10.0.0.1:1")  # known already
    now[0] += arrivals.IDLE_S + 0.1
    assert seen.take_lost() == 1
    seen.begin()
    seen.call("ipv4:10.0.0.1:2")  # another connection by now
    now[0] += arrivals.CALL_TIMEOUT_S + 0.1
    assert seen.take_lost() == 0
    for number in range(3):
        seen.begin()
        seen.call(f"ipv4:10.0.0.2:{number}")
    assert len(seen._callers) <= 5


def test_calls_of_every_kind_account_for_their_connection(stack, serve, pki, monkeypatch):
    lost, take = [], arrivals.Arrivals.take_lost

    def see(one):
        lost.append((len(one._begun), take(one)))
        return lost[-1][1]

    monkeypatch.setattr(arrivals.Arrivals, "take_lost", see)
    server = serve(**pki.server)
    files = access.Access(settings(**pki.ca)).files
    credentials = grpc.ssl_channel_credentials(files.ca)
    for number in range(5):
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = stack.enter_context(grpc.secure_channel(str(server.address), credentials, options=options))
        health = health_pb2_grpc.HealthStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        services = reflection_pb2.ServerReflectionRequest(list_services="")
        if number == 0:
            health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        elif number == 1:
            next(iter(health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)))
        elif number == 2:
            assert list(reflection.ServerReflectionInfo(iter([services]), timeout=WAIT_S))
        else:
            call = (channel.unary_unary, channel.unary_stream)[number - 3]
            with pytest.raises(grpc.RpcError) as refused:
                list(call(f"/pdlink.v1.Bootstrap/{('Resolve', 'Watch')[number - 3]}")(b"\xff", timeout=WAIT_S))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(server._arrivals._begun) == 0
    assert server.denials == {}


# --- whose registration it is ---------------------------------------------------------------------


class Caller:
    """A prefill rank's calls, byte by byte, so that they can be repeated by somebody else."""

    def __init__(self, stack, server, **chosen):
        self.link = Link(server.address, access.Access(settings(**chosen)))
        stack.callback(self.link.close)

    def call(self, method, request):
        return self.link.call(method, request, WAIT_S)

    def register(self, registration, owner=None):
        packed = service_wire.pack_registration(registration)
        request = pb.RegisterRequest(registration=packed, owner_key=owner.reveal() if owner else b"")
        self.call("Register", request)
        return request

    def renew(self, *keys):
        request = pb.RenewRequest(workers=[service_wire.pack_key(key, owner) for key, owner in keys])
        return list(pb.RenewResponse.FromString(self.call("Renew", request)).statuses)

    def withdraw(self, key, owner=None):
        request = pb.WithdrawRequest(worker=service_wire.pack_key(key, owner))
        return pb.WithdrawResponse.FromString(self.call("Withdraw", request)).removed


MINE, THEIRS = Secret(b"m" * 32), Secret(b"t" * 32)


def test_what_another_process_registered_is_not_to_be_changed_renewed_or_withdrawn(stack, serve, told, caplog):
    server = serve()
    owner, stranger = Caller(stack, server), Caller(stack, server)
    first, second = make_instance()
    for one in (first, second):
        owner.register(one, MINE)
    with caplog.at_level(logging.DEBUG):
        for key in (THEIRS, None):
            with pytest.raises(NotOwner, match="registered by another process"):
                stranger.register(first, key)
            with pytest.raises(NotOwner, match="another process's to withdraw"):
                stranger.withdraw(first.key, key)
        statuses = stranger.renew((first.key, THEIRS), (second.key, MINE), (first.key, None))
    assert statuses == [pb.LEASE_STATUS_NOT_OWNER, pb.LEASE_STATUS_RENEWED, pb.LEASE_STATUS_NOT_OWNER]
    assert server.denials == {"not the owner": 6}
    assert [one.fields["reason"] for one in told if one.name == "bootstrap.denied"] == ["not the owner"] * 6
    assert server.num_workers == 2
    assert owner.renew((first.key, MINE), (second.key, MINE)) == [pb.LEASE_STATUS_RENEWED] * 2
    for secret in (MINE, THEIRS):
        assert secret.reveal().decode() not in caplog.text + repr(told)
    assert owner.withdraw(first.key, MINE)


def test_a_registration_that_is_repeated_after_its_end_is_refused(stack, serve):
    server = serve()
    owner, stranger = Caller(stack, server), Caller(stack, server)
    life, next_life = (make_instance(incarnation=one)[0] for one in (1, 2))
    recorded = owner.register(life, MINE)
    owner.register(next_life, MINE)
    with pytest.raises(StaleIncarnation):
        stranger.call("Register", recorded)
    assert owner.withdraw(next_life.key, MINE)
    with pytest.raises(StaleIncarnation, match="has withdrawn or was replaced"):
        stranger.call("Register", recorded)
    assert server.num_workers == 0


def test_owner_keys_of_another_size_are_refused(stack, serve):
    caller = Caller(stack, serve())
    for size in (1, 15, 65, 4096):
        with pytest.raises(Exception, match="owner_key has"):
            caller.register(make_instance()[0], Secret(bytes(size)))


def test_a_newer_process_replaces_an_older_one_only_under_the_same_certificate_and_a_renewed_one_is_the_same(
    stack, serve, pki
):
    server = serve(**pki.mutual_server)
    lives = [make_instance(incarnation=one)[0] for one in range(1, 4)]
    Caller(stack, server, **pki.mutual_client).register(lives[0], MINE)
    other = Caller(stack, server, **pki.ca, **pki.ours.issue("somebody-else"))
    with pytest.raises(NotOwner, match="another certificate"):
        other.register(lives[1], THEIRS)
    again = Caller(stack, server, **pki.ca, **pki.ours.issue("client-renewed", subject="client"))
    again.register(lives[2], THEIRS)
    assert server.denials == {"not the owner": 1}


def test_a_second_process_of_the_same_incarnation_is_told_that_it_is_not_the_owner(stack, serve):
    server = serve()
    keep(stack, server, make_instance()[0])
    second = stack.enter_context(RegistrationKeeper(make_instance()[0], [server.address], settings()))
    with pytest.raises(NotOwner, match="give each worker a name and rank of its own"):
        second.wait_registered(WAIT_S)
    assert server.denials == {"not the owner": 1}
