"""Owns which of the open transports a prefill rank can move its pool with, for people who read the log. pdlink's worker
finds the same when it registers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pdlink.backends.base import Backend
from pdlink.errors import RegionError

log = logging.getLogger("pdlink.sglang")


def offered(backends: Mapping[str, Backend]) -> list[str]:
    """Names of those that reach the registered memory, in their order; says what would make `ipc` one of them."""
    names = []
    for name, backend in backends.items():
        try:
            backend.endpoint()
        except RegionError:
            if name == "ipc":
                log.info("ipc cannot reach this pool; on CPU, PDLINK_BACKENDS=ipc,nixl has it made in shared memory")
        else:
            names.append(name)
    return names
