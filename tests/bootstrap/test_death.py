"""A bootstrap service whose loop dies says so: to callers of its health service, in its log, as an event."""

import logging
import threading
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.bootstrap.service import BootstrapService
from pdlink.events import Events
from pdlink.health import Health
from pdlink.v1 import bootstrap_pb2 as pb

TIMEOUT_S = 60.0
RESOLVE = f"/{pb.DESCRIPTOR.services_by_name['Bootstrap'].full_name}/Resolve"


def ask(channel: grpc.Channel) -> None:
    """One call, which the dying service may answer with any error."""
    call: Callable[..., bytes] = channel.unary_unary(RESOLVE)
    with pytest.raises(grpc.RpcError):
        call(b"", timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("part", "defect"),
    [("expire", RuntimeError("a defect")), ("expire", SystemExit("a defect")), ("_resolve", SystemExit("a defect"))],
    ids=["expiry raises", "expiry exits", "a handler exits"],
)
def test_a_service_whose_loop_dies_says_not_serving_and_ends(part, defect, monkeypatch, caplog) -> None:
    go, emitted, events = threading.Event(), [], Events()
    health = Health(events)
    events.subscribe(lambda event: emitted.append(event.name))
    real = getattr(BootstrapService, part)

    def fail(service, *arguments):
        if go.is_set():
            raise defect
        return real(service, *arguments)

    monkeypatch.setattr(BootstrapService, part, fail)
    server = BootstrapServer.start(Address("127.0.0.1", 0), events=events)
    with grpc.insecure_channel(str(server.address)) as channel:
        seen = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(seen).status == health_pb2.HealthCheckResponse.SERVING
        go.set()
        if part == "_resolve":
            ask(channel)
        assert next(seen).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert server.wait(TIMEOUT_S)
    assert server.death
    assert server.death.error is defect
    assert emitted.count("thread.died") == 1
    assert health.report().reasons == (server.death.text,)
    assert len([one for one in caplog.records if one.levelno == logging.CRITICAL]) == 1
    server.close()
    server.close()
