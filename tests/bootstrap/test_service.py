"""The service over real gRPC on loopback: registering, resolving, refusing."""

import logging
import queue
import random
import socket
import threading
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdlink.address import Address
from pdlink.bootstrap import service_wire
from pdlink.bootstrap.compat import check
from pdlink.bootstrap.messages import ProtocolRange, Side
from pdlink.bootstrap.refusals import IncompatibleInstance, RegistrationConflict
from pdlink.bootstrap.rpc import SERVICE, Link
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import Settings
from pdlink.errors import AddressError, FrameError, InvalidInput, NotReady, StaleIncarnation, UnknownInstance
from pdlink.events import Events
from pdlink.layout import ParallelSizes, PlanKind, fingerprint
from pdlink.v1 import bootstrap_pb2 as pb
from tests.bootstrap.values import PRINT, make_instance, make_layout

NAME = "prefill-a"
TIMEOUT_S = 60.0


def register(server, *registrations):
    link = Link(server.address)
    try:
        for one in registrations:
            request = pb.RegisterRequest(registration=service_wire.pack_registration(one))
            link.call("Register", request, TIMEOUT_S)
    finally:
        link.close()


def call_raw(server, method, data):
    """One call with any bytes, and the status it ends with."""
    with grpc.insecure_channel(str(server.address), options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            if method == "Watch":
                next(iter(channel.unary_stream(f"/{SERVICE}/Watch")(data, timeout=TIMEOUT_S)))
            else:
                channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_a_whole_instance_is_resolved_as_it_was_registered(serve, client):
    layout, sizes = make_layout(78), ParallelSizes(cp=8)
    registrations = make_instance(layout, sizes)
    server = serve()
    register(server, *reversed(registrations))
    info = client(server.address).resolve(NAME, fingerprint(layout))
    assert info.ranks == tuple(one.rank for one in registrations)
    assert (info.layout, info.sizes, info.kinds) == (layout, sizes, registrations[0].kinds)
    assert info.fingerprint == fingerprint(layout)


def test_rank_0_twice_and_rank_1_never_is_not_ready_and_another_page_size_is_refused(serve, client):
    server = serve()
    first, second = make_instance(sizes=ParallelSizes(tp=2), kind=PlanKind.REPLICATED)
    register(server, first, first)
    with pytest.raises(NotReady, match=r"rank dp0\.pp0\.cp0\.tp1 has not registered"):
        client(server.address).resolve(NAME, PRINT)
    other = make_instance(make_layout(page_size=32), ParallelSizes(tp=2), kind=PlanKind.REPLICATED)[1]
    with pytest.raises(RegistrationConflict) as refused:
        register(server, other)
    assert ("latent.page_size", "64", "32") in [(m.field, m.prefill, m.decode) for m in refused.value.mismatches] or (
        "index_k.page_size",
        "64",
        "32",
    ) in [(m.field, m.prefill, m.decode) for m in refused.value.mismatches]
    assert "'w1'" in str(refused.value)
    assert "'w0'" in str(refused.value)
    register(server, second)
    assert len(client(server.address).resolve(NAME, PRINT).ranks) == 2


def test_errors_of_the_service_are_raised_as_their_own_class(serve, client):
    server = serve()
    with pytest.raises(UnknownInstance, match="nobody has registered instance 'nope'"):
        client(server.address).resolve("nope", PRINT)
    register(server, make_instance(incarnation=5)[0])
    with pytest.raises(StaleIncarnation, match="incarnation 4"):
        register(server, make_instance(incarnation=4)[0])


def test_an_advertised_gap_or_overlap_is_refused_and_a_good_instance_still_served(serve, client):
    server = serve()
    layout, sizes = make_layout(10), ParallelSizes(cp=4)
    gap = make_instance(layout, sizes, instance="gap", owned={1: {"latent": (3, 4), "index_k": (3, 4, 5)}})
    overlap = make_instance(layout, sizes, instance="lap", owned={1: {"latent": (2, 3, 4, 5), "index_k": (3, 4, 5)}})
    register(server, *gap, *overlap, *make_instance(layout, sizes))
    ask = client(server.address)
    with pytest.raises(NotReady, match=r"'latent' layers 5 have no owner"):
        ask.resolve("gap", fingerprint(layout))
    with pytest.raises(NotReady, match=r"cp0\.tp0 \(w0\) and dp0\.pp0\.cp1\.tp0 \(w1\)"):
        ask.resolve("lap", fingerprint(layout))
    owned = [one.owned["latent"] for one in ask.resolve(NAME, fingerprint(layout)).ranks]
    assert owned == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]


def test_a_rank_that_owns_nothing_is_part_of_the_answer(serve, client):
    server = serve()
    register(server, *make_instance(make_layout(3), ParallelSizes(cp=4)))
    info = client(server.address).resolve(NAME, fingerprint(make_layout(3)))
    assert [one.owns_nothing for one in info.ranks] == [False, False, False, True]
    assert info.ranks[3].regions == ()


@pytest.mark.parametrize(
    ("decode", "field", "prefill_value", "decode_value"),
    [
        (make_layout(page_size=32), "latent.page_size", "64", "32"),
        (make_layout(latent_bytes=1312), "latent.page_bytes", "41984", "83968"),
        (make_layout(num_layers=5), "num_layers", "4", "5"),
    ],
)
def test_a_mismatch_is_the_same_on_both_ends_and_names_whom_to_tell(
    serve, client, decode, field, prefill_value, decode_value
):
    server = serve()
    registrations = make_instance()
    register(server, *registrations)
    with pytest.raises(IncompatibleInstance) as refused:
        client(server.address).resolve(NAME, fingerprint(decode))
    assert (field, prefill_value, decode_value) in [(m.field, m.prefill, m.decode) for m in refused.value.mismatches]
    assert refused.value.mismatches == check(Side.of(make_layout()), Side.of(decode))
    assert refused.value.endpoints == tuple(one.rank.endpoint for one in registrations)
    assert client(server.address).resolve(NAME, PRINT)


def test_a_mismatch_is_found_before_the_instance_is_ready(serve, client):
    server = serve()
    register(server, make_instance()[0])
    with pytest.raises(IncompatibleInstance):
        client(server.address).resolve(NAME, fingerprint(make_layout(page_size=32)))


def test_the_protocol_is_refused_before_the_layout_is_looked_at(serve, client):
    server = serve()
    register(server, *make_instance())
    newer = client(server.address, protocol=ProtocolRange(2, 3))
    with pytest.raises(IncompatibleInstance) as refused:
        newer.resolve(NAME, fingerprint(make_layout(page_size=32)))
    assert [(m.field, m.prefill, m.decode) for m in refused.value.mismatches] == [("protocol", "1", "2..3")]


METHODS = ("Register", "Renew", "Withdraw", "Resolve", "Watch")


@pytest.mark.parametrize("method", METHODS)
def test_malformed_requests_are_refused_and_a_good_one_still_served(serve, client, method):
    server = serve()
    noise = random.Random(7)
    good = service_wire.pack_registration(make_instance()[0]).SerializeToString()
    for data in (b"\xff", good[: len(good) // 2], good, noise.randbytes(1024)):
        assert call_raw(server, method, data) is grpc.StatusCode.INVALID_ARGUMENT
    if method != "Renew":  # renewing nobody is no error
        assert call_raw(server, method, b"") is grpc.StatusCode.INVALID_ARGUMENT
    register(server, *make_instance())
    assert client(server.address).resolve(NAME, PRINT)


@pytest.mark.parametrize("method", METHODS)
def test_a_message_that_is_too_large_is_refused_and_a_good_one_still_served(serve, client, method):
    server = serve()
    data = bytes(service_wire.MAX_REQUEST_BYTES + 1)
    assert call_raw(server, method, data) is grpc.StatusCode.RESOURCE_EXHAUSTED
    register(server, *make_instance())
    assert client(server.address).resolve(NAME, PRINT)


def test_a_registration_over_the_limit_says_so_to_its_sender(serve):
    server = serve()
    first = make_instance()[0]
    blobs = {f"t{index}": bytes(256 << 10) for index in range(16)}
    with pytest.raises(FrameError, match=f"bootstrap {server.address} refused the size"):
        register(server, replace(first, rank=replace(first.rank, transports=blobs)))


def test_too_many_renewals_in_one_request_are_refused(serve):
    server = serve()
    key = service_wire.pack_key(make_instance()[0].key)
    data = pb.RenewRequest(workers=[key] * (service_wire.MAX_RENEWALS + 1)).SerializeToString()
    assert call_raw(server, "Renew", data) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_caller_that_asks_wrongly_without_end_does_not_flood_the_log(serve, caplog):
    server = serve()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert call_raw(server, "Renew", b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
        assert call_raw(server, "Register", b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    assert [text.split(" from ")[0] for text in caplog.messages] == ["refused Renew", "refused Register"]


def test_a_defect_in_a_handler_answers_internal_is_counted_and_the_service_lives_on(serve, client, monkeypatch):
    seen = []
    events = Events()
    events.subscribe(seen.append)
    server = serve(events=events)
    register(server, *make_instance())
    with monkeypatch.context() as patch:
        patch.setattr("pdlink.bootstrap.service.check", lambda prefill, decode: 1 / 0)
        request = pb.ResolveRequest(instance=NAME, decode=service_side())
        assert call_raw(server, "Resolve", request.SerializeToString()) is grpc.StatusCode.INTERNAL
        assert call_raw(server, "Watch", request.SerializeToString()) is grpc.StatusCode.INTERNAL
    assert [one.fields["method"] for one in seen if one.name == "bootstrap.error"] == ["Resolve", "Watch"]
    assert client(server.address).resolve(NAME, PRINT)


def service_side():
    from pdlink.bootstrap import wire

    return wire.pack_side(Side.of(make_layout()))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_free_port_is_chosen_and_told(serve, client, host):
    server = serve(Address(host, 0))
    assert server.address.host == host
    assert server.address.port != 0
    register(server, *make_instance())
    assert client(server.address).resolve(NAME, PRINT)


def test_a_port_in_use_is_refused_with_its_address(serve):
    server = serve()
    with pytest.raises(InvalidInput, match=f"cannot listen at {server.address}"):
        BootstrapServer.start(server.address)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(InvalidInput, match=f"cannot listen at {taken}.*in use"):
            BootstrapServer.start(taken)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(InvalidInput, match=r"cannot listen at 192\.0\.2\.1:0"):
        BootstrapServer.start(Address("192.0.2.1", 0))


def test_a_wildcard_is_refused_unless_another_address_is_advertised(serve):
    with pytest.raises(AddressError, match="PDLINK_ADVERTISE_HOST"):
        BootstrapServer.start(Address("::", 0))
    assert not [one for one in threading.enumerate() if one.name.startswith("pdlink-bootstrap")]
    server = serve(Address("::", 0), settings=Settings(advertise_host="127.0.0.1"))
    assert server.address.host == "127.0.0.1"


def test_only_the_given_address_is_listened_at(serve):
    server = serve(Address("127.0.0.1", 0))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.address.port), 1.0)


def test_health_and_reflection_are_served(serve):
    server = serve()
    with grpc.insecure_channel(str(server.address)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            status = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask, timeout=TIMEOUT_S))
        names = {one.name for one in answer.list_services_response.service}
        assert names >= {SERVICE, "pdlink.v1.Inspector", "grpc.health.v1.Health"}


def test_closing_twice_frees_the_port_and_ends_the_thread(serve):
    server = BootstrapServer.start(Address("127.0.0.1", 0))
    assert server.is_alive
    server.close()
    server.close()
    assert not server.is_alive
    assert server.address.port not in [
        int(one.name.rpartition(":")[2]) for one in threading.enumerate() if "pdlink-boot" in one.name
    ]
    again = serve(server.address)
    assert again.address == server.address


def test_thousands_of_ranks_register_and_resolve(serve, client):
    registrations = make_instance(make_layout(78), ParallelSizes(dp=64, cp=8, tp=8))
    server = serve(settings=Settings(registration_lease_s=600))
    register(server, *registrations)
    link = Link(server.address)
    request = pb.RenewRequest(workers=[service_wire.pack_key(one.key) for one in registrations])
    answer = pb.RenewResponse.FromString(link.call("Renew", request, TIMEOUT_S))
    link.close()
    assert set(answer.statuses) == {pb.LEASE_STATUS_RENEWED}
    info = client(server.address).resolve(NAME, fingerprint(make_layout(78)), timeout_s=30.0)
    assert len(info.ranks) == 4096


def test_a_worker_whose_lease_runs_out_is_named_in_the_log_and_told(serve, caplog):
    now, told, events = [0.0], queue.Queue(), Events()
    events.subscribe(lambda event: told.put(event) if event.name == "bootstrap.expired" else None)
    server = serve(clock=lambda: now[0], events=events, settings=Settings(registration_lease_s=5.0))
    register(server, *make_instance())
    now[0] = 6.0
    names = {told.get(timeout=TIMEOUT_S).fields["worker_id"] for _ in range(2)}
    server.close()  # so that the line is written
    assert names == {"w0", "w1"}
    (line,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert line.startswith("lease of worker w0, w1 of prefill-a ran out: not renewed within 5 s")


def test_a_newer_process_that_takes_a_live_name_is_a_warning_with_both(serve, caplog):
    server = serve()
    before, after = make_instance(incarnation=1)[0], make_instance(incarnation=2)[0]
    register(server, before, before)
    assert not [one for one in caplog.records if one.levelno == logging.WARNING]
    register(server, after)
    (line,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    old, new = before.rank.control_endpoint, after.rank.control_endpoint
    assert (
        f"worker w0 of prefill-a was live as incarnation 1 at {old}, and is replaced by incarnation 2 at {new}" in line
    )
