"""Owns what `pdlink doctor` finds of the things that settings name: files of secrets, the sidecar's socket, the address
of probes. Whether a value can be used at all is the settings' own. It changes nothing, and binds for a moment only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.cli.doctor_finding import Finding, error, ok, warning
from pdlink.errors import PdlinkError

if TYPE_CHECKING:
    from pdlink.config import Settings


def named(settings: Settings) -> Iterator[Finding]:
    """A line for each that is set."""
    if settings.is_secured:
        yield credentials(settings)
    if settings.sidecar_socket:
        yield sidecar_socket(Path(settings.sidecar_socket))
    if settings.http_bind:
        yield probes(settings.http_bind)


def credentials(settings: Settings) -> Finding:
    """Whether certificates, key and token are there and fit each other."""
    from pdlink.bootstrap.tls import OTHERS_READ, SECRET_FILES, read_client, read_server
    from pdlink.bootstrap.token import read_tokens

    # A bootstrap that asks for no certificates has no CA; every other process has.
    read = read_server if settings.tls_certificate and not settings.tls_ca else read_client
    try:
        is_tls = read(settings) is not None
        has_token = bool(read_tokens(settings))
    except PdlinkError as problem:
        return error("credentials", str(problem), "correct that file, or the setting that names it")
    paths = [path for path in (getattr(settings, name) for name in SECRET_FILES) if path]
    if open_to_all := [path for path in paths if stat.S_IMODE(os.stat(path).st_mode) & OTHERS_READ]:
        return warning("credentials", f"others may read {', '.join(open_to_all)}", f"chmod 600 {' '.join(open_to_all)}")
    return ok("credentials", f"{'TLS' if is_tls else 'no TLS'}, {'a token' if has_token else 'no token'}")


def sidecar_socket(path: Path) -> Finding:
    """Whether a sidecar of this user may serve at `path`, or does."""
    from pdlink.sidecar.sockets import check_path

    try:
        check_path(path)
    except PdlinkError as problem:
        return error("sidecar socket", str(problem), "name another path: PDLINK_SIDECAR_SOCKET, or --socket")
    return ok(
        "sidecar socket", f"{path}: something is there" if path.exists() else f"{path}: a sidecar may serve there"
    )


def probes(http_bind: str) -> Finding:
    """Whether an address of `http_bind` is free. One that is taken may be taken by who has it to be."""
    from pdlink.observability.http import try_bind

    try:
        return ok("probes", f"{try_bind(http_bind)} can be bound")
    except PdlinkError as problem:
        taken = isinstance(problem.__cause__, OSError) and problem.__cause__.errno == errno.EADDRINUSE
        fix = "name another address or a range, host:first-last: PDLINK_HTTP_BIND, or --http-bind"
        if taken:
            return warning("probes", f"PDLINK_HTTP_BIND={http_bind} is taken: something serves there already", fix)
        return error("probes", str(problem), fix)
