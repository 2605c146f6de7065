"""Owns the bytes of control frames: `encode` and `decode`, with every size and range checked on entry.

A frame that cannot be read is a `FrameError` that names what is wrong; the caller counts it and lives on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from pdlink.bootstrap.messages import ProtocolRange
from pdlink.bootstrap.wire import pack_fingerprint, unpack_fingerprint
from pdlink.control import frames as fr
from pdlink.errors import FrameError, Mismatch
from pdlink.layout.parts import Part
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.digests import DigestKind, DigestTable
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.trace_parent import clean
from pdlink.v1 import common_pb2 as common
from pdlink.v1 import control_pb2 as pb

VERSION = 1
MAX_ID_BYTES = 256
MAX_AUX_BYTES = 64 << 10
MAX_TEXT = 4096
MAX_ITEMS = 1 << 16
MAX_SPANS = 256
"""Page groups, and transports, that a subscribe may name: prefill keeps it, from whoever sends it."""
MAX_PAGE_ID = (1 << 32) - 1
BodyT = TypeVar("BodyT")


def encode(frame: fr.Frame) -> bytes:
    """The frame's bytes, always the same for equal frames. Raises `FrameError` for what `decode` would refuse."""
    name, pack = _PACK[type(frame.body)]
    try:
        _check_head(name, frame.transfer_id, frame.attempt)
        message = pb.Frame(version=VERSION, transfer_id=frame.transfer_id, attempt=frame.attempt)
        body = getattr(message, name)
        body.SetInParent()
        pack(frame.body, body)
    except ValueError as error:  # a value that cannot be used, or that protobuf refuses
        raise FrameError(f"{name} frame: {error}") from error
    return bytes(message.SerializeToString(deterministic=True))


def decode(data: bytes | memoryview, max_bytes: int = 4 << 20) -> fr.Frame:
    """Parse and check one frame. Raises `FrameError`."""
    if len(data) > max_bytes:
        raise FrameError(f"frame of {len(data)} bytes is over the limit of {max_bytes}")
    message = pb.Frame()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise FrameError(f"not a control frame: {len(data)} bytes that do not parse") from error
    name = message.WhichOneof("body")
    if name is None:
        raise FrameError("control frame has no body that this version knows")
    _need(message.version == VERSION, f"frame version {message.version}, this side speaks {VERSION}")
    transfer_id, attempt = message.transfer_id, message.attempt
    try:
        _check_head(name, transfer_id, attempt)
        return fr.Frame(transfer_id, attempt, _UNPACK[name](getattr(message, name)))
    except ValueError as error:
        raise FrameError(f"{name} frame: {error}") from error


def _check_head(name: str, transfer_id: str, attempt: int) -> None:
    _need(len(transfer_id.encode()) <= MAX_ID_BYTES, f"transfer id of over {MAX_ID_BYTES} bytes")
    _need(name in ("ping", "pong") or (transfer_id != "" and attempt != 0), "no transfer id or no attempt")


def _need(holds: bool, text: str) -> None:
    if not holds:
        raise FrameError(text)


def _short(text: str) -> str:
    _need(len(text) <= MAX_TEXT, f"text of {len(text)} characters, at most {MAX_TEXT} are allowed")
    return text


# --- shared parts ---------------------------------------------------------------------------------


def _pack_cause(cause: Failure, out: pb.Cause) -> None:
    out.reason, out.text, out.fix = cause.reason.value, cause.text[:MAX_TEXT], cause.fix[:MAX_TEXT]
    out.worker_id, out.stage = cause.worker_id[:MAX_TEXT], cause.stage[:MAX_TEXT]
    for one in cause.mismatches:
        out.mismatches.add(field=one.field, prefill=one.prefill, decode=one.decode, fix=one.fix)


def _cause(message: pb.Cause) -> Failure:
    try:
        reason = FailureReason(message.reason)
    except ValueError:
        reason = FailureReason.PROTOCOL
    _need(len(message.mismatches) <= MAX_ITEMS, "a cause with too many mismatches")
    mismatches = tuple(Mismatch(one.field, one.prefill, one.decode, one.fix) for one in message.mismatches)
    text = _short(message.text)
    return Failure(reason, text, _short(message.worker_id), _short(message.stage), _short(message.fix), mismatches)


def _pack_readers(readers: ReaderSet, out: common.ReaderSet) -> None:
    out.decode_instance = readers.decode_instance
    out.reader_index, out.num_readers = readers.reader_index, readers.num_readers


def _readers(message: common.ReaderSet) -> ReaderSet:
    _need(len(message.decode_instance) <= MAX_ID_BYTES, "a decode instance name that is too long")
    return ReaderSet(message.decode_instance, message.reader_index, message.num_readers)


def _pack_layers(layers: Mapping[str, Iterable[int]], out: Any) -> None:
    for component, ids in layers.items():
        out.add(component=component, layers=ids)


def _layers(messages: Any) -> dict[str, tuple[int, ...]]:
    sets: dict[str, tuple[int, ...]] = {}
    for one in messages:
        ids = tuple(one.layers)
        _need(one.component not in sets, f"component {one.component!r} is listed twice")
        _need(all(a < b for a, b in itertools.pairwise(ids)), f"layers of {one.component!r} do not increase")
        sets[one.component] = ids
    return sets


def _pack_parts(parts: Mapping[str, Part], out: Any) -> None:
    for name, part in parts.items():
        ends = {"token_index": part.token_index, "token_count": part.token_count}
        out.add(component=name, head_index=part.head_index, head_count=part.head_count, **ends)


def _parts(messages: Any) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    _need(len(messages) <= MAX_SPANS, "too many parts")
    for one in messages:
        _need(one.component not in parts, f"component {one.component!r} has two parts")
        holds = one.head_index < one.head_count and one.token_index < one.token_count
        _need(holds, f"a part of {one.component!r} that is none")
        parts[one.component] = Part(one.head_index, one.head_count, one.token_index, one.token_count)
    return parts


# --- bodies ---------------------------------------------------------------------------------------


def _check_named(num_spans: int, backends: Collection[str]) -> None:
    _need(num_spans <= MAX_SPANS and len(backends) <= MAX_SPANS, "too many items")
    _need(all(len(name) <= MAX_ID_BYTES for name in backends), "a backend name that is too long")


def _pack_subscribe(body: fr.Subscribe, out: pb.Subscribe) -> None:
    _check_named(len(body.spans), body.backends)
    out.protocol.least, out.protocol.greatest = body.protocol.least, body.protocol.greatest
    out.fingerprint_digest = body.fingerprint_digest
    if body.fingerprint:
        out.fingerprint.CopyFrom(pack_fingerprint(body.fingerprint))
    _pack_readers(body.readers, out.readers)
    out.incarnation, out.next_sequence = body.incarnation, body.next_sequence
    for span in body.spans:
        out.spans.add(group=span.group, first_page=span.first_page, num_pages=span.num_pages)
    out.backends.extend(body.backends)
    out.stage_bytes, out.stage_pieces = body.stage_bytes, body.stage_pieces
    out.trace_parent = body.trace_parent
    _pack_parts(body.parts, out.parts)


def _subscribe(message: pb.Subscribe) -> fr.Subscribe:
    _need(len(message.fingerprint_digest) == 16, f"fingerprint digest of {len(message.fingerprint_digest)} bytes")
    _check_named(len(message.spans), message.backends)
    spans = tuple(fr.PageSpan(one.group, one.first_page, one.num_pages) for one in message.spans)
    _need(len({one.group for one in spans}) == len(spans), "a page group is listed twice")
    return fr.Subscribe(
        ProtocolRange(message.protocol.least, message.protocol.greatest),
        message.fingerprint_digest,
        _readers(message.readers),
        message.incarnation,
        spans,
        message.next_sequence,
        tuple(message.backends),
        unpack_fingerprint(message.fingerprint) if message.HasField("fingerprint") else None,
        message.stage_bytes,
        message.stage_pieces,
        clean(message.trace_parent),
        _parts(message.parts),
    )


def _pack_subscribed(body: fr.Subscribed, out: pb.Subscribed) -> None:
    out.incarnation, out.next_sequence, out.open = body.incarnation, body.next_sequence, body.is_open


def _pack_ready(body: fr.Ready, out: pb.Ready) -> None:
    out.sequence, out.group, out.start_page = body.sequence, body.group, body.start_page
    pages = body.page_ids
    if len(pages):
        _need(int(pages.min()) >= 0 and int(pages.max()) <= MAX_PAGE_ID, f"page ids outside 0..{MAX_PAGE_ID}")
    out.page_ids = np.ascontiguousarray(pages, dtype="<u4").tobytes()
    _pack_layers(body.layers, out.layers)
    out.generation, out.last = body.generation, body.last
    if body.aux is not None:
        _need(len(body.aux) <= MAX_AUX_BYTES, f"aux of {len(body.aux)} bytes is over the limit of {MAX_AUX_BYTES}")
        out.has_aux, out.aux = True, body.aux
    if body.digests is not None:
        out.digests = np.ascontiguousarray(body.digests.values, dtype="<u8").tobytes()
        if body.digests.kind != DigestKind.XXH3_64:
            out.digest_kind = body.digests.kind
    out.staged_pieces = body.staged_pieces


def _ready(message: pb.Ready) -> fr.Ready:
    _need(len(message.page_ids) % 4 == 0, f"page ids of {len(message.page_ids)} bytes are not whole 4-byte ids")
    pages = np.frombuffer(message.page_ids, dtype="<u4").astype(np.int64)
    _need(len(message.aux) <= MAX_AUX_BYTES, f"aux of {len(message.aux)} bytes is over the limit of {MAX_AUX_BYTES}")
    layers = _layers(message.layers)
    digests = _digests(message, sum(len(ids) for ids in layers.values()), len(pages)) if message.digests else None
    return fr.Ready(
        message.sequence,
        message.group,
        message.start_page,
        pages,
        layers,
        message.generation,
        message.last,
        message.aux if message.has_aux else None,
        digests,
        message.staged_pieces,
    )


def _digests(message: pb.Ready, num_rows: int, num_pages: int) -> DigestTable:
    """Of a kind that is not known here, digests may be of any size: that is for the reader to refuse, not for us."""
    kind, wanted = message.digest_kind or DigestKind.XXH3_64.value, 8 * num_rows * num_pages
    _need(len(kind) <= MAX_ID_BYTES, "the name of a kind of digests that is too long")
    if len(message.digests) != wanted and DigestKind.named(kind) is None:
        return DigestTable(kind, np.zeros((0, 0), dtype=np.uint64))
    _need(len(message.digests) == wanted, f"{len(message.digests)} digest bytes where {wanted} belong")
    values = np.frombuffer(message.digests, dtype="<u8").astype(np.uint64).reshape(num_rows, num_pages)
    return DigestTable(kind, values)


def _pack_release(body: fr.Release, out: pb.Release) -> None:
    out.sequences.extend(body.pulled.keys())
    out.generations.extend(body.pulled.values())
    _pack_readers(body.readers, out.readers)


def _release(message: pb.Release) -> fr.Release:
    pairs = (len(message.sequences), len(message.generations))
    _need(pairs[0] == pairs[1], f"{pairs[0]} sequences and {pairs[1]} generations do not pair")
    pulled = dict(zip(message.sequences, message.generations, strict=True))
    _need(len(pulled) == pairs[0], "a sequence is listed twice")
    return fr.Release(_readers(message.readers), pulled)


def _pack_verdict(body: fr.Verdict, out: pb.Verdict) -> None:
    out.unchanged = body.unchanged
    if body.cause:
        _pack_cause(body.cause, out.cause)


def _verdict(message: pb.Verdict) -> fr.Verdict:
    return fr.Verdict(message.unchanged, _cause(message.cause) if message.HasField("cause") else None)


def _pack_abort(body: fr.Abort, out: pb.Abort) -> None:
    _pack_cause(body.cause, out.cause)
    _pack_readers(body.readers, out.readers)


def _pack_stage(body: fr.Stage, out: pb.Stage) -> None:
    out.ticket, out.sequence = body.ticket, body.sequence
    out.first_page, out.num_pages = body.first_page, body.num_pages
    _pack_layers(body.layers, out.layers)
    _pack_parts(body.parts, out.parts)


def _stage(message: pb.Stage) -> fr.Stage:
    layers, parts = _layers(message.layers), _parts(message.parts)
    for name in parts:
        _need(name in layers, f"a part of {name!r}, of which no layer is listed")
    return fr.Stage(message.ticket, message.sequence, message.first_page, message.num_pages, layers, parts)


def _pack_staged(body: fr.Staged, out: pb.Staged) -> None:
    out.ticket, out.slot, out.offset, out.nbytes = body.ticket, body.slot, body.offset, body.nbytes
    out.stamp, out.generation = body.stamp, body.generation


def _pack_credit(body: fr.Credit, out: pb.Credit) -> None:
    _check_credit(len(body.slots), len(body.stamps))
    out.slots.extend(body.slots)
    out.stamps.extend(body.stamps)


def _check_credit(num_slots: int, num_stamps: int) -> None:
    _need(num_stamps in (0, num_slots), f"{num_slots} slots and {num_stamps} stamps do not pair")


def _credit(message: pb.Credit) -> fr.Credit:
    _check_credit(len(message.slots), len(message.stamps))
    return fr.Credit(tuple(message.slots), tuple(message.stamps))


def _pack_pong(body: fr.Pong, out: pb.Pong) -> None:
    out.nonce, out.incarnation = body.nonce, body.incarnation


_PACK: dict[type[Any], tuple[str, Callable[[Any, Any], None]]] = {
    fr.Subscribe: ("subscribe", _pack_subscribe),
    fr.Subscribed: ("subscribed", _pack_subscribed),
    fr.Refused: ("refused", lambda body, out: _pack_cause(body.cause, out.cause)),
    fr.Ready: ("ready", _pack_ready),
    fr.Release: ("release", _pack_release),
    fr.Verdict: ("verdict", _pack_verdict),
    fr.Abort: ("abort", _pack_abort),
    fr.AbortAck: ("abort_ack", lambda body, out: None),
    fr.Failed: ("failed", lambda body, out: _pack_cause(body.cause, out.cause)),
    fr.Stage: ("stage", _pack_stage),
    fr.Staged: ("staged", _pack_staged),
    fr.Credit: ("credit", _pack_credit),
    fr.Ping: ("ping", lambda body, out: setattr(out, "nonce", body.nonce)),
    fr.Pong: ("pong", _pack_pong),
}

_UNPACK: dict[str, Callable[[Any], fr.Body]] = {
    "subscribe": _subscribe,
    "subscribed": lambda m: fr.Subscribed(m.incarnation, m.next_sequence, m.open),
    "refused": lambda m: fr.Refused(_cause(m.cause)),
    "ready": _ready,
    "release": _release,
    "verdict": _verdict,
    "abort": lambda m: fr.Abort(_cause(m.cause), _readers(m.readers)),
    "abort_ack": lambda m: fr.AbortAck(),
    "failed": lambda m: fr.Failed(_cause(m.cause)),
    "stage": _stage,
    "staged": lambda m: fr.Staged(m.ticket, m.slot, m.offset, m.nbytes, m.stamp, m.generation),
    "credit": _credit,
    "ping": lambda m: fr.Ping(m.nonce),
    "pong": lambda m: fr.Pong(m.nonce, m.incarnation),
}
