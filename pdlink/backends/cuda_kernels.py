"""Owns the compiled form of kernels for a device: those of `gather.cu`, and others by name. It launches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from pdlink.backends.cuda_driver import INSTALL, architecture, call, on_device
from pdlink.errors import BackendUnavailable

CHUNK_BYTES = 32 << 10
NUM_THREADS = 512
"""Measured on two H200 over NVLink, 512 scattered pages of 41,984 B x 39 layers: 370 GB/s with one block on each
multiprocessor, where a plain copy of one range gets 391; 8 KiB and 256 threads get 355."""

WORD_BYTES = (16, 4, 1)
"""The kernels, widest first; each needs everything to be a multiple of its word."""


@cache
def load_gather(device: int) -> dict[int, Any]:
    """Word size in bytes -> kernel, compiled on first use (about 0.2 s). Raises `BackendUnavailable`."""
    found = load_kernels(
        device, "gather.cu", {f"gather_{word}" for word in WORD_BYTES}, CHUNK=CHUNK_BYTES, THREADS=NUM_THREADS
    )
    return {word: found[f"gather_{word}"] for word in WORD_BYTES}


def load_kernels(device: int, file: str, names: Iterable[str], **constants: int) -> dict[str, Any]:
    """Kernels of a source file in this folder, by name, compiled with `constants`. Raises `BackendUnavailable`."""
    image = _compile(file, architecture(device), tuple(sorted(constants.items())))
    with on_device(device):
        module = call("cuModuleLoadData", image)
        return {name: call("cuModuleGetFunction", module, name.encode()) for name in names}


@cache
def _compile(file: str, arch: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    try:
        from cuda.bindings import nvrtc

        source = files("pdlink.backends").joinpath(file).read_bytes()
        program = _made(nvrtc, nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []), "nvrtcCreateProgram")
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(f"device memory needs NVIDIA's run-time compiler ({error}); {INSTALL}") from error
    options = [f"--gpu-architecture={arch}", *(f"-D{name}={value}" for name, value in constants)]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options])
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _made(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BackendUnavailable(f"{file} does not compile for {arch}: {log.decode(errors='replace').strip()}")
    image: bytes = b" " * int(_made(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
    _made(nvrtc, nvrtc.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return image


def _made(nvrtc: Any, answer: tuple[Any, ...], function: str) -> Any:
    code, *results = answer
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BackendUnavailable(f"{function} failed: {code}")
    return results[0] if results else None
