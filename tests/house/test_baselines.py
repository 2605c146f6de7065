"""The baselines of `pdlink bench transfer` know nothing of pdlink: neither by import nor by loading its files."""

from __future__ import annotations

import ast

import pytest

from tests.house.tree import Module, imports, modules

MAY_LOAD = {"transfer_bytes"}


def is_baseline(module: Module) -> bool:
    last = module.name.rpartition(".")[2]
    return module.name.startswith("pdlink.cli.") and (
        last in MAY_LOAD or (last.startswith("raw_") and last not in ("raw_rig", "raw_many"))
    )


def ties(module: Module) -> list[str]:
    """Every import of pdlink, and every neighbour file loaded by name that is no part of the baselines."""
    found = [
        f"line {line}: {name}" for line, name in imports(module) if name.split(".")[0] in {"pdlink", "pdlink_engines"}
    ]
    for node in ast.walk(module.parse()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load":
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value not in MAY_LOAD:
                found.append(f"line {node.lineno}: loads {name.value}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "from pdlink.errors import PdlinkError",
        "def late():\n    import pdlink",
        "from . import plan",
        "import importlib\nimportlib.import_module('pdlink.backends.nixl')",
        "load('transfer_memory')",
    ],
)
def test_a_tie_to_pdlink_is_noticed(source: str) -> None:
    assert len(ties(Module("pdlink.cli.raw_sample", source))) == 1


def test_the_baselines_have_no_tie_to_pdlink() -> None:
    baselines = [module for module in modules() if is_baseline(module)]
    assert len(baselines) == 6
    assert {module.name: ties(module) for module in baselines if ties(module)} == {}
