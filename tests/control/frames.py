"""Owns the values behind the golden frames of protocol 1: the bytes in `golden/` must read as these for ever."""

from __future__ import annotations

import numpy as np

from pdlink.bootstrap.messages import ProtocolRange
from pdlink.control.frames import (
    Abort,
    AbortAck,
    Body,
    Credit,
    Failed,
    Frame,
    PageSpan,
    Ping,
    Pong,
    Ready,
    Refused,
    Release,
    Stage,
    Staged,
    Subscribe,
    Subscribed,
    Verdict,
)
from pdlink.errors import Mismatch
from pdlink.layout import Fingerprint, Part, ReaderSet
from pdlink.transfer.digests import DigestTable
from pdlink.transfer.failure import Failure, FailureReason

READERS = ReaderSet("decode-0", 1, 2)
PRINT = Fingerprint((("num_layers", "4"), ("latent.page_size", "64")))
MISMATCH = Mismatch("latent.page_size", "64", "32", "start both servers with the same page size")
CAUSE = Failure(FailureReason.INCOMPATIBLE, "page size", "prefill/cp1", "subscribe", MISMATCH.fix, (MISMATCH,))
LAYERS = {"latent": (0, 1, 77), "index_k": (0, 77)}

BODIES: dict[str, Body] = {
    "subscribe": Subscribe(
        ProtocolRange(1, 3), bytes(range(16)), READERS, (1 << 63) - 1, (PageSpan("kv", 3, 1 << 20),), 7, ("nixl", "ipc")
    ),
    "subscribe_with_fingerprint": Subscribe(ProtocolRange(1, 1), PRINT.digest, ReaderSet("d"), 1, (), 0, (), PRINT),
    "subscribe_ahead": Subscribe(
        ProtocolRange(1, 1), bytes(16), ReaderSet("d"), 1, (PageSpan("kv", 0, 512),), 0, ("nixl",), None, 1 << 40, 4
    ),
    "subscribe_traced": Subscribe(
        *(ProtocolRange(1, 1), bytes(16), ReaderSet("d"), 1, (), 0, (), None, 0, 0),
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    "subscribe_parts": Subscribe(
        ProtocolRange(1, 1), PRINT.digest, ReaderSet("d"), 1, (), parts={"k": Part(1, 2, 0, 1), "v": Part(0, 4, 1, 2)}
    ),
    "subscribed": Subscribed(1_700_000_000_000_000_000, 5, True),
    "refused": Refused(CAUSE),
    "ready": Ready(12, "kv", 64, np.array([5, 0, (1 << 32) - 1], dtype=np.int64), LAYERS, 99),
    "ready_last": Ready(
        13,
        "index",
        0,
        np.array([1, 2], dtype=np.int64),
        {"index_k": (0, 4)},
        100,
        True,
        b"\x00token",
        DigestTable("xxh3-64", np.array([[1, 2], [3, (1 << 64) - 1]], dtype=np.uint64)),
    ),
    "ready_mixed": Ready(
        15,
        "kv",
        8,
        np.array([7, 3], dtype=np.int64),
        {"latent": (2,)},
        102,
        digests=DigestTable("mix64", np.array([[1 << 63, 5]], dtype=np.uint64)),
    ),
    "ready_ahead": Ready(
        14, "kv", 0, np.array([1, 2], dtype=np.int64), {"latent": (0, 4)}, 101, staged_pieces=(1 << 32) - 1
    ),
    "ready_nothing": Ready(0, "kv", 0, np.array([], dtype=np.int64), {}, 1, True, b""),
    "release": Release(READERS, {0: 99, 1: 100, 7: 1 << 63}),
    "verdict": Verdict(True),
    "verdict_changed": Verdict(False, Failure(FailureReason.GENERATION, "taken back")),
    "abort": Abort(CAUSE, READERS),
    "abort_ack": AbortAck(),
    "failed": Failed(Failure(FailureReason.EXPIRED, "no reader for 120 s", "prefill/cp1", "published", "hurry")),
    "stage": Stage(1, 2, 3, 4, LAYERS),
    "stage_part": Stage(1, 2, 3, 4, {"k": (0, 1), "v": (0,)}, {"v": Part(1, 2, 3, 4)}),
    "staged": Staged(1, 2, 1 << 40, 1 << 33, (1 << 64) - 1, 9),
    "credit": Credit((0, 3, 300)),
    "credit_stamped": Credit((0, 3), (1 << 63, 5)),
    "ping": Ping((1 << 64) - 1),
    "pong": Pong(1, (1 << 63) - 1),
}

FRAMES = {name: Frame("chatcmpl-42/é", (1 << 64) - 1, body) for name, body in BODIES.items()}
FRAMES["ping"] = Frame("", 0, BODIES["ping"])
FRAMES["pong"] = Frame("", 0, BODIES["pong"])
