"""Owns how a server opens its link: the library in its own process, or the sidecar beside it, which may be late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pdlink.config import load_settings
from pdlink.errors import PdlinkError, StateError
from pdlink.runtime.node import Node
from pdlink.runtime.verbs import NodeVerbs
from pdlink.sidecar import connect
from pdlink_engines.reference.serve.options import EngineOptions

log = logging.getLogger("pdlink_engines.serve")

RETRY_S = 0.5
SAY_EVERY_S = 10.0


def open_link(options: EngineOptions, is_over: Callable[[], bool]) -> NodeVerbs:
    """Wait for the sidecar for as long as it takes, since a server that ended would only be started again.

    Raises `StateError` when `is_over` said yes first, and what `Node` raises.
    """
    if options.sidecar is None:
        return Node(load_settings())
    said_at = -SAY_EVERY_S
    while not is_over():
        try:
            return connect(options.sidecar)
        except PdlinkError as error:
            if time.monotonic() - said_at > SAY_EVERY_S:
                said_at = time.monotonic()
                log.warning("waiting for the sidecar: %s", error)
            time.sleep(RETRY_S)
    raise StateError("stopped while waiting for the sidecar")


def standing(node: NodeVerbs) -> str:
    """What keeps the link from serving, "" for nothing."""
    return "; ".join(node.health().reasons)
