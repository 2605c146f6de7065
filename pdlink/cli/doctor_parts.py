"""Owns what `pdlink doctor` finds by starting processes: torch and its devices, a transfer over each transport, and the
hooks in engines. Whatever crashes there is a finding here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.cli.doctor_finding import Finding, error, ok, warning
from pdlink.cli.doctor_machine import installed, version_of
from pdlink.errors import PdlinkError

if TYPE_CHECKING:
    from pdlink.config import Settings

TRANSPORTS = ("ipc", "nixl", "mooncake")
PACKAGES = {"nixl": "nixl-cu", "mooncake": "mooncake-transfer-engine"}
EXTRAS = {"nixl": "pdlink[nixl-cu12] or pdlink[nixl-cu13]", "mooncake": "pdlink[mooncake] or pdlink[mooncake-cpu]"}
CHILD_TIMEOUT_S = 180.0
UCX_SETTINGS = "UCX_"


def settings(config: str | None, assigned: Sequence[str] | None) -> tuple[Settings, Finding]:
    """The settings as they are; the defaults where they cannot be used."""
    from pdlink.cli.settings import trace
    from pdlink.config import Origin, Settings

    try:
        loaded = trace(config, assigned)
    except PdlinkError as problem:
        return Settings(), error("settings", str(problem), "correct it; `pdlink config show` lists all of them")
    changed = [name for name, source in loaded.sources.items() if source.origin is not Origin.DEFAULT]
    return loaded.settings, ok("settings", f"set are {', '.join(changed)}" if changed else "all are the defaults")


def torch() -> Iterator[Finding]:
    said = _child("torch", [sys.executable, "-m", "pdlink.cli.doctor_torch"])
    if isinstance(said, Finding):
        yield said
        return
    yield ok("torch", f"{said['torch']}, built for {said['built_for']}")
    devices = said["devices"]
    if not devices:
        yield ok("CUDA", f"no device ({said['why_none']}): pages lie in host memory")
        return
    yield ok("CUDA", f"{len(devices)} devices: {', '.join(devices)}; driver for CUDA {said['driver']}")
    if said["bindings"]:
        yield ok("CUDA bindings", said["bindings"])
    else:
        fix = "pip install 'pdlink[cuda13]' (or cuda12): pages on devices need them"
        yield warning("CUDA bindings", "cuda-bindings is not installed", fix)
    if said["no_peer_access"]:
        fix = "see `nvidia-smi topo -p2p r`; the peer reader needs it, the broadcast reader does not"
        yield warning("peer access", f"missing between devices {', '.join(said['no_peer_access'])}", fix)
    else:
        yield ok("peer access", "between all devices" if len(devices) > 1 else "one device only")
    yield ok("NCCL", said["nccl"]) if said["nccl"] else warning("NCCL", "not there", "use a torch with NCCL")
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        fix = "unset it for engines whose pools pdlink reads: that memory cannot be shared"
        yield warning("allocator", "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True", fix)


def transport(name: str) -> Finding:
    """Whether a transfer over loopback works."""
    version = installed(PACKAGES[name]) if name in PACKAGES else "part of pdlink"
    if version is None:
        return ok(name, f"not installed (pip install '{EXTRAS[name]}')")
    chosen = [f"{key}={value}" for key, value in os.environ.items() if name == "nixl" and key.startswith(UCX_SETTINGS)]
    told = f"{version}{_ucx() if name == 'nixl' else ''}{'; ' + ', '.join(chosen) if chosen else ''}"
    said = _child(name, [sys.executable, "-m", "pdlink.cli.doctor_loopback", name])
    if isinstance(said, Finding):
        return error(name, f"{told}: {said.text}", said.fix)
    if said["ok"]:
        return ok(name, f"{told}: {said['num_bytes']:,} bytes over loopback in {said['took_s'] * 1e3:.0f} ms")
    text = said.get("error") or f"layers {said['wrong_layers']} arrived wrong"
    return error(name, f"{told}: {text}", f"leave it out of PDLINK_BACKENDS, or install {EXTRAS.get(name, 'it')} again")


def engines() -> Iterator[Finding]:
    """Whether pdlink's hooks took in the engines that are here."""
    version = version_of("sglang")
    if version is None:
        yield ok("sglang", "not installed")
    else:
        said = _child("sglang", [sys.executable, "-m", "pdlink.cli.doctor_sglang"])
        if isinstance(said, Finding):
            yield error("sglang", f"{version}: {said.text}", said.fix)
        elif said["error"]:
            fix = "install the version that pdlink names, or another pdlink"
            yield error("sglang", f"{version}: the hooks do not take: {said['error']}", fix)
        else:
            yield ok(
                "sglang", f"{version}: the hooks took; choose it as --disaggregation-transfer-backend {said['name']}"
            )
    version = version_of("vllm")
    if version is None:
        yield ok("vllm", "not installed")
    elif importlib.util.find_spec("pdlink_engines.vllm.connector") is None:
        yield warning("vllm", f"{version}: this pdlink has no connector for it", "use sglang, or the library itself")
    else:
        yield ok("vllm", f"{version}: pdlink has a connector for it")


def _ucx() -> str:
    """Which UCX the nixl wheels bring."""
    for package in ("nixl_cu12", "nixl_cu13"):
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec else []
        for folder in places:
            near = Path(folder).parent
            if found := sorted(near.glob(f".{package}*/libucp*.so*")) or sorted(near.glob(f"{package}*.libs/libucp*")):
                return f", with {found[0].name}"
    return ""


def _child(name: str, command: Sequence[str]) -> dict[str, Any] | Finding:
    """What a process of ours prints as its last line, or how it ended instead."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PDLINK_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return error(name, f"nothing came of it for {CHILD_TIMEOUT_S:g} s", f"run it by itself: {' '.join(command)}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and last.startswith("{"):
        said: dict[str, Any] = json.loads(last)
        return said
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    why = (done.stderr.strip().splitlines() or [""])[-1][:300]
    return error(name, f"its process ended with {how}: {why}", f"run it by itself: {' '.join(command)}")
