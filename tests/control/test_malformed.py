"""Bytes that are no frame: always a `FrameError` that says what is wrong, never another exception."""

import contextlib
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlink.control import frames as fr
from pdlink.control.wire import MAX_AUX_BYTES, VERSION, decode, encode
from pdlink.errors import FrameError, PdlinkError
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.v1 import bootstrap_pb2, common_pb2
from pdlink.v1 import control_pb2 as pb
from tests.control.frames import BODIES, FRAMES, READERS


def refused(data, says=None):
    with pytest.raises(FrameError, match=says):
        decode(data)


def raw(kind="ready", **head):
    """A parsed golden frame to damage, with another head where asked."""
    message = pb.Frame.FromString(encode(FRAMES[kind]))
    for name, value in head.items():
        setattr(message, name, value)
    return message


def test_slots_and_stamps_that_do_not_pair_are_refused():
    message = raw("credit_stamped")
    message.credit.stamps.append(1)
    refused(message.SerializeToString(), "credit frame: 2 slots and 3 stamps do not pair")
    with pytest.raises(FrameError, match="1 slots and 2 stamps"):
        encode(replace(FRAMES["credit"], body=fr.Credit((1,), (1, 2))))


def test_an_empty_frame_is_refused():
    refused(b"", "no body")


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_cut_anywhere_is_refused_or_reads_as_a_frame(name):
    data = encode(FRAMES[name])
    cuts = range(len(data)) if len(data) < 300 else range(0, len(data), 7)
    for cut in cuts:
        with contextlib.suppress(FrameError):
            assert isinstance(decode(data[:cut]), fr.Frame)


@settings(max_examples=300)
@given(st.integers(0, (1 << 64) - 1))
def test_a_random_kilobyte_is_refused(seed):
    refused(random.Random(seed).randbytes(1024))


@settings(max_examples=300)
@given(st.sampled_from(sorted(FRAMES)), st.data())
def test_a_damaged_frame_is_refused_or_reads_as_a_frame_and_never_fails_otherwise(name, data):
    damaged = bytearray(encode(FRAMES[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        assert isinstance(decode(bytes(damaged)), fr.Frame)


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.Side(protocol=common_pb2.ProtocolRange(least=1, greatest=1)),
        common_pb2.Fingerprint(items=[common_pb2.FingerprintItem(name="a", value="b")] * 3),
        bootstrap_pb2.WorkerKey(instance="a", worker_id="b", incarnation=1),
        pb.Ready(sequence=1, group="kv", page_ids=b"abcd"),
        pb.Ping(nonce=5),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_another_kind_of_message_is_refused(message):
    refused(message.SerializeToString())


def test_a_frame_over_the_limit_is_refused_with_both_sizes():
    data = encode(FRAMES["ready"])
    assert decode(data, len(data)) == FRAMES["ready"]
    with pytest.raises(FrameError, match=f"frame of {len(data)} bytes is over the limit of {len(data) - 1}"):
        decode(data, len(data) - 1)


@pytest.mark.parametrize("version", [0, 2, (1 << 32) - 1])
def test_another_version_is_refused_with_both_versions(version):
    refused(raw(version=version).SerializeToString(), f"frame version {version}, this side speaks {VERSION}")


def test_a_body_that_this_version_does_not_know_is_refused():
    head = pb.Frame(version=1, transfer_id="t", attempt=1).SerializeToString()
    refused(head, "no body")
    refused(head + bytes.fromhex("fa0100"), "no body")  # field 31, empty


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ({"transfer_id": ""}, "no transfer id"),
        ({"attempt": 0}, "no transfer id or no attempt"),
        ({"transfer_id": "é" * 129}, "over 256 bytes"),
    ],
)
def test_a_frame_about_no_request_is_refused(head, says):
    refused(raw(**head).SerializeToString(), says)


def test_text_that_is_not_utf8_is_refused():
    data = encode(FRAMES["ready"])
    refused(data.replace("é".encode(), b"\xff\xfe"), "do not parse")


def damaged(kind, damage):
    message = raw(kind)
    damage(getattr(message, message.WhichOneof("body")))
    return message.SerializeToString()


def repeat_first(field):
    def damage(body):
        items = getattr(body, field)
        items.add().CopyFrom(items[0])

    return damage


def cut_layers(body):
    body.layers[0].layers[:] = [3, 3]


def setter(**values):
    def damage(body):
        for name, value in values.items():
            setattr(body, name, value)

    return damage


@pytest.mark.parametrize(
    ("kind", "damage", "says"),
    [
        ("ready", setter(page_ids=b"abc"), "page ids of 3 bytes"),
        ("ready_last", setter(digests=b"12345678" * 3), "24 digest bytes where 32 belong"),
        ("ready_last", setter(digests=b"1234567"), "7 digest bytes where 32 belong"),
        ("ready", setter(digests=b"12345678"), "8 digest bytes where 120 belong"),
        ("ready_nothing", setter(digests=b"12345678"), "8 digest bytes where 0 belong"),
        ("ready_mixed", setter(digests=b"12345678"), "8 digest bytes where 16 belong"),
        ("ready_mixed", setter(digest_kind="x" * 257), "name of a kind of digests that is too long"),
        ("ready_last", setter(aux=b"x" * (MAX_AUX_BYTES + 1)), f"aux of {MAX_AUX_BYTES + 1} bytes"),
        ("ready", repeat_first("layers"), "component 'latent' is listed twice"),
        ("ready", cut_layers, "layers of 'latent' do not increase"),
        ("stage", repeat_first("layers"), "listed twice"),
        ("stage", cut_layers, "do not increase"),
        ("subscribe", setter(fingerprint_digest=b"x" * 15), "fingerprint digest of 15 bytes"),
        ("subscribe", repeat_first("spans"), "a page group is listed twice"),
        ("subscribe", lambda body: body.ClearField("protocol"), "protocol range 0..0"),
        ("subscribe", lambda body: body.ClearField("readers"), "needs the name of its decode instance"),
        ("subscribe", lambda body: setter(num_readers=1)(body.readers), "reader_index=1 is outside num_readers=1"),
        ("subscribe", lambda body: setter(decode_instance="d" * 257)(body.readers), "too long"),
        ("subscribe_with_fingerprint", lambda body: repeat_first("items")(body.fingerprint), "an item twice"),
        ("release", lambda body: body.sequences.append(9), "4 sequences and 3 generations do not pair"),
        ("release", lambda body: (body.sequences.append(0), body.generations.append(1)), "a sequence is listed twice"),
        ("release", lambda body: setter(num_readers=0)(body.readers), "outside num_readers=0"),
        ("abort", lambda body: body.ClearField("readers"), "needs the name"),
        ("failed", lambda body: setter(text="t" * 4097)(body.cause), "text of 4097 characters"),
        ("refused", lambda body: setter(fix="t" * 4097)(body.cause), "text of 4097 characters"),
    ],
)
def test_a_body_that_contradicts_itself_is_refused(kind, damage, says):
    refused(damaged(kind, damage), says)


def test_a_reason_that_this_version_does_not_know_reads_as_a_protocol_failure():
    found = decode(damaged("failed", lambda body: setter(reason="sunspots")(body.cause)))
    assert found.body.cause == replace(BODIES["failed"].cause, reason=FailureReason.PROTOCOL)


@pytest.mark.parametrize(
    "frame",
    [
        fr.Frame("", 1, BODIES["abort_ack"]),
        fr.Frame("t" * 257, 1, BODIES["abort_ack"]),
        fr.Frame("\ud800", 1, BODIES["abort_ack"]),
        fr.Frame("t", 0, BODIES["abort_ack"]),
        fr.Frame("t", 1 << 64, BODIES["abort_ack"]),
        fr.Frame("t", 1, replace(BODIES["ready"], aux=b"x" * (MAX_AUX_BYTES + 1))),
        fr.Frame("t", 1, replace(BODIES["ready"], page_ids=np.array([1, -1]))),
        fr.Frame("t", 1, replace(BODIES["ready"], page_ids=np.array([1 << 32]))),
        fr.Frame("t", 1, replace(BODIES["ready"], generation=-1)),
        fr.Frame("t", 1, fr.Release(READERS, {0: 1 << 64})),
    ],
    ids=itertools.count(),
)
def test_what_the_other_side_would_refuse_is_not_sent(frame):
    with pytest.raises(FrameError):
        encode(frame)


def test_a_long_cause_is_cut_to_what_the_other_side_takes():
    cause = Failure(FailureReason.INTERNAL, "t" * 9000, "w" * 9000, "s" * 9000, "f" * 9000)
    found = decode(encode(fr.Frame("t", 1, fr.Failed(cause)))).body.cause
    assert {len(one) for one in (found.text, found.worker_id, found.stage, found.fix)} == {4096}


def test_a_frame_error_is_an_error_of_ours_with_the_kind_of_frame():
    with pytest.raises(PdlinkError, match="release frame: 4 sequences"):
        decode(damaged("release", lambda body: body.sequences.append(9)))
