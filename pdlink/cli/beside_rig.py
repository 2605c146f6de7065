"""Owns the processes of `pdlink bench sidecar` and the measuring of one case across them. It sums nothing up.

The engine, its sidecar where it has one, the bootstrap and the decode side are children; this process computes nothing.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

from pdlink.cli import mps
from pdlink.cli.exits import WrongRun
from pdlink.testing.child import Child

START_TIMEOUT_S = 120.0
"""Loading torch, making pools, and compiling kernels, in several processes at once."""
SLACK_S = 60.0
NUM_SLOTS, SLOT_BYTES = 4, 32 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine computes and moves: a step of so many matrix products of `size`, and requests of pages."""

    on_gpu: bool
    num_products: int
    size: int
    num_layers: int
    num_pages: int
    reader_device: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps in ms, alone and while requests are packed and pulled; bytes of the device that the link took, staging
    memory apart; requests a reader has had, and their bytes per second."""

    alone_ms: list[float]
    beside_ms: list[float]
    link_bytes: int
    num_requests: int
    bytes_per_s: float
    ways: tuple[str, ...]


def measure(load: Load, seconds: float, *, beside: bool, with_mps: bool) -> Measured:
    """One case: `beside` a sidecar or in process, over slots of staging memory. Raises `WrongRun` for wrong bytes, and
    `BackendUnavailable` where MPS is asked for and cannot be had."""
    environment = {
        "PDLINK_BACKENDS": "ipc",
        "PDLINK_WAY": "staged",
        "PDLINK_STAGING_SLOTS": str(NUM_SLOTS),
        "PDLINK_STAGING_SLOT_BYTES": str(SLOT_BYTES),
        "PDLINK_STAGING_DEVICE_SLOT_BYTES": str(SLOT_BYTES),
    }
    with ExitStack() as stack:
        if with_mps:
            environment |= stack.enter_context(mps.running())

        def start(name: str, program: str, arguments: list[str]) -> Child:
            return stack.enter_context(Child(name, f"pdlink.cli.{program}", arguments, env=environment))

        bootstrap = start("the bootstrap service", "control_bootstrap", []).hear(START_TIMEOUT_S)
        path = ""
        if beside:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdlink-"))
            path = f"{folder}/sidecar.sock"
            start("the sidecar", "control_sidecar", [path]).hear(START_TIMEOUT_S)
        shape = {"on_gpu": load.on_gpu, "num_layers": load.num_layers, "num_pages": load.num_pages}
        shape |= {"bootstrap": bootstrap}
        engine = start("the engine", "beside_engine", [])
        engine.say({**shape, "sidecar": path, "size": load.size, "num_products": load.num_products})
        told = engine.hear(START_TIMEOUT_S)
        alone = _run(engine, seconds, serves=False)
        reader = start("the decode side", "beside_reader", [])
        reader.say({**shape, "device": load.reader_device})
        reader.hear(START_TIMEOUT_S)
        _run(engine, min(2.0, seconds), serves=False)
        busy = _run(engine, seconds, serves=True)
        reader.say("stop")
        came = reader.hear(SLACK_S)
    if came["wrong"]:
        raise WrongRun(f"a request was a success, but {came['wrong']} is not what was published")
    staging = NUM_SLOTS * SLOT_BYTES if load.on_gpu else 0
    figures = (int(came["num_requests"]), float(came["bytes_per_s"]), tuple(came["ways"]))
    return Measured(alone, busy, max(0, int(told["link_bytes"]) - staging), *figures)


def _run(engine: Child, seconds: float, *, serves: bool) -> list[float]:
    answer = engine.ask(seconds + SLACK_S, seconds=seconds, serves=serves)
    return [float(one) for one in answer["taken_ms"]]
