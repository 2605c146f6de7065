"""Owns the CURVE keys of one control socket, and what is set on a socket so that it uses them. It opens no socket.

Nothing is sent in the clear on such a socket, each side knows that the other has the keys, and frames of strangers are
never parsed.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils import z85

from pdlink.bootstrap.control_keys import ControlKeys
from pdlink.config import PREFIX
from pdlink.errors import ConfigError
from pdlink.secret import Secret


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the bound side needs: its own pair, and the public key that readers must have the secret one of."""

    public: bytes
    secret: Secret
    client_public: bytes


def make_keys() -> tuple[ServerKeys, ControlKeys]:
    """New keys for one life of a rank: what its socket needs, and what its readers get through the bootstrap.

    Raises `ConfigError` where the zmq library has no CURVE.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            f"this libzmq has no CURVE; install pyzmq from a wheel, or set {PREFIX}CONTROL_CURVE=off on both sides"
        )
    server_public, server_secret = map(z85.decode, zmq.curve_keypair())
    client_public, client_secret = map(z85.decode, zmq.curve_keypair())
    server = ServerKeys(server_public, Secret(server_secret), client_public)
    return server, ControlKeys(server_public, client_public, Secret(client_secret))


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys, domain: bytes) -> None:
    """Make `socket`, not bound yet, take readers only that the ZAP handler accepts in `domain`."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.reveal())
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler it takes nobody


def secure_client(socket: zmq.Socket[bytes], keys: ControlKeys) -> None:
    """Make `socket`, not connected yet, talk to the one server with these keys."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.reveal())
