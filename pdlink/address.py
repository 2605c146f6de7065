"""Owns host-and-port text: one parser and one formatter for every address in pdlink. It resolves and binds nothing."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from pdlink.errors import AddressError

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_WILDCARDS = frozenset({"0.0.0.0", "::", "*"})


@dataclass(frozen=True, slots=True)
class Address:
    """A host (IPv4, IPv6 without brackets, or name) and a port in 0..65535; port 0 asks for any free port.

    Raises `AddressError` when either part cannot be used.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise AddressError(f"port {self.port} is outside 0..65535 in address {self.host!r}:{self.port}")
        if not _is_ip(self.host) and not _HOST_NAME.fullmatch(self.host):
            raise AddressError(f"{self.host!r} is neither an IP address nor a host name")

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def is_wildcard(self) -> bool:
        """Whether binding here would listen on every interface; such an address is never advertised."""
        return self.host in _WILDCARDS or (_is_ip(self.host) and ipaddress.ip_address(self.host).is_unspecified)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A host name is one when it is `localhost`."""
        return self.host == "localhost" or (_is_ip(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int | None = None) -> Address:
    """Parse `host:port`, `[v6]:port`, and, where `default_port` is given, a bare host or bare IPv6 address.

    `str(parse_address(text))` parses back to the same value. Raises `AddressError` with what is missing.
    """
    host, port_text = _split(text.strip(), text)
    if not host:
        raise AddressError(f"address {text!r} has no host; write host:port")
    if port_text is None:
        if default_port is None:
            raise AddressError(f"address {text!r} has no port; write {_bracketed(host)}:PORT")
        return Address(host, default_port)
    if not (port_text.isascii() and port_text.isdigit()):
        raise AddressError(f"address {text!r} has port {port_text!r}, which is not a number in 0..65535")
    if len(port_text) > 5 or int(port_text) > 65535:
        raise AddressError(f"address {text!r} has port {port_text}, which is outside 0..65535")
    return Address(host, int(port_text))


def advertised(bound: Address, advertise_host: str | None) -> Address:
    """The address that peers are told for a socket bound at `bound`.

    A wildcard bind is never advertised: it needs `advertise_host`, else `AddressError` says so.
    """
    shown = Address(advertise_host, bound.port) if advertise_host else bound
    if shown.is_wildcard:
        raise AddressError(
            f"{bound} listens on every interface and cannot be advertised; set PDLINK_ADVERTISE_HOST to the "
            "address that peers reach"
        )
    return shown


def _split(text: str, original: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed:
            raise AddressError(f"address {original!r} opens a bracket that never closes; write [v6]:port")
        if not _is_ip(host) or ":" not in host:
            raise AddressError(f"address {original!r} has {host!r} in brackets, which is not an IPv6 address")
        if rest and not rest.startswith(":"):
            raise AddressError(f"address {original!r} has {rest!r} after the bracket; write [v6]:port")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        if not _is_ip(text):
            raise AddressError(f"address {original!r} is not an IPv6 address; with a port, write [v6]:port")
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
