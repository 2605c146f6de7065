"""Owns NVIDIA's MPS daemon for one measurement: started with folders of its own, so that no other process of the
machine comes to it, and ended with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pdlink.errors import BackendUnavailable

CONTROL = "nvidia-cuda-mps-control"
TIMEOUT_S = 20.0


def why_not() -> str:
    """What keeps MPS from being used here, or nothing."""
    return "" if shutil.which(CONTROL) else f"{CONTROL} is not installed here"


@contextmanager
def running() -> Iterator[Mapping[str, str]]:
    """The environment in which processes come to the daemon, within. Raises `BackendUnavailable`."""
    if reason := why_not():
        raise BackendUnavailable(reason)
    with tempfile.TemporaryDirectory(prefix="pdlink-mps-") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        whole = {**os.environ, **environment}
        _ask(["-d"], whole)
        try:
            yield environment
        finally:
            _ask([], whole, "quit\n")


def _ask(arguments: list[str], environment: Mapping[str, str], say: str = "") -> None:
    command = [CONTROL, *arguments]
    pipe, errors = subprocess.DEVNULL, subprocess.STDOUT
    try:
        done = subprocess.run(
            command, env=environment, input=say, stdout=pipe, stderr=errors, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{CONTROL} does not answer: {error}") from error
    if done.returncode:
        raise BackendUnavailable(f"{' '.join(command)} ended with code {done.returncode}")
