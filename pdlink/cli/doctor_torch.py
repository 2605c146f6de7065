"""Owns what torch says of itself and of the devices here, in a process of its own. Prints one JSON object."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json


def describe() -> dict[str, object]:
    import torch

    cuda = torch.cuda.is_available()
    num_devices = torch.cuda.device_count() if cuda else 0
    pairs = itertools.permutations(range(num_devices), 2)
    missing = [f"{a} and {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    bindings = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        bindings = f"cuda-bindings {importlib.metadata.version('cuda-bindings')}"
    nccl = ""
    if cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return {
        "torch": torch.__version__,
        "built_for": built_for,
        "devices": [torch.cuda.get_device_name(index) for index in range(num_devices)],
        "why_none": "torch is built for CPU" if built_for == "CPU" else "the driver shows none",
        "driver": _driver(),
        "bindings": bindings,
        "no_peer_access": missing,
        "nccl": nccl,
    }


def _driver() -> str:
    """The newest CUDA that the driver serves, as 13.0."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "?"
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


if __name__ == "__main__":
    print(json.dumps(describe()), flush=True)
