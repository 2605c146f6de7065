"""Owns the transports over which whole links are tested: backend, environment, and what a machine may lack for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.backends.needs import mooncake_missing


@dataclass(frozen=True, slots=True)
class Transport:
    """`env` holds for every process of a link. `owners_may_end`: the engine is known to end an owner's process whose
    reader went away in the middle of a pull (see `pdlink.backends.nixl_engine`)."""

    backend: str
    env: Mapping[str, str] = field(default_factory=dict)
    owners_may_end: bool = False
    missing: Callable[[], str] = str


TRANSPORTS = {
    "ipc": Transport("ipc"),
    "nixl-cma": Transport("nixl"),  # what UCX chooses on one host
    "nixl-tcp": Transport("nixl", {"UCX_TLS": "tcp,cuda_copy"}, owners_may_end=True),
    "mooncake-tcp": Transport("mooncake", missing=mooncake_missing),
}
