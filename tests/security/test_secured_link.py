"""Whole requests where everything is secured: they succeed, show no secret, and sides that differ are told so."""

import base64
import contextlib
import dataclasses
import logging
import secrets
from pathlib import Path

import pytest
from pydantic import SecretStr
from zmq.utils import z85

from pdlink.address import Address
from pdlink.bootstrap import keeper as keeper_module
from pdlink.bootstrap import service_wire, wire
from pdlink.bootstrap.access import Access
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.messages import Side
from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.bootstrap.rpc import Link
from pdlink.bootstrap.server import BootstrapServer
from pdlink.cli import main as cli
from pdlink.config import load_settings
from pdlink.control import curve
from pdlink.errors import ConfigError, PdlinkError, TransferFailed
from pdlink.layout import fingerprint
from pdlink.observability.bootstrap_watch import BootstrapWatch
from pdlink.observability.logs import JsonFormatter
from pdlink.prefill import worker as prefill_worker
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from pdlink.v1 import bootstrap_pb2 as pb
from tests.link.rig import DEADLINE_S, LOOPBACK, PAGE_SIZE, Site, assert_all, make_layout, wait_until
from tests.observability.asking import ask

TOKEN = "0123456789abcdef0123456789abcdef"
OWNER_BYTES = 32
LAYOUT = make_layout(4)


class SecuredSite(Site):
    """A site whose bootstrap has settings of its own, and that keeps what its nodes and server have emitted."""

    def __init__(self, stack, server, **client):
        super().__init__(stack, backends="ipc", resend_interval_s=0.1, **client)
        self.told = []
        self.bootstrap = stack.enter_context(BootstrapServer.start(LOOPBACK, load_settings({}, **server)))
        self.bootstrap._events.subscribe(self.told.append)

    def node(self, **settings):
        node = super().node(**settings)
        node.events.subscribe(self.told.append)
        return node


def move(site, owners, decode, transfer_id):
    """One request of two pages; its receiver and senders, at their end."""
    receiver = decode.worker.receive(transfer_id, site.instance, {"kv": [1, 2]}, 2 * PAGE_SIZE)
    senders = [owner.open(transfer_id, {"kv": [3, 4]}) for owner in owners]
    for sender in senders:
        sender.publish([3, 4], last=True)
    with contextlib.suppress(TransferFailed):
        receiver.wait(DEADLINE_S)
    if receiver.state is ReceiverState.DONE:
        assert decode.pool.find_wrong(transfer_id, {"kv": [1, 2]}) is None
    return receiver, senders


def forms(secret):
    """How a secret would look in text."""
    found = {repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode(), str(list(secret))}
    with contextlib.suppress(UnicodeDecodeError):
        found.add(secret.decode())
    if len(secret) == 32:
        found.add(z85.encode(secret).decode())
    return found


@pytest.fixture
def made(monkeypatch):
    """The secrets that this process makes while a test runs."""
    found, make_keys, token_bytes = [], curve.make_keys, secrets.token_bytes

    def keys():
        server, readers = make_keys()
        found.extend([server.secret.reveal(), readers.client_secret.reveal()])
        return server, readers

    def owner(nbytes=None):
        value = token_bytes(nbytes)
        if nbytes == OWNER_BYTES:  # others ask for shorter ones, which are no secrets
            found.append(value)
        return value

    monkeypatch.setattr(prefill_worker, "make_keys", keys)
    monkeypatch.setattr(keeper_module.secrets, "token_bytes", owner)
    return found


def test_nothing_that_operators_see_of_a_secured_link_holds_a_secret(stack, pki, made, caplog, capsys, tmp_path):
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    http = {"http_bind": "127.0.0.1:0"}
    site = SecuredSite(stack, {**pki.mutual_server, "token": TOKEN}, **pki.mutual_client, token_file=str(file))
    watch = BootstrapWatch(site.bootstrap, site.bootstrap._events).serve("127.0.0.1:0")
    stack.callback(watch.close)
    owners = site.prefill(LAYOUT, 2, **http)
    decode = site.decode(LAYOUT, **http)
    receiver, _ = move(site, owners, decode, "request")
    assert receiver.state is ReceiverState.DONE
    assert len(made) == 6  # two key pairs and an owner key for each rank

    texts = [JsonFormatter().format(one) for one in caplog.records]
    assert len(texts) > 4
    for address in (watch.address, decode.node.http_address, *(owner.node.http_address for owner in owners)):
        texts += [ask(address, path)[1] for path in ("/metrics", "/healthz", "/readyz")]
    settings = [f"--set={name}={value}" for name, value in {**pki.mutual_client, "token_file": str(file)}.items()]
    for command in (["config", "show"], ["inspect", str(site.bootstrap.address)], ["doctor", "--fast"]):
        for options in ([], ["--json"]):
            cli.main([*command, *options, *settings])
            texts += list(capsys.readouterr())
    assert "pdlink_transfer_bytes_total" in "".join(texts)
    assert f'"{owners[0].worker.rank.worker_id}"' in "".join(texts)
    for secret in [*made, TOKEN.encode()]:
        for form in forms(secret):
            assert not any(form in text for text in texts)


def test_a_secured_request_succeeds_and_its_secrets_appear_nowhere(stack, pki, made, caplog):
    caplog.set_level(logging.DEBUG)
    site = SecuredSite(stack, {**pki.mutual_server, "token": TOKEN}, **pki.mutual_client, token=TOKEN)
    owners = site.prefill(LAYOUT, 2)
    decode = site.decode(LAYOUT)
    receiver, senders = move(site, owners, decode, "request")
    assert receiver.state is ReceiverState.DONE
    assert len(made) == 6  # two key pairs and an owner key for each rank

    texts = [caplog.text, repr(site.told), repr(site.settings), str(site.settings), site.settings.model_dump_json()]
    registrations = [owner.worker.registration() for owner in owners]
    assert all(one.rank.control_keys for one in registrations)
    texts += [repr(one) for one in registrations] + [repr(one.rank.endpoint) for one in registrations]
    with BootstrapClient([site.bootstrap.address], site.settings) as client:
        info = client.resolve("pre", fingerprint(LAYOUT))
        assert all(one.control_keys for one in info.ranks)
        texts += [repr(info), repr(vars(client)), repr(vars(site.bootstrap))]
    for owner in owners:
        texts += [repr(vars(owner.worker)), repr(vars(owner.node)), repr(owner.node.loop.counters)]
    texts += [repr(vars(decode.worker)), repr(vars(decode.node)), repr(receiver), repr(senders)]

    wrong = {"token": TOKEN[::-1]}, {"token": "short"}, {"tls_key": pki.server["tls_key"]}
    for one in wrong:
        chosen = load_settings({}, **{**pki.mutual_client, "token": TOKEN, **one})
        with pytest.raises(PdlinkError) as refused, BootstrapClient([site.bootstrap.address], chosen) as client:
            client.resolve("pre", fingerprint(LAYOUT))
        texts += [str(refused.value), repr(refused.value), repr(refused.value.__cause__)]
    with pytest.raises(ConfigError) as refused:
        load_settings({"PDLINK_TOKEN_": TOKEN})
    texts += [str(refused.value), caplog.text, repr(site.told)]

    for secret in [*made, TOKEN.encode(), TOKEN[::-1].encode()]:
        for form in forms(secret):
            assert form not in "\n".join(texts)
    for side in (pki.server, pki.client):
        body = "".join(Path(side["tls_key"]).read_text().splitlines()[1:-1])
        assert body[:40] not in "\n".join(texts)


def test_a_decode_with_a_wrong_token_fails_its_request_and_says_what_to_set(stack):
    site = SecuredSite(stack, {"token": TOKEN}, token=TOKEN)
    owners = site.prefill(LAYOUT, 2)
    receiver, _ = move(site, owners, site.decode(LAYOUT, token=SecretStr(TOKEN[::-1])), "request")
    assert receiver.state is ReceiverState.FAILED
    with pytest.raises(TransferFailed, match="wrong token; set PDLINK_TOKEN or PDLINK_TOKEN_FILE") as failed:
        receiver.result()
    assert TOKEN[::-1] not in str(failed.value)
    good, _ = move(site, owners, site.decode(LAYOUT), "again")
    assert good.state is ReceiverState.DONE


def test_control_sockets_are_plain_unless_a_token_or_tls_is_set_or_it_is_asked_for(pki):
    for chosen, uses_curve in (
        ({}, False),
        ({"token": TOKEN}, True),
        ({"token_file": "token"}, True),
        (pki.ca, True),
        (pki.server, True),
        ({"control_curve": "on"}, True),
        ({"control_curve": "off", "token": TOKEN}, False),
    ):
        assert load_settings({}, **chosen).uses_curve is uses_curve


@pytest.mark.parametrize(("prefill", "decode"), [("on", "off"), ("off", "on")])
def test_sides_of_which_one_wants_curve_and_the_other_not_both_fail_and_say_so(stack, prefill, decode):
    site = SecuredSite(stack, {})
    owners = site.prefill(LAYOUT, 2, control_curve=prefill)
    receiver, senders = move(site, owners, site.decode(LAYOUT, control_curve=decode), "request")
    assert receiver.state is ReceiverState.FAILED
    assert receiver.failure.reason is FailureReason.INCOMPATIBLE
    told = (
        rf"control_curve is {prefill} \(pre/dp0\.pp0\.cp0\.tp0\) on prefill and {decode} on decode; set PDLINK_CONTROL"
    )
    with pytest.raises(TransferFailed, match=told):
        receiver.result()
    assert_all(senders, SenderState.ABORTED)
    good, _ = move(site, owners, site.decode(LAYOUT, control_curve=prefill), "again")
    assert good.state is ReceiverState.DONE


def test_decode_without_credentials_of_its_own_uses_the_keys_that_it_is_given(stack):
    site = SecuredSite(stack, {})
    owners = site.prefill(LAYOUT, 2, control_curve="on")
    receiver, _ = move(site, owners, site.decode(LAYOUT), "request")
    assert receiver.state is ReceiverState.DONE
    assert all(owner.node.loop.denials == {} for owner in owners)


def test_a_decode_that_may_not_take_keys_is_refused_at_resolve_and_gets_none(stack, monkeypatch):
    site = SecuredSite(stack, {})
    site.prefill(LAYOUT, 2, control_curve="on")
    older = pb.ResolveRequest(instance="pre", decode=wire.pack_side(Side.of(LAYOUT)))
    link = Link(site.bootstrap.address)
    stack.callback(link.close)
    data = link.call("Resolve", older, DEADLINE_S)
    refusal = pb.ResolveResponse.FromString(data).refusal
    assert [one.field for one in refusal.mismatches] == ["control_curve"]
    assert len(refusal.endpoints) == 2
    assert not any(one.HasField("control_keys") for one in refusal.endpoints)
    monkeypatch.setattr(Access, "may_send_secrets", lambda *_: False)  # as if it were far away, in plain text
    with BootstrapClient([site.bootstrap.address]) as client:
        with pytest.raises(IncompatibleInstance, match="so that decode may take the keys, give it TLS"):
            client.resolve("pre", fingerprint(LAYOUT))
        assert isinstance(client, BootstrapClient)


def test_keys_are_new_with_every_life_of_a_rank_and_decode_follows(stack):
    site = SecuredSite(stack, {}, control_curve="on")
    owners = site.prefill(LAYOUT, 2)
    decode = site.decode(LAYOUT)
    assert move(site, owners, decode, "first")[0].state is ReceiverState.DONE
    before = {owner.worker.registration().rank.control_keys.server_public for owner in owners}
    for owner in owners:
        owner.worker.close()
    owners = site.prefill(LAYOUT, 2)
    after = {owner.worker.registration().rank.control_keys.server_public for owner in owners}
    assert not before & after
    links = decode.worker._links

    def has_followed():
        link = links.known(site.instance)
        return link is not None and {one.control_keys.server_public for one in link.info.ranks} == after

    wait_until(has_followed)
    assert move(site, owners, decode, "second")[0].state is ReceiverState.DONE


def test_control_keys_go_to_another_machine_over_tls_only_unless_that_is_allowed(stack):
    site = SecuredSite(stack, {}, control_curve="on")
    (owner,) = site.prefill(LAYOUT, 1)
    registration, away = owner.worker.registration(), Address("192.0.2.7", 7400)
    with pytest.raises(ConfigError, match=r"control keys would go to bootstrap 192\.0\.2\.7:7400 in plain text"):
        RegistrationKeeper(registration, [away], load_settings({}))
    RegistrationKeeper(registration, [away], load_settings({}, allow_plaintext_secrets=True)).close()
    plain = dataclasses.replace(registration, rank=dataclasses.replace(registration.rank, control_keys=None))
    RegistrationKeeper(plain, [away], load_settings({})).close()


def test_keys_of_another_size_are_refused_by_name(stack):
    site = SecuredSite(stack, {}, control_curve="on")
    (owner,) = site.prefill(LAYOUT, 1)
    packed = service_wire.pack_rank_info(owner.worker.registration().rank)
    packed.control_keys.client_secret = b"short"
    with pytest.raises(PdlinkError, match=r"control_keys\.client_secret has 5 bytes") as refused:
        service_wire.unpack_rank_info(packed)
    assert "short" not in str(refused.value)
