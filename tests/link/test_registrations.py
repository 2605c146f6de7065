"""A rank whose registration fails says so in its health, and one that was replaced takes no more requests."""

import dataclasses

import pytest

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.errors import AccessDenied, StateError
from pdlink.runtime.node import Node
from tests.link.rig import DEADLINE_S, LOOPBACK, Site, make_layout, wait_until

pytestmark = pytest.mark.backend("ipc")


def test_a_refused_rank_is_unwell_and_one_that_another_bootstrap_took_is_well(stack):
    site = Site(stack)
    guarded = stack.enter_context(BootstrapServer.start(LOOPBACK, load_settings({}, token="0123456789abcdef")))
    (owner,) = site.prefill(make_layout(2), 1)
    assert owner.node.health().ok
    node = stack.enter_context(Node(load_settings({}, backends="ipc")))
    other = dataclasses.replace(owner.worker.rank, instance="other")
    worker = node.prefill(other, [guarded.address])
    with pytest.raises(AccessDenied):
        worker.wait_registered(DEADLINE_S)
    report = node.health()
    assert not report.ok
    assert report.reasons == (report.parts[worker.part],)
    assert "registered nowhere" in report.reasons[0]
    assert "no token" in report.reasons[0]
    third = stack.enter_context(Node(load_settings({}, backends="ipc")))
    worker = third.prefill(dataclasses.replace(other, instance="third"), [guarded.address, site.bootstrap.address])
    worker.wait_registered(DEADLINE_S)
    wait_until(lambda: f"bootstrap {guarded.address} refused" in third.health().parts[worker.part])
    assert third.health().ok


def test_a_replaced_rank_is_unwell_and_opens_no_request(stack):
    site = Site(stack)
    (owner,) = site.prefill(make_layout(2), 1)
    sender = owner.worker.open("before")
    newer = dataclasses.replace(owner.worker.rank, incarnation=owner.worker.rank.incarnation + 1)
    node = stack.enter_context(Node(load_settings({}, backends="ipc")))
    node.prefill(newer, [site.bootstrap.address]).wait_registered(DEADLINE_S)
    owner.worker._keeper.update(owner.worker.registration())  # it looks now, not in a third of a lease
    wait_until(lambda: not owner.node.health().ok)
    assert "replaced by a newer process that registered under its name" in owner.node.health().reasons[0]
    with pytest.raises(StateError, match=r"prefill worker .*cp0\.tp0 is replaced by a newer process"):
        owner.worker.open("after")
    assert not sender.poll().is_final  # readers of the old process may still be at it
    assert node.health().ok


def test_a_rank_that_tells_another_machines_readers_of_loopback_is_warned(stack, caplog):
    away, site = Address("192.0.2.7", 7400), Site(stack)
    here, owner = site.bootstrap.address, site.prefill(make_layout(2), 1)[0].worker
    node = stack.enter_context(Node(load_settings({}, backends="ipc")))
    assert not [one for one in caplog.records if "PDLINK_BIND_HOST" in one.message]
    worker = node.prefill(dataclasses.replace(owner.rank, instance="other"), [here, away])
    (line,) = [one.message for one in caplog.records if "PDLINK_BIND_HOST" in one.message]
    assert f"tells bootstrap {away} that readers reach it at {worker.control_endpoint}, which only" in line
    assert "PDLINK_ADVERTISE_HOST" in line
