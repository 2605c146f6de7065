"""A link that is watched: what probes and scrapes say of prefill, decode and bootstrap is what happened."""

from __future__ import annotations

import json
import logging
from functools import partial

import pytest

from pdlink.backends.base import Backend
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.config import Settings
from pdlink.errors import ConfigError, TransferFailed
from pdlink.events import Events
from pdlink.observability.bootstrap_watch import BootstrapWatch
from pdlink.observability.logs import JsonFormatter
from pdlink.prefill.sender import Sender
from pdlink.runtime.node import Node
from pdlink.transfer.states import SenderState
from tests.bootstrap.values import make_instance
from tests.link.rig import PAGE_SIZE, Decode, Gate, Owner, Site, make_layout, wait_until
from tests.observability.asking import Scrape, probe

pytestmark = pytest.mark.backend("ipc")
HTTP = {"http_bind": "127.0.0.1:0"}
PATIENCE_S = 30.0


def reaches(one: Owner | Decode, value: float, name: str, **labels: str) -> None:
    """What is counted after a request has ended comes a moment later than its end."""
    wait_until(lambda: Scrape(one.node.http_address).sum(name, **labels) == value, PATIENCE_S)


def has_state(sender: Sender, state: SenderState) -> bool:
    return sender.poll() is state


def lines(logger: str, caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The ends of requests in one log, as JSON."""
    records = [one for one in caplog.records if one.name == logger and hasattr(one, "pdlink")]
    return [json.loads(JsonFormatter().format(one)) for one in records]


def test_bytes_and_descriptors_that_are_counted_are_those_that_moved(site: Site) -> None:
    layout = make_layout(6)
    owners, decode = site.prefill(layout, 2, **HTTP), site.decode(layout, **HTTP)
    moved = 0
    for name, pages in (("a", [5, 6, 7]), ("b", [1])):
        receiver = decode.worker.receive(name, site.instance, {"kv": pages}, len(pages) * PAGE_SIZE)
        senders = [owner.open(name, {"kv": pages}) for owner in owners]
        for sender in senders:
            sender.publish(pages, last=True)
        moved += sum(receiver.wait(PATIENCE_S).num_bytes.values())
        for sender in senders:
            wait_until(partial(has_state, sender, SenderState.RELEASED), PATIENCE_S)
    wait_until(lambda: decode.worker.num_receives == 0, PATIENCE_S)
    reaches(decode, 2, "pdlink_transfers_total", state="done")
    reaches(decode, 0, "pdlink_pulls_in_flight")
    assert moved == 4 * 6 * PAGE_SIZE * (656 + 132)
    said = Scrape(decode.node.http_address)
    assert said.sum("pdlink_transfer_bytes_total", backend="ipc", way="mapped") == moved
    assert said.sum("pdlink_transfer_bytes_total") == moved
    assert said.sum("pdlink_pulls_total") == 4
    assert said.sum("pdlink_pull_cells_total") == 4 * 12
    assert 0 < said.sum("pdlink_pull_descriptors_total") < 4 * 12
    assert said.sum("pdlink_transfers_total", state="done") == said.sum("pdlink_transfers_total") == 2
    assert said.sum("pdlink_transfer_seconds_count") == said.sum("pdlink_transfer_wait_seconds_count") == 2
    parts = ("resolve", "wait", "confirm")
    assert said.sum("pdlink_transfer_seconds_sum") >= sum(
        said.sum(f"pdlink_transfer_{part}_seconds_sum") for part in parts
    )
    assert said.sum("pdlink_way_choices_total", way="mapped") == 4
    assert said.sum("pdlink_peers", state="connected") == 2
    assert said.sum("pdlink_transfers_live") == said.sum("pdlink_pulls_in_flight") == 0
    for owner in owners:
        reaches(owner, 2, "pdlink_requests_total", state="released")
        reaches(owner, 0, "pdlink_publication_leases_held")
    published = [Scrape(owner.node.http_address).sum("pdlink_published_bytes_total") for owner in owners]
    assert sum(published) == moved


def test_a_request_that_runs_shows_as_such_and_one_that_fails_by_its_reason(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2, **HTTP), site.decode(layout, **HTTP)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
    senders = [owner.open("t", {"kv": [3, 4]}) for owner in owners]
    senders[0].publish([3])
    wait_until(lambda: receiver.state == "pulling", PATIENCE_S)
    assert Scrape(decode.node.http_address).sum("pdlink_transfers_live", state="pulling") == 1
    first = Scrape(owners[0].node.http_address)
    assert first.sum("pdlink_requests_open") == first.sum("pdlink_publication_leases_held") == 1
    second = Scrape(owners[1].node.http_address)
    assert (second.sum("pdlink_requests_open"), second.sum("pdlink_publication_leases_held")) == (1, 0)
    senders[1].abort("the engine is out of memory")
    with pytest.raises(TransferFailed):
        receiver.wait(PATIENCE_S)
    reaches(decode, 1, "pdlink_transfer_failures_total", reason="aborted")
    assert Scrape(decode.node.http_address).sum("pdlink_transfer_seconds_count") == 0
    reaches(owners[1], 1, "pdlink_request_failures_total", reason="aborted")


def test_a_staged_pull_with_digests_shows_each_part_of_its_time(site: Site) -> None:
    layout, settings = make_layout(4), {"way": "staged", "verify_digests": True, **HTTP}
    owners, decode = site.prefill(layout, 1, **settings), site.decode(layout, **settings)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
    owners[0].open("t", {"kv": [3, 4]}).publish([3, 4], last=True)
    moved = sum(receiver.wait(PATIENCE_S).num_bytes.values())
    reaches(decode, 1, "pdlink_pull_seconds_count", backend="ipc", way="staged")
    said = Scrape(decode.node.http_address)
    assert said.sum("pdlink_transfer_bytes_total", way="staged") == moved
    parts = ("wire", "pack", "unpack")
    for part in parts:
        assert said.sum(f"pdlink_pull_{part}_seconds_count", backend="ipc") == 1
    for part in ("wire", "unpack"):  # what is packed already when it is looked for is not waited for
        assert said.sum(f"pdlink_pull_{part}_seconds_sum") > 0
    assert said.sum("pdlink_pull_verify_seconds_count") == 1
    assert said.sum("pdlink_pull_verify_seconds_sum") > 0
    assert sum(said.sum(f"pdlink_pull_{part}_seconds_sum") for part in parts) <= said.sum("pdlink_pull_seconds_sum")


def test_pages_that_nobody_may_use_yet_are_shown_until_their_pull_is_quiet(site: Site) -> None:
    layout, gates = make_layout(4), []

    def gated(inner: Backend) -> Gate:
        gates.append(Gate(inner))
        return gates[-1]

    owners, decode = site.prefill(layout, 1, **HTTP), site.decode(layout, wrap=gated, **HTTP)
    receiver = decode.worker.receive("t", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
    owners[0].open("t", {"kv": [3, 4]}).publish([3, 4], last=True)
    gates[0].wait_held(1)
    reaches(decode, 1, "pdlink_pulls_in_flight")
    gates[0].quiet.clear()
    receiver.abort()
    reaches(decode, 2, "pdlink_pages_quarantined")
    assert Scrape(decode.node.http_address).sum("pdlink_transfers_live", state="draining") == 1
    gates[0].quiet.set()
    gates[0].open.set()
    reaches(decode, 0, "pdlink_pages_quarantined")
    reaches(decode, 0, "pdlink_pulls_in_flight")
    assert receiver.poll().is_final


def test_a_publication_that_nobody_comes_for_is_a_lease_that_is_held_and_then_expires(site: Site) -> None:
    (owner,) = site.prefill(make_layout(4), 1, publication_lease_s=4.0, **HTTP)
    owner.open("t", {"kv": [3]}).publish([3], last=True)
    assert Scrape(owner.node.http_address).sum("pdlink_publication_leases_held") == 1
    reaches(owner, 1, "pdlink_publication_leases_expired_total")
    reaches(owner, 0, "pdlink_publication_leases_held")
    assert Scrape(owner.node.http_address).sum("pdlink_request_failures_total", reason="expired") == 1


def test_a_decode_side_that_does_not_fit_is_counted_by_the_field(site: Site) -> None:
    owners = site.prefill(make_layout(4), 1, **HTTP)
    watch = BootstrapWatch(site.bootstrap, site.bootstrap._events).serve("127.0.0.1:0")
    try:
        decode = site.decode(make_layout(4, latent_bytes=640), **HTTP)
        receiver = decode.worker.receive("t", site.instance, {"kv": [1]}, PAGE_SIZE)
        with pytest.raises(TransferFailed, match="latent"):
            receiver.wait(PATIENCE_S)
        said = Scrape(watch.address)
        assert said.sum("pdlink_handshake_refusals_total", at="bootstrap") >= 1
        fields = {one.labels["field"] for one in said.samples if one.name == "pdlink_handshake_refusals_total"}
        assert len(fields) == 1
        assert "latent" in fields.pop()
        reaches(owners[0], 1, "pdlink_handshake_refusals_total", at="prefill")
        reaches(decode, 1, "pdlink_transfer_failures_total", reason="incompatible")
    finally:
        watch.close()


def test_a_node_is_ready_when_it_has_workers_that_are_registered(site: Site) -> None:
    node = site.node(**HTTP)
    address = node.http_address
    status, said = probe(address, "/readyz")
    assert (status, said["reasons"]) == (503, ["this process has no prefill or decode worker yet"])
    assert probe(address, "/healthz")[0] == 200
    layout = make_layout(2)
    decode = site.pool(layout, {one.name: one.layers for one in layout.components})
    node.decode("dec", layout, decode.regions)
    status, said = probe(address, "/readyz")
    assert (status, said["ok"], said["reasons"]) == (200, True, [])
    assert set(said["parts"]) >= {"backend ipc", "decode dec"}
    assert Scrape(address).sum("pdlink_ready") == Scrape(address).sum("pdlink_healthy") == 1


@pytest.mark.slow
def test_a_rank_that_no_bootstrap_has_is_not_ready_and_says_why(site: Site) -> None:
    owner = site.prefill(make_layout(2), 1, **HTTP)[0]
    assert probe(owner.node.http_address, "/readyz")[0] == 200
    site.bootstrap.close()
    wait_until(lambda: probe(owner.node.http_address, "/readyz")[0] == 503, PATIENCE_S)
    (reason,) = probe(owner.node.http_address, "/readyz")[1]["reasons"]
    assert str(site.bootstrap.address) in reason
    assert Scrape(owner.node.http_address).sum("pdlink_ready") == 0


def test_a_dead_thread_makes_a_process_unhealthy_by_its_name(site: Site) -> None:
    node = site.node(**HTTP)
    node.events.emit("thread.died", owner="backend ipc", text="thread x of backend ipc died (Oh)")
    status, said = probe(node.http_address, "/healthz")
    assert (status, said["reasons"]) == (503, ["thread x of backend ipc died (Oh)"])
    said = Scrape(node.http_address)
    assert said.sum("pdlink_healthy") == said.sum("pdlink_ready") == 0
    assert said.sum("pdlink_threads_died_total") == 1


def test_a_port_in_use_leaves_nothing_of_the_node_behind(site: Site) -> None:
    first = site.node(**HTTP)
    settings = site.settings.model_copy(update={"http_bind": str(first.http_address)})
    with pytest.raises(ConfigError, match="PDLINK_HTTP_BIND"):
        Node(settings)
    assert probe(first.http_address, "/healthz")[0] == 200


def test_a_bootstrap_is_ready_once_every_layer_has_an_owner(site: Site) -> None:
    watch = BootstrapWatch(site.bootstrap, Events()).serve("127.0.0.1:0")
    first, second = make_instance()
    keepers = []
    try:
        assert probe(watch.address, "/healthz")[0] == 200
        assert probe(watch.address, "/readyz") == (
            503,
            {"ok": False, "reasons": ["no prefill instance is registered"], "parts": {}},
        )
        for number, one in enumerate((first, second)):
            keepers.append(RegistrationKeeper(one, [site.bootstrap.address], Settings()).start())
            keepers[-1].wait_registered(PATIENCE_S)
            status, said = probe(watch.address, "/readyz")
            assert status == (503, 200)[number]
        assert said["parts"] == {f"instance {first.instance}": ""}
        said = Scrape(watch.address)
        assert said.sum("pdlink_registered_workers") == 2
        assert said.sum("pdlink_instances", state="ready") == 1
        assert said.sum("pdlink_instances", state="not_ready") == 0
        keepers.pop().close()
        status, said = probe(watch.address, "/readyz")
        assert status == 503
        assert f"instance {first.instance!r} is not ready" in said["reasons"][0]
    finally:
        for one in keepers:
            one.close()
        watch.close()


def test_a_bootstrap_that_has_ended_is_neither_healthy_nor_ready(site: Site) -> None:
    watch = BootstrapWatch(site.bootstrap, Events()).serve("127.0.0.1:0")
    try:
        site.bootstrap.close()
        for path in ("/healthz", "/readyz"):
            status, said = probe(watch.address, path)
            assert status == 503
            assert "does not serve" in said["reasons"][0]
        assert Scrape(watch.address).sum("pdlink_instances") == 0
    finally:
        watch.close()


def test_the_log_has_one_line_for_a_request_with_what_became_of_it(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    with caplog.at_level(logging.INFO, "pdlink"):
        receiver = decode.worker.receive("good", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
        for owner in owners:
            owner.open("good", {"kv": [3, 4]}).publish([3, 4], last=True)
        result = receiver.wait(PATIENCE_S)
        bad = decode.worker.receive("bad", site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
        owners[1].open("bad", {"kv": [3]}).abort("no memory")
        with pytest.raises(TransferFailed):
            bad.wait(PATIENCE_S)
        wait_until(lambda: len(lines("pdlink.decode", caplog)) == 2, PATIENCE_S)
        wait_until(lambda: len(lines("pdlink.prefill", caplog)) >= 3, PATIENCE_S)
    good, failed = lines("pdlink.decode", caplog)
    assert (good["transfer_id"], good["state"], good["level"]) == ("good", "done", "info")
    assert good["num_bytes"] == sum(result.num_bytes.values())
    assert good["gb_per_s"] == pytest.approx(good["num_bytes"] / good["elapsed_s"] / 1e9, abs=1e-4)
    assert sorted(good["peers"]) == sorted(owner.worker.rank.worker_id for owner in owners)
    assert (good["decode"], good["prefill"], good["num_pages"]) == ("dec", "pre", 2)
    assert "GB/s" in good["message"]
    assert (failed["transfer_id"], failed["state"], failed["level"]) == ("bad", "failed", "warning")
    assert failed["reason"] == "aborted"
    assert failed["failed_rank"] == owners[1].worker.rank.worker_id
    assert "no memory" in failed["text"]
    of_good = [one for one in lines("pdlink.prefill", caplog) if one["transfer_id"] == "good"]
    assert [(one["state"], one["num_pages"], one["decode"]) for one in of_good] == [("released", 2, "dec")] * 2
    assert {one["worker_id"]: one["num_bytes"] for one in of_good} == result.num_bytes
    for one in of_good:
        assert one["gb_per_s"] == pytest.approx(one["num_bytes"] / one["elapsed_s"] / 1e9, abs=1e-4)
        assert f"{one['num_bytes']} bytes published for dec in " in one["message"]
        assert one["message"].endswith(" GB/s")


def test_a_node_serves_nothing_unless_it_is_told_to(site: Site) -> None:
    assert site.node().http_address is None
