"""Settings of TLS and tokens that cannot be used are refused at start, by name, and never quoted."""

import copy
import datetime
import logging
import pickle
import re
from pathlib import Path

import pytest

from pdlink.address import Address
from pdlink.bootstrap import renewed
from pdlink.bootstrap.access import Access, renewed_access
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.server import BootstrapServer
from pdlink.bootstrap.tls import read_client, read_server
from pdlink.bootstrap.token import read_tokens
from pdlink.config import load_settings
from pdlink.denials import Denials
from pdlink.errors import ConfigError
from pdlink.events import Events
from pdlink.runtime.node import Node
from pdlink.secret import Secret
from pdlink.sparse_log import INTERVAL_S, MAX_REMEMBERED
from tests.bootstrap.values import make_instance
from tests.link.rig import make_layout

TOKEN = "0123456789abcdef0123456789abcdef"
AWAY = Address("192.0.2.7", 7400)


def settings(**chosen):
    return load_settings({}, **chosen)


def test_a_secret_shows_in_no_text_and_is_not_pickled():
    secret = Secret(b"open sesame")
    for text in (repr(secret), str(secret), f"{secret}", repr([secret]), repr(settings(token=TOKEN))):
        assert "sesame" not in text
        assert TOKEN not in text
    assert secret == Secret(b"open sesame") != Secret(b"open barley")
    assert secret.reveal() == b"open sesame"
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    with pytest.raises(TypeError):
        copy.deepcopy(secret)


def test_errors_about_variables_that_look_like_secrets_do_not_quote_them():
    for variable in ("PDLINK_TOKN", "PDLINK_TOKEN_", "PDLINK_PASSWORD", "PDLINK_SECRET_KEYS"):
        with pytest.raises(ConfigError, match=variable) as refused:
            load_settings({variable: TOKEN})
        assert TOKEN not in str(refused.value)
    with pytest.raises(ConfigError, match="argument token=") as refused:
        load_settings({}, token=[TOKEN])
    assert TOKEN not in str(refused.value)
    assert TOKEN not in str(refused.value.__cause__)


def test_one_file_of_a_pair_is_refused(pki):
    for one, other in (("tls_certificate", "TLS_KEY"), ("tls_key", "TLS_CERTIFICATE")):
        for read in (read_server, read_client):
            with pytest.raises(ConfigError, match=f"without PDLINK_{other}"):
                read(settings(**{one: pki.server[one]}))


def test_a_server_with_a_ca_only_is_refused_rather_than_plain(pki):
    with pytest.raises(ConfigError, match="TLS_CA is set without PDLINK_TLS_CERTIFICATE"):
        read_server(settings(**pki.ca))


def test_a_caller_with_a_certificate_only_is_refused(pki):
    with pytest.raises(ConfigError, match="TLS_CERTIFICATE is set without PDLINK_TLS_CA"):
        read_client(settings(**pki.client))


def test_demanding_certificates_needs_the_ca_to_check_them_with(pki):
    with pytest.raises(ConfigError, match="TLS_CLIENT_AUTH=require needs PDLINK_TLS_CA"):
        read_server(settings(**pki.server, tls_client_auth="require"))
    with pytest.raises(ConfigError, match="TLS_CLIENT_AUTH=require needs PDLINK_TLS_CA"):
        read_server(settings(tls_client_auth="require"))


def test_no_settings_mean_plain_text_and_no_token():
    assert read_server(settings()) is None
    assert read_client(settings()) is None
    assert read_tokens(settings()) == ()


def test_a_file_that_cannot_be_used_is_named_with_its_setting_and_its_fault(pki, tmp_path):
    empty, folder = tmp_path / "empty.pem", str(tmp_path)
    empty.touch()
    missing = str(tmp_path / "nothing.pem")
    server, stranger = pki.server, pki.ours.issue("somebody")
    faults = [
        ({**server, "tls_certificate": missing}, f"TLS_CERTIFICATE='{missing}' cannot be read .No such file"),
        ({**server, "tls_key": folder}, "TLS_KEY='.*' cannot be read .Is a directory"),
        ({**server, "tls_certificate": str(empty)}, "TLS_CERTIFICATE='.*empty.pem' holds no certificate"),
        ({**server, "tls_certificate": server["tls_key"]}, "TLS_CERTIFICATE='.*server.key' holds no certificate"),
        ({**server, "tls_key": server["tls_certificate"]}, "TLS_KEY='.*server.pem' holds no private key"),
        ({**server, "tls_key": stranger["tls_key"]}, "TLS_KEY='.*somebody.key' is not the key of .*server.pem'"),
        ({**server, "tls_ca": str(empty)}, "TLS_CA='.*empty.pem' holds no certificate"),
        ({**server, "tls_ca": server["tls_certificate"]}, "TLS_CA='.*server.pem' holds no certificate of a CA"),
        ({**server, "tls_ca": ""}, "TLS_CA is empty; unset it"),
        ({**server, "tls_key": ""}, "TLS_KEY is empty; unset it"),
        ({"tls_certificate": ""}, "TLS_CERTIFICATE is empty; unset it"),
        ({"token_file": ""}, "TOKEN_FILE is empty; unset it"),
        ({"token": ""}, "TOKEN is empty: unset it"),
    ]
    for chosen, text in faults:
        with pytest.raises(ConfigError, match=text):
            BootstrapServer.start(Address("127.0.0.1", 0), settings(**chosen))


def test_a_file_of_secrets_that_others_may_read_is_a_warning_once(pki, tmp_path, caplog):
    token, server = tmp_path / "token", pki.server
    token.write_text(TOKEN)
    for mode, num_warnings in ((0o600, 0), (0o640, 1), (0o640, 1), (0o604, 2)):
        token.chmod(mode)
        assert read_tokens(settings(token_file=str(token)))
        said = [one.message for one in caplog.records if str(token) in one.message]
        assert len(said) == num_warnings
    assert said[0] == f"PDLINK_TOKEN_FILE={str(token)!r} may be read by others than its owner (mode 0640); chmod 600 it"
    assert TOKEN not in caplog.text
    key = tmp_path / "open.key"
    key.write_bytes(Path(server["tls_key"]).read_bytes())
    key.chmod(0o644)
    assert read_server(settings(**{**server, "tls_key": str(key)}))
    assert f"PDLINK_TLS_KEY={str(key)!r}" in caplog.messages[-1]


def test_an_expired_file_is_refused_at_start_by_either_side(pki, tmp_path):
    over = pki.ours.issue("over", life=-datetime.timedelta(hours=1))
    for read in (read_server, read_client):
        with pytest.raises(ConfigError, match=r"TLS_CERTIFICATE='.*over\.pem' .*certificate has expired; renew it"):
            read(settings(**over, **pki.ca))


def test_a_decode_rank_refuses_at_start_what_it_could_not_use_later(pki):
    layout = make_layout(2)
    unusable = settings(tls_ca=pki.server["tls_key"], backends="ipc")
    with Node(unusable) as node, pytest.raises(ConfigError, match="TLS_CA"):
        node.decode("dec", layout, [])


@pytest.mark.parametrize("token", ["", "short", "with spaces in the middle", "with\ttabs-in-the-middle", "é" * 20])
def test_a_token_that_is_weak_or_cannot_be_sent_is_refused_and_not_quoted(token, tmp_path):
    file = tmp_path / "token"
    file.write_text(token)
    for chosen in ({"token": token}, {"token_file": str(file)}):
        with pytest.raises(ConfigError, match="openssl rand -hex 32") as refused:
            Access(settings(**chosen))
        assert not token or token not in str(refused.value)


def test_a_token_comes_from_one_place(tmp_path):
    with pytest.raises(ConfigError, match="both set"):
        read_tokens(settings(token=TOKEN, token_file=str(tmp_path / "token")))
    with pytest.raises(ConfigError, match=r"TOKEN_FILE='.*' cannot be read"):
        read_tokens(settings(token_file=str(tmp_path / "token")))
    (tmp_path / "token").write_text(f"\n {TOKEN}\n{TOKEN[::-1]}\n")
    found = read_tokens(settings(token_file=str(tmp_path / "token")))
    assert [one.reveal().decode() for one in found] == [TOKEN, TOKEN[::-1]]


def test_a_token_goes_to_another_machine_over_tls_only_unless_that_is_allowed(pki):
    registration = make_instance()[0]
    for refused in (
        lambda: BootstrapClient([AWAY], settings(token=TOKEN)),
        lambda: RegistrationKeeper(registration, [AWAY], settings(token=TOKEN)),
        lambda: BootstrapServer.start(AWAY, settings(token=TOKEN)),
    ):
        with pytest.raises(ConfigError, match=r"192\.0\.2\.7:7400 in plain text.*ALLOW_PLAINTEXT_SECRETS") as told:
            refused()
        assert TOKEN not in str(told.value)
    BootstrapClient([AWAY], settings(token=TOKEN, **pki.ca)).close()
    BootstrapClient([AWAY], settings(token=TOKEN, allow_plaintext_secrets=True)).close()
    BootstrapClient([AWAY], settings()).close()


def test_changed_files_are_read_again_and_unusable_ones_are_not_taken(pki, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(renewed, "LOOK_INTERVAL_S", 0.0)
    file = tmp_path / "token"
    file.write_text(TOKEN)
    kept = renewed_access(settings(token_file=str(file)))
    first = kept.get()
    assert kept.get() is first
    file.write_text("x" * 20)
    second = kept.get()
    assert second is not first
    assert second.metadata() == (("authorization", "Bearer " + "x" * 20),)
    with caplog.at_level(logging.ERROR):
        file.write_text("bad")
        assert kept.get() is second
        file.unlink()
        assert kept.get() is second
    assert "the ones before stay" in caplog.text


def test_denials_are_counted_and_told_each_and_logged_once_in_a_while(caplog):
    now, told, events = [0.0], [], Events()
    events.subscribe(told.append)
    denials = Denials("door.denied", events, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            denials.add("the door", "10.0.0.1", "wrong token")
        denials.add("the door", "10.0.0.2", "wrong token")
        denials.add("the door", "10.0.0.1", "no token")
        assert len(caplog.records) == 3
        now[0] = INTERVAL_S
        denials.add("the door", "10.0.0.1", "wrong token")
        assert caplog.messages[-1] == "the door refused 10.0.0.1: wrong token (99 more since the last such line)"
    assert denials.counts == {"wrong token": 102, "no token": 1}
    assert len(told) == 103
    for number in range(2 * MAX_REMEMBERED):
        denials.add("the door", f"host-{number}", "wrong token")
    assert len(denials._log._said) == MAX_REMEMBERED


def test_only_the_places_that_send_or_use_secrets_reveal_them():
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root / folder))
        for folder in ("pdlink", "engines")
        for path in (root / folder).rglob("*.py")
        if ".reveal()" in path.read_text() or ".get_secret_value()" in path.read_text()
    }
    assert found == {
        "bootstrap/access.py",
        "bootstrap/keeper.py",
        "bootstrap/service_wire.py",
        "bootstrap/tls.py",
        "bootstrap/token.py",
        "control/curve.py",
        "sidecar/server.py",  # to the process of an engine that it has started
    }


def test_channels_and_ports_are_opened_in_one_place_each():
    root = Path(__file__).parents[2]
    opened = {"secure_channel(": set(), "insecure_channel(": set(), "_port(": set()}
    for folder in ("pdlink", "engines"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            for call, found in opened.items():
                if re.search(rf"\b(grpc\.|server\.add_(in)?secure){re.escape(call)}", text):
                    found.add(str(path.relative_to(root / folder)))
    assert opened == {
        "secure_channel(": {"bootstrap/access.py"},
        # The sidecar's are unix sockets, of one user.
        "insecure_channel(": {"bootstrap/access.py", "sidecar/stream.py", "sidecar/watch.py"},
        "_port(": {"bootstrap/server.py", "sidecar/engine_process.py"},
    }
