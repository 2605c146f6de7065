"""Control sockets with keys: their readers are heard, strangers are refused, counted and logged, and disturb nobody."""

import contextlib
import logging
import socket
import threading
from collections import Counter

import pytest
import zmq
from zmq.utils import z85

from pdlink.control import zap
from pdlink.control.curve import make_keys
from pdlink.control.handshakes import BROKE_OFF, NO_CURVE, Handshakes, Refused
from pdlink.control.loop import ControlLoop
from pdlink.control.sentry import WRONG_KEY
from pdlink.errors import InvalidInput
from pdlink.events import Events
from tests.control.loops import ANY, TIMEOUT_S, Box, passes, ping, stranger

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


class Guarded:
    """A server with keys, and one reader that has its."""

    def __init__(self, stack):
        self.events = Events()
        self.denied = Counter()
        self.changed = threading.Condition()
        self.events.subscribe(self.see)
        self.loop = ControlLoop(events=self.events).start()
        stack.callback(self.loop.close)
        self.keys, self.readers = make_keys()
        self.box = Box()
        self.server = self.loop.bind(ANY, self.box, self.keys)
        self.others = ControlLoop().start()
        stack.callback(self.others.close)
        self.answers = Box()
        self.reader = self.others.connect(self.server.address, self.answers, self.readers)

    def see(self, event):
        if event.name == "control.denied":
            with self.changed:
                self.denied[event.fields["reason"]] += 1
                self.peer = event.fields["peer"]
                self.changed.notify_all()

    def wait_denied(self, *reasons):
        with self.changed:
            assert self.changed.wait_for(lambda: any(self.denied[one] for one in reasons), TIMEOUT_S), self.denied

    def works(self, nonce):
        return passes(self.server, self.box, self.reader, nonce)


@pytest.fixture
def guarded(stack):
    return Guarded(stack)


def test_readers_with_the_keys_are_heard_and_answered_and_nobody_is_counted(guarded):
    assert guarded.works(1)
    assert guarded.answers.take() == (ping(2),)
    assert guarded.loop.denials == {}


def test_two_servers_of_one_loop_take_their_own_readers_only(stack, guarded):
    keys, readers = make_keys()
    box = Box()
    second = guarded.loop.bind(ANY, box, keys)
    assert passes(second, box, guarded.others.connect(second.address, Box(), readers), 5)
    guarded.others.connect(second.address, Box(), guarded.readers).send(ping(7))
    guarded.wait_denied(NO_CURVE, BROKE_OFF)
    assert guarded.works(9)
    assert box.is_empty


def test_a_stranger_without_curve_is_refused_and_the_next_good_frame_passes(guarded, caplog):
    with caplog.at_level(logging.WARNING), stranger(guarded.server.address) as plain:
        plain.send(b"hello")
        guarded.wait_denied(NO_CURVE, BROKE_OFF)
    assert guarded.works(1)
    assert guarded.box.is_empty
    assert any(f"{guarded.server.address} refused" in text for text in caplog.messages)


def test_a_stranger_with_keys_of_its_own_is_refused_and_the_next_good_frame_passes(guarded, caplog):
    public, secret = zmq.curve_keypair()
    with caplog.at_level(logging.WARNING), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = guarded.keys.public, public, secret
        dealer.connect(f"tcp://{guarded.server.address}")
        dealer.send(b"hello")
        guarded.wait_denied(WRONG_KEY)
        assert guarded.peer == "127.0.0.1"
    assert guarded.works(1)
    assert guarded.box.is_empty
    assert guarded.loop.denials[WRONG_KEY] >= 1
    assert [text for text in caplog.messages if WRONG_KEY in text] == [
        f"control socket {guarded.server.address} refused 127.0.0.1: {WRONG_KEY}"
    ]
    shown = caplog.text + repr(guarded.denied)
    for key in (guarded.keys.secret.reveal(), guarded.readers.client_secret.reveal(), z85.decode(secret)):
        assert z85.encode(key).decode() not in shown
        assert key.hex() not in shown


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 8,
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xff" + bytes(255),
    ],
    ids=["nothing", "http", "noise", "another mechanism", "a false hello"],
)
def test_a_stranger_that_sends_noise_is_refused_and_the_next_good_frame_passes(guarded, noise):
    with socket.create_connection((guarded.server.address.host, guarded.server.address.port), TIMEOUT_S) as raw:
        with contextlib.suppress(OSError):  # it may have hung up on us already
            raw.sendall(noise)
            raw.shutdown(socket.SHUT_WR)
        guarded.wait_denied(NO_CURVE, BROKE_OFF)
    assert guarded.works(1)
    assert guarded.box.is_empty


def test_a_reader_does_not_talk_to_a_plain_server_at_the_address(stack, guarded):
    box = Box()
    plain = guarded.loop.bind(ANY, box)
    channel = guarded.others.connect(plain.address, Box(), guarded.readers)
    channel.send(ping(1))
    assert guarded.works(3)
    assert passes(plain, box, guarded.others.connect(plain.address, Box()), 5)  # the first that comes is this one
    assert box.is_empty


def test_a_server_that_cannot_be_bound_is_forgotten_and_another_still_works(guarded):
    with pytest.raises(InvalidInput, match="cannot listen"):
        guarded.loop.bind(guarded.server.address, Box(), make_keys()[0])
    assert len(guarded.loop._sentry._posts) == 1
    assert guarded.works(1)


def test_a_closed_server_is_forgotten_with_its_keys(guarded):
    sentry = guarded.loop._sentry
    assert guarded.works(1)
    guarded.server.close()
    done = threading.Event()
    guarded.loop.call_soon(done.set)
    assert done.wait(TIMEOUT_S)
    assert sentry._posts == {}


# --- decisions ------------------------------------------------------------------------------------

KEY = b"k" * 32
QUESTION = [b"route", b"", b"1.0", b"7", b"here", b"10.0.0.1", b"", b"CURVE", KEY]


def changed(index, value):
    return [*QUESTION[:index], value, *QUESTION[index + 1 :]]


def test_the_key_of_a_domain_is_accepted():
    answer = zap.answer(QUESTION, {b"here": KEY})
    assert answer.parts == [b"route", b"", b"1.0", b"7", b"200", b"OK", b"", b""]
    assert not answer.denied


@pytest.mark.parametrize(
    "question",
    [
        changed(8, b"l" * 32),
        changed(8, b""),
        changed(4, b"there"),
        changed(4, b""),
        changed(7, b"NULL"),
        changed(7, b"PLAIN"),
        QUESTION[:8],
        [*QUESTION, KEY],
    ],
)
def test_any_other_key_domain_or_mechanism_is_denied(question):
    answer = zap.answer(question, {b"here": KEY, b"elsewhere": b"e" * 32})
    assert answer.parts[3:5] == [b"7", b"400"]
    assert answer.denied == "10.0.0.1"


@pytest.mark.parametrize("question", [[], QUESTION[:7], changed(2, b"2.0")])
def test_what_is_no_question_gets_no_answer(question):
    assert zap.answer(question, {b"here": KEY}) is None


EVENT = zmq.Event


@pytest.mark.parametrize(
    ("events", "refused"),
    [
        ([(EVENT.ACCEPTED, 5), (EVENT.HANDSHAKE_SUCCEEDED, 0), (EVENT.DISCONNECTED, 5)], []),
        ([(EVENT.ACCEPTED, 5), (EVENT.DISCONNECTED, 5)], [BROKE_OFF]),
        ([(EVENT.ACCEPTED, 5), (EVENT.HANDSHAKE_FAILED_PROTOCOL, 1), (EVENT.DISCONNECTED, 5)], [NO_CURVE]),
        ([(EVENT.ACCEPTED, 5), (EVENT.HANDSHAKE_FAILED_NO_DETAIL, 1), (EVENT.DISCONNECTED, 5)], [BROKE_OFF]),
        ([(EVENT.ACCEPTED, 5), (EVENT.HANDSHAKE_FAILED_AUTH, 400), (EVENT.DISCONNECTED, 5)], []),  # zap tells of it
        ([(EVENT.DISCONNECTED, 5)], []),  # accepted before anybody looked
        (
            [
                (EVENT.ACCEPTED, 5),
                (EVENT.HANDSHAKE_SUCCEEDED, 0),
                (EVENT.ACCEPTED, 6),
                (EVENT.DISCONNECTED, 6),
                (EVENT.ACCEPTED, 6),
                (EVENT.HANDSHAKE_FAILED_PROTOCOL, 1),
                (EVENT.DISCONNECTED, 6),
                (EVENT.DISCONNECTED, 5),
            ],
            [BROKE_OFF, NO_CURVE],
        ),
        (  # a reader comes while a stranger is there
            [
                (EVENT.ACCEPTED, 5),
                (EVENT.ACCEPTED, 6),
                (EVENT.HANDSHAKE_SUCCEEDED, 0),
                (EVENT.DISCONNECTED, 6),
                (EVENT.DISCONNECTED, 5),
            ],
            [BROKE_OFF],
        ),
        (  # readers come and go at once
            [
                (EVENT.ACCEPTED, 5),
                (EVENT.ACCEPTED, 6),
                (EVENT.HANDSHAKE_SUCCEEDED, 0),
                (EVENT.HANDSHAKE_SUCCEEDED, 0),
                (EVENT.DISCONNECTED, 6),
                (EVENT.DISCONNECTED, 5),
            ],
            [],
        ),
    ],
)
def test_a_connection_that_proved_nothing_is_counted_once(events, refused):
    handshakes = Handshakes()
    seen = [handshakes.see(event, value, "10.0.0.1") for event, value in events]
    assert [one for one in seen if one] == [Refused("10.0.0.1", reason) for reason in refused]
