"""Owns which backends exist and how one is chosen for a pair of peers. It moves nothing and imports none until asked.

A third party adds a backend with an entry point in the group `pdlink.backends`: name -> zero-argument callable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from pdlink.backends.base import Backend, Peer
from pdlink.config import Settings, load_settings
from pdlink.errors import BackendError, BackendUnavailable, ConfigError

log = logging.getLogger("pdlink.backends")

ENTRY_POINT_GROUP = "pdlink.backends"
_BUILT_IN = {
    "ipc": ("pdlink.backends.ipc", "IpcBackend"),
    "nixl": ("pdlink.backends.nixl", "NixlBackend"),
    "mooncake": ("pdlink.backends.mooncake", "MooncakeBackend"),
}
_CONFIGURED = frozenset({"mooncake", "nixl"})
"""Those that are made with the process's settings."""
AUTO_ORDER = ("ipc", "nixl")
"""Best first: bytes that need not leave the host should not.

mooncake has to be named: over tcp its engine listens on every interface, and whoever reaches it may read and write
registered memory.
"""


def known_backends() -> tuple[str, ...]:
    """Names that can be asked for, built-in ones first."""
    return (*_BUILT_IN, *(one.name for one in entry_points(group=ENTRY_POINT_GROUP) if one.name not in _BUILT_IN))


def factory(name: str, settings: Settings | None = None) -> Callable[[], Backend]:
    """The constructor of backend `name`; nothing is imported before it is called. Unknown names: `ConfigError`.

    `settings` default to those of the environment, read when it is called.
    """
    if name in _BUILT_IN:
        return partial(_load, name, partial(_call_built_in, name, settings))
    for one in entry_points(group=ENTRY_POINT_GROUP):
        if one.name == name:
            return partial(_load, name, partial(_call_loaded, one))
    raise ConfigError(f"unknown backend {name!r}; known ones: {', '.join(known_backends())}")


def parse_backends(text: str) -> tuple[str, ...]:
    """Names of a setting such as `auto` or `nixl,ipc`, checked against the known ones."""
    names = AUTO_ORDER if text.strip() == "auto" else tuple(one.strip() for one in text.split(","))
    if len(set(names)) != len(names):
        raise ConfigError(f"backends setting {text!r} names one twice")
    for name in names:
        factory(name)
    return names


def open_backends(text: str, settings: Settings | None = None) -> dict[str, Backend]:
    """Start every backend of a setting, in its order.

    A backend that cannot work here is left out with a logged reason when the setting is `auto`; when it was named, its
    `BackendUnavailable` is raised, because falling back silently would hide a slower transport.
    """
    opened: dict[str, Backend] = {}
    reasons = []
    try:
        for name in parse_backends(text):
            try:
                opened[name] = factory(name, settings)()
            except BackendUnavailable as error:
                if text.strip() != "auto":
                    raise
                reasons.append(f"{name}: {error}")
                log.info("backend %s is not used: %s", name, error)
    except BaseException:
        for one in opened.values():
            one.close()
        raise
    if not opened:
        raise BackendUnavailable(f"no backend works here ({'; '.join(reasons)})")
    return opened


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for a pair of peers, and why each other candidate was rejected."""

    backend: Backend
    rejected: Mapping[str, str]


def choose(own: Mapping[str, Backend], worker_id: str, incarnation: int, offered: Mapping[str, bytes]) -> Choice:
    """Connect to a peer with the first own backend that it offers and that reaches it (blocks).

    Raises `BackendUnavailable` with the reason of every candidate.
    """
    rejected: dict[str, str] = {}
    for name, backend in own.items():
        if name not in offered:
            rejected[name] = f"{worker_id} does not offer it (it offers {_listed(tuple(offered))})"
            continue
        try:
            backend.connect(Peer(worker_id, incarnation, offered[name]))
        except BackendError as error:
            rejected[name] = str(error)
            continue
        log.info("pull from %s over %s%s", worker_id, name, f"; rejected {rejected}" if rejected else "")
        return Choice(backend, rejected)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
    raise BackendUnavailable(
        f"no common backend with {worker_id}: {reasons or 'none is open here'}; set PDLINK_BACKENDS alike on both sides"
    )


def _call_built_in(name: str, settings: Settings | None) -> Backend:
    module, attribute = _BUILT_IN[name]
    make = getattr(import_module(module), attribute)
    made: Backend = make(settings or load_settings()) if name in _CONFIGURED else make()
    return made


def _call_loaded(entry: EntryPoint) -> Backend:
    made: Backend = entry.load()()
    return made


def _load(name: str, make: Callable[[], Backend]) -> Backend:
    try:
        made = make()
    except (ImportError, AttributeError) as error:
        # Our own backends name what to install themselves; only its author knows that of another.
        raise BackendUnavailable(f"backend {name} is not installed: {error}") from error
    called = getattr(made, "name", None)
    if called != name:
        # Peers and settings speak of a backend by this name.
        raise BackendUnavailable(f"backend {name} calls itself {called!r}; it must use the name of its entry point")
    return made


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
