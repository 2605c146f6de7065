"""Owns what `pdlink doctor` finds on the machine without starting anything: interpreter, packages, limits, devices and
ports. It changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.metadata
import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink import limits as open_files
from pdlink.cli.doctor_finding import Finding, error, ok, warning

if TYPE_CHECKING:
    from pdlink.address import Address
    from pdlink.config import Settings

LEAST_PYTHON = (3, 11)
SHM = Path("/dev/shm")
LITTLE_SHM = 1 << 30
LEAST_SHM = 128 << 20
FEW_FILES = 4096
INFINIBAND = Path("/sys/class/infiniband")
BOOTSTRAP_PORT = 7400


def interpreter() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    if sys.version_info < LEAST_PYTHON:
        return error("interpreter", text, "use Python 3.11 or newer")
    if sys.platform != "linux":
        return error("interpreter", text, "use Linux: pdlink needs its shared memory and pidfd")
    return ok("interpreter", text)


def packages() -> Iterator[Finding]:
    """What pdlink declares that it needs, as it is installed."""
    from packaging.requirements import Requirement

    from pdlink import __version__

    try:
        needed = [Requirement(line) for line in importlib.metadata.requires("pdlink") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield warning("pdlink", f"{__version__}, run from its source", "install it: pip install -e .")
        return
    wrong = []
    for one in needed:
        if one.marker and not one.marker.evaluate({"extra": ""}):
            continue
        version = version_of(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} {version or 'is missing'} (needs {one.specifier})")
    if wrong:
        yield error("pdlink", f"{__version__}, with {', '.join(wrong)}", "install it again: pip install pdlink")
    else:
        yield ok("pdlink", f"{__version__}, and all that it needs")


def limits(settings: Settings) -> Iterator[Finding]:
    yield shm(SHM)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {_limit(soft)} of them, which may be raised to {_limit(hard)}"
    fits = open_files.peers_within(_number(hard), open_files.num_open(), open_files.FILES_PER_LINK + 9)
    if _number(hard) < FEW_FILES:
        fix = f"raise the hard limit (ulimit -Hn, LimitNOFILE=): {fits} peers over nixl fit"
        yield warning("open files", text, fix)
    elif _number(soft) < FEW_FILES:
        fix = f"ulimit -n {_limit(hard)} before an engine starts; pdlink's own commands do that"
        yield warning("open files", text, fix)
    else:
        yield ok("open files", text)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"{_limit(soft)}{'' if soft == resource.RLIM_INFINITY else ' bytes'} may be locked"
    if soft != resource.RLIM_INFINITY and has_verbs():
        yield warning("memlock", text, "ulimit -l unlimited (LimitMEMLOCK=infinity): RDMA locks what it registers")
    else:
        yield ok("memlock", text)


def shm(path: Path) -> Finding:
    """The size of shared memory, in which pools of host memory lie."""
    try:
        found = os.statvfs(path)
    except OSError as problem:
        return error("shared memory", f"{path}: {problem.strerror}", f"mount a tmpfs at {path}")
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    text = f"{path} has {size / (1 << 30):.1f} GiB, {free / (1 << 30):.1f} GiB of it free"
    fix = f"mount -o remount,size=... {path}, or docker run --shm-size; pools of host memory lie there"
    if free < LEAST_SHM:
        return error("shared memory", text, fix)
    return warning("shared memory", text, fix) if free < LITTLE_SHM else ok("shared memory", text)


def has_verbs() -> bool:
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def verbs() -> Iterator[Finding]:
    devices = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    library = _loads("libibverbs.so.1")
    if devices and not library:
        fix = "install libibverbs1 and ibverbs-providers, without which these are not used"
        yield warning("verbs devices", ", ".join(devices), fix)
    else:
        yield ok("verbs devices", ", ".join(devices) or "none: other machines are reached over TCP")
    if not library and installed("mooncake-transfer-engine"):
        fix = "install libibverbs1: mooncake loads it whatever it moves bytes over"
        yield error("libibverbs", "libibverbs.so.1 cannot be loaded", fix)
    else:
        yield ok("libibverbs", "loads" if library else "not there, and not needed without mooncake")


def ports(settings: Settings) -> Iterator[Finding]:
    from pdlink.address import Address

    yield _port("control sockets", Address(settings.bind_host, 0), f"PDLINK_BIND_HOST={settings.bind_host}")
    told = f"port {BOOTSTRAP_PORT}, the default one of a bootstrap"
    yield _port("bootstrap port", Address(settings.bind_host, BOOTSTRAP_PORT), told)
    away = settings.advertise_host or settings.bind_host
    if Address(away, 0).is_loopback:
        yield ok("reach", f"other machines do not reach {away}; set PDLINK_BIND_HOST where they are to")
    elif settings.is_secured:
        yield ok("reach", f"{away}, with a token or TLS")
    else:
        fix = "set PDLINK_TOKEN_FILE and PDLINK_TLS_*, or keep it on a network that you trust"
        yield warning("reach", f"{away}, open to whoever reaches it", fix)


def _port(name: str, address: Address, told: str) -> Finding:
    family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
            probe.listen()
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            return ok(name, f"{told} is taken: something serves there already")
        return error(name, f"{told} cannot be bound: {problem.strerror or problem}", "set an address of this machine")
    return ok(name, f"{told} can be bound")


def version_of(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def installed(prefix: str) -> str | None:
    """The first installed distribution whose name begins so, like `nixl-cu12 1.5.1`, or None."""
    for one in importlib.metadata.distributions():
        name = (one.metadata["Name"] or "").lower()
        if name.startswith(prefix):
            return f"{name} {one.version}"
    return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}".replace(",", " ")


def _number(value: int) -> int:
    return 1 << 30 if value == resource.RLIM_INFINITY else value
