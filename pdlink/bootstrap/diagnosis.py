"""Owns why a bootstrap that listens does not talk to us, as far as TLS is the reason. gRPC says little of that.

It tries the handshake again with the standard library, whose errors say what is wrong. It sends no secret.
"""

from __future__ import annotations

import socket
import ssl

from pdlink.address import Address
from pdlink.bootstrap.access import Access
from pdlink.config import PREFIX
from pdlink.errors import AccessDenied

PROBE_TIMEOUT_S = 0.5


def why_no_talk(address: Address, access: Access) -> AccessDenied | None:
    """Why the server at `address` and this side do not come to talk, or None where TLS is not the reason."""
    fault = _tls_fault(address, access) if access.is_tls else _plain_fault(address)
    return AccessDenied(fault) if fault else None


def _plain_fault(address: Address) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _talk(address, context)
    except (OSError, ValueError):
        return ""
    return f"bootstrap {address} serves TLS and this side speaks plain text; set {PREFIX}TLS_CA to the file of its CA"


def _tls_fault(address: Address, access: Access) -> str:
    where, name = f"bootstrap {address}", access.settings.tls_server_name or address.host
    try:
        context = _context(access)
    except (OSError, ValueError):
        return ""  # the files were changed this moment; whoever reads them again says what is wrong
    try:
        hung_up = _talk(address, context, name)
    except ssl.SSLCertVerificationError as error:
        return f"{where} is not trusted: {_untrusted(error, name)}"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
            return (
                f"{where} speaks plain text and this side TLS; give the bootstrap {PREFIX}TLS_CERTIFICATE and "
                f"{PREFIX}TLS_KEY, or unset {PREFIX}TLS_CA here"
            )
        hung_up = reason.startswith(("TLSV1_ALERT", "SSLV3_ALERT", "TLSV13_ALERT"))
        if not hung_up:
            return f"{where} ended the TLS handshake: {reason or error}"
    except OSError:
        return ""
    if not hung_up:
        return ""
    certificate = access.settings.tls_certificate
    if certificate is None:
        wanted = f"set {PREFIX}TLS_CERTIFICATE and {PREFIX}TLS_KEY to one from the CA in its {PREFIX}TLS_CA"
        return f"{where} hangs up on a caller without a certificate; {wanted}"
    return (
        f"{where} hangs up on {PREFIX}TLS_CERTIFICATE={certificate!r}: it has expired, or is not from the CA in the "
        f"bootstrap's {PREFIX}TLS_CA; renew it with that CA"
    )


def _untrusted(error: ssl.SSLCertVerificationError, name: str) -> str:
    said = error.verify_message or str(error)
    if "expired" in said or "not yet valid" in said:
        return f"its {said[0].lower()}{said[1:]}; renew the bootstrap's {PREFIX}TLS_CERTIFICATE, or set the clock"
    if "mismatch" in said.lower() or "not valid for" in said:
        return f"its certificate is not for {name!r}; dial a name that it has, or set {PREFIX}TLS_SERVER_NAME to one"
    return f"its certificate is not from the CA in {PREFIX}TLS_CA ({said}); use the CA that signed it"


def _context(access: Access) -> ssl.SSLContext:
    settings = access.settings
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(settings.tls_ca)
    if settings.tls_certificate is not None:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password=lambda: "")
    return context


def _talk(address: Address, context: ssl.SSLContext, name: str | None = None) -> bool:
    """Shake hands, then listen for a moment; whether the server hung up.

    A server of TLS 1.3 refuses our certificate only after the handshake, and gRPC's does it without a word; one that is
    content speaks first.
    """
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((address.host, address.port), PROBE_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as talk,
    ):
        try:
            return not talk.recv(1)
        except TimeoutError:
            return False
        except (ConnectionError, ssl.SSLEOFError):
            return True
