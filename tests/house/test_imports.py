"""Which module may import which: imports point left only, pure code stays pure, `import pdlink` stays light."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import processes
from tests.house.tree import REPO, Module, imports, modules

# Left to right; a unit may import itself and any unit of a layer to its left, not its neighbours.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("base", "v1"),
    ("layout",),
    ("transfer",),
    ("backends",),
    ("memory",),
    ("bootstrap",),
    ("control",),
    ("prefill", "decode"),
    ("observability", "testing"),
    ("runtime",),
    ("sidecar",),
    ("engines.reference", "engines.sglang", "engines.vllm"),
    ("cli",),
)
LAYER_OF = {unit: index for index, layer in enumerate(LAYERS) for unit in layer}
OF_BASE = ("errors", "config", "config_file", "events", "address", "threads", "health", "limits", "secret")
OF_BASE += ("sparse_log", "denials")
BASE = {"pdlink", *(f"pdlink.{one}" for one in OF_BASE)}
HEAVY = ("torch", "grpc", "numpy", "nixl", "mooncake", "google.protobuf", "zmq", "pydantic", "transformers", "rich")
# What the pure packages must do without: sockets, clocks, threads, processes, devices, wire formats.
IMPURE = {
    *("socket", "select", "time", "threading", "asyncio", "subprocess", "multiprocessing", "concurrent", "queue"),
    *("torch", "grpc", "zmq", "google", "mmap", "random", "uuid"),
}


def unit_of(name: str) -> str:
    """The unit that a dotted name of ours belongs to. Raises `KeyError` for one that is in no layer."""
    parts = name.split(".")
    if parts[0] == "pdlink_engines":
        unit = f"engines.{parts[1]}" if len(parts) > 1 else "engines"
        return unit if unit in LAYER_OF else "engines"
    if ".".join(parts[:2]) in BASE or (len(parts) == 2 and parts[1] == "__version__"):
        return "base"
    if parts[1] == "__main__":
        return "cli"
    if parts[1] not in LAYER_OF:
        raise KeyError(f"{name} is in no layer: add pdlink.{parts[1]} to LAYERS where it belongs")
    return parts[1]


def wrong_direction(module: Module) -> list[str]:
    """A sentence for each import of `module` that does not point left."""
    mine = unit_of(module.name)
    wrong = []
    for line, target in imports(module):
        if target.split(".")[0] not in {"pdlink", "pdlink_engines"}:
            continue
        theirs = unit_of(target)
        # The bare engines package is the engines' own common ground: it must stay free of any engine.
        rank = {"engines": LAYER_OF["engines.reference"] - 0.5}
        here, there = rank.get(mine, LAYER_OF.get(mine)), rank.get(theirs, LAYER_OF.get(theirs))
        if mine != theirs and there >= here:
            wrong.append(f"{module.name}:{line} imports {target}, but {theirs} is not left of {mine}")
    return wrong


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("pdlink.layout.regions", "from pdlink.transfer.planner import plan"),
        ("pdlink.layout.regions", "from pdlink import transfer"),
        ("pdlink.layout.regions", "from ..transfer import planner"),
        ("pdlink.layout.regions", "def late():\n    import pdlink.cli.main"),
        ("pdlink.layout.regions", "import importlib\nimportlib.import_module('pdlink.memory')"),
        ("pdlink.decode.receiver", "from pdlink.prefill import sender"),
        ("pdlink.prefill.sender", "from pdlink.decode import merge"),
        ("pdlink.errors", "from pdlink.v1 import common_pb2"),
        ("pdlink.runtime.launch", "import pdlink_engines.reference"),
        ("pdlink_engines.reference.model", "from pdlink_engines.sglang import hooks"),
        ("pdlink_engines.vllm.hooks", "from pdlink.cli import main"),
    ],
)
def test_an_import_to_the_right_or_sideways_is_noticed(name: str, source: str) -> None:
    assert len(wrong_direction(Module(name, source))) == 1


def test_an_import_to_the_left_is_allowed() -> None:
    source = (
        "from pdlink.layout import regions\nfrom pdlink.errors import PlanError\nfrom . import states\nimport numpy"
    )
    assert wrong_direction(Module("pdlink.transfer.planner", source)) == []
    assert wrong_direction(Module("pdlink.cli.demo", "from pdlink_engines.reference import demo")) == []


def test_a_package_that_is_in_no_layer_is_noticed() -> None:
    with pytest.raises(KeyError, match=r"add pdlink\.misc to LAYERS"):
        wrong_direction(Module("pdlink.misc.things", "import pdlink"))


def test_imports_point_left_only() -> None:
    assert len(modules()) > 20
    assert [line for module in modules() for line in wrong_direction(module)] == []


def test_layout_and_transfer_run_without_sockets_clocks_threads_or_devices() -> None:
    pure = [module for module in modules() if module.name.startswith(("pdlink.layout", "pdlink.transfer"))]
    assert len(pure) > 5
    impure = [
        f"{module.name}:{line} imports {target}"
        for module in pure
        for line, target in imports(module)
        if target.split(".")[0] in IMPURE
    ]
    assert impure == []


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    declared = {canonicalize_name(Requirement(line).name) for line in [*project["dependencies"], *extras]}
    # Import names of transports and engines that are installed on few machines, and so can't be looked up here.
    known = {"nixl": "nixl-cu12", "nixl_cu12": "nixl-cu12", "nixl_cu13": "nixl-cu13"}
    known |= {"cuda": "cuda-bindings", "mooncake": "mooncake-transfer-engine", "sglang": "sglang", "vllm": "vllm"}
    providers = importlib.metadata.packages_distributions()
    known["pydantic_core"] = "pydantic"  # which pins it, and whose hooks take and return its values
    # A namespace that several distributions share; ours is protobuf's part of it.
    providers["google"] = ["protobuf"]
    undeclared = []
    for module in modules():
        for line, target in imports(module):
            top = target.split(".")[0]
            if top in sys.stdlib_module_names or top in {"pdlink", "pdlink_engines"}:
                continue
            names = [known[top]] if top in known else providers.get(top, [])
            if not declared & {canonicalize_name(name) for name in names}:
                undeclared.append(f"{module.name}:{line} imports {top} (of {names or 'nothing installed'})")
    assert undeclared == []


def loaded_by(statement: str, cwd: Path) -> list[str]:
    """The modules that a fresh interpreter loads for `statement`, from the interpreter's own log."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    done = processes.run(command, cwd=cwd, check=True)
    return re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", done.stderr, flags=re.MULTILINE)


def heavy(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(HEAVY) and any(f"{name}.".startswith(f"{h}.") for h in HEAVY)]


def test_import_pdlink_loads_nothing_heavy(tmp_path: Path) -> None:
    names = loaded_by("import pdlink", tmp_path)
    assert "pdlink" in names
    assert heavy(names) == []


def test_a_heavy_import_would_be_noticed(tmp_path: Path) -> None:
    assert "numpy" in heavy(loaded_by("import numpy", tmp_path))


SIDE_EFFECTS = """
import importlib, json, logging, os, pkgutil, signal, sys, threading
import grpc, numpy, psutil, pydantic, rich, torch, typer, zmq  # their own effects are not ours
import grpc_health.v1.health, grpc_reflection.v1alpha.reflection, rich.console, rich.logging, torch.distributed

def state():
    me = psutil.Process()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": [child.pid for child in me.children()],
        "sockets": sorted(str(item.laddr) for item in me.net_connections()),
        "environment": sorted(os.environ.items()),
        "log handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "signal handlers": [repr(signal.getsignal(item)) for item in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "folder": os.getcwd(),
    }

import pdlink
before = state()
names = [item.name for item in pkgutil.walk_packages(pdlink.__path__, "pdlink.") if not item.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
after = state()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps({"changed": changed, "modules": len(names)}))
"""


def test_importing_any_module_has_no_side_effect(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIDE_EFFECTS]
    done = processes.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('{"changed": {}, "modules": '), done.stdout
