"""Owns the TLS files of a process: read and checked, by name of their setting. It opens no connection.

What is wrong with a file is found before it is used, by the standard library's TLS: gRPC would only say it later, of
each connection, in words that name neither the file nor the fault.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdlink.config import PREFIX, Settings
from pdlink.errors import ConfigError
from pdlink.secret import Secret
from pdlink.sparse_log import SparseLog

log = logging.getLogger("pdlink.bootstrap")
MAX_FILE_BYTES = 1 << 20
SECRET_FILES = ("tls_key", "token_file")
OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
_sparse = SparseLog(log)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Contents of the files, as PEM. `key` belongs to `certificate`; both or neither are there."""

    certificate: bytes | None = None
    key: Secret | None = None
    ca: bytes | None = None

    @property
    def pair(self) -> tuple[bytes, bytes] | None:
        """Key and certificate, as gRPC takes them."""
        if self.certificate is None or self.key is None:
            return None
        return self.key.reveal(), self.certificate


def read_client(settings: Settings) -> TlsFiles | None:
    """What a caller needs, or None where it speaks plain text. Raises `ConfigError` naming setting, path and fault."""
    files = _read(settings, serves=False)
    if files and files.ca is None:
        raise ConfigError(
            f"{PREFIX}TLS_CERTIFICATE is set without {PREFIX}TLS_CA: a caller needs the CA to know the bootstrap by"
        )
    return files


def read_server(settings: Settings) -> TlsFiles | None:
    """What a bootstrap needs, or None where it serves plain text. Raises `ConfigError` naming setting, path and fault.

    `ca` is what certificates of callers must be from; None where none are asked for.
    """
    files = _read(settings, serves=True)
    if settings.tls_client_auth == "require" and (files is None or files.ca is None):
        raise ConfigError(f"{PREFIX}TLS_CLIENT_AUTH=require needs {PREFIX}TLS_CA, the CA of the callers' certificates")
    if files and files.certificate is None:
        raise ConfigError(
            f"{PREFIX}TLS_CA is set without {PREFIX}TLS_CERTIFICATE and {PREFIX}TLS_KEY: a bootstrap would serve plain "
            "text; give it a certificate and its key"
        )
    return files


def _read(settings: Settings, *, serves: bool) -> TlsFiles | None:
    certificate, key, ca = settings.tls_certificate, settings.tls_key, settings.tls_ca
    for setting, path in (("tls_certificate", certificate), ("tls_key", key), ("tls_ca", ca)):
        _check_given(setting, path)
    if (certificate is None) != (key is None):
        there, lacking = ("KEY", "CERTIFICATE") if certificate is None else ("CERTIFICATE", "KEY")
        raise ConfigError(f"{PREFIX}TLS_{there} is set without {PREFIX}TLS_{lacking}; set both or neither")
    if certificate is None and ca is None:
        return None
    files = TlsFiles(
        read_file("tls_certificate", certificate) if certificate is not None else None,
        Secret(read_file("tls_key", key)) if key is not None else None,
        read_file("tls_ca", ca) if ca is not None else None,
    )
    if ca is not None:
        _check_ca(ca)
    if certificate is not None and key is not None:
        _check_pair(certificate, key, serves=serves)
    return files


def read_file(setting: str, path: str) -> bytes:
    """The bytes of a setting's file. Raises `ConfigError` with the operating system's reason, never with content.

    A file of secrets that others may read is a warning.
    """
    _check_given(setting, path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise unusable(setting, path, f"cannot be read ({reason})") from error
    if len(data) > MAX_FILE_BYTES:
        raise unusable(setting, path, f"is larger than {MAX_FILE_BYTES} bytes")
    if setting in SECRET_FILES and mode & OTHERS_READ:
        text = "%s=%r may be read by others than its owner (mode %04o); chmod 600 it"
        _sparse.warn((path, mode), text, PREFIX + setting.upper(), path, mode)
    return data


def _check_given(setting: str, path: str | None) -> None:
    if path == "":
        raise ConfigError(f"{PREFIX}{setting.upper()} is empty; unset it, or name a file")


def unusable(setting: str, path: str, why: str) -> ConfigError:
    return ConfigError(f"{PREFIX}{setting.upper()}={path!r} {why}")


def _check_ca(path: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise unusable("tls_ca", path, "holds no certificate in PEM form") from error
    found = context.get_ca_certs()
    if not found:
        raise unusable("tls_ca", path, "holds no certificate of a CA")
    if all(_is_over(one) for one in found):
        raise unusable("tls_ca", path, f"expired at {found[0]['notAfter']}; renew it")


def _is_over(certificate: Mapping[str, object]) -> bool:
    return ssl.cert_time_to_seconds(str(certificate["notAfter"])) < time.time()


def _check_pair(certificate: str, key: str, *, serves: bool) -> None:
    """Load both, then shake hands with ourselves: what a peer would refuse of the certificate shows here.

    It vouches for itself there, since its CA is for the peer to judge: what is looked at are its dates and its purpose.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    judge, judged = (client, server) if serves else (server, client)
    client.verify_mode = server.verify_mode = ssl.CERT_NONE
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        judge.load_verify_locations(certificate)
    except (ssl.SSLError, OSError) as error:
        raise unusable("tls_certificate", certificate, "holds no certificate in PEM form") from error
    try:
        for one in {server, judged}:
            one.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or ""
        if reason == "KEY_VALUES_MISMATCH":
            why = f"is not the key of {PREFIX}TLS_CERTIFICATE={certificate!r}"
        else:
            why = "holds no private key in PEM form that can be read without a password"
        raise unusable("tls_key", key, why) from None  # the cause might quote what it has read
    fault = _shake_hands(server, client)
    if fault:
        why = f"would be refused by every peer: {fault}; renew it, or set the clock"
        raise unusable("tls_certificate", certificate, why)


def _no_password() -> str:
    return ""


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """What the one that looks has against the other's certificate, or nothing."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    steps: list[Callable[[], None]] = [
        client.wrap_bio(down, up).do_handshake,
        server.wrap_bio(up, down, server_side=True).do_handshake,
    ]
    while steps:
        step = steps.pop(0)
        try:
            step()
        except ssl.SSLWantReadError:
            steps.append(step)
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError as error:
            return str(error.reason or error)
    return ""
