"""Owns what GPUs `pdlink bench transfer` finds on this machine, and what joins the two that it uses."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from pdlink.errors import BackendUnavailable

ASK_TIMEOUT_S = 30.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Gpus:
    """The owner is on the first and the reader on the second, or on the same where there is one only.

    `joined_by` is "nvlink", "pcie", "gpu" (the same), or "unknown".
    """

    count: int
    joined_by: str

    @property
    def devices(self) -> tuple[int, int]:
        return 0, min(1, self.count - 1)


def find_gpus() -> Gpus:
    """Raises `BackendUnavailable` when torch finds none."""
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailable("--device cuda needs a GPU, and torch finds none here")
    count = torch.cuda.device_count()
    return Gpus(count, link_of(_ask()) if count > 1 else "gpu")


def link_of(text: str) -> str:
    """What `nvidia-smi topo -m` says of the first two GPUs."""
    for line in _COLOUR.sub("", text).splitlines():
        words = line.split()
        if words[:2] == ["GPU0", "X"] and len(words) > 2:
            return "nvlink" if words[2].startswith("NV") else "pcie"
    return "unknown"


def _ask() -> str:
    try:
        command = ["nvidia-smi", "topo", "-m"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ASK_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
