"""Owns how the house tests see the source: its files, their module names and what they import. It judges nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
# Folder in the checkout -> import name.
ROOTS = {"pdlink": "pdlink", "engines": "pdlink_engines"}
GENERATED = REPO / "pdlink" / "v1"


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its dotted name (a package's `__init__` has the package's name) and its text."""

    name: str
    source: str
    is_package: bool = False

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    def parse(self) -> ast.Module:
        return ast.parse(self.source)


def source_files(root: Path) -> list[Path]:
    """Hand-written `.py` files under `root`, sorted."""
    return sorted(path for path in root.rglob("*.py") if not path.is_relative_to(GENERATED))


@cache
def modules() -> tuple[Module, ...]:
    """Every hand-written module of `pdlink` and `pdlink_engines`."""
    found = []
    for folder, top in ROOTS.items():
        for path in source_files(REPO / folder):
            parts = [top, *path.relative_to(REPO / folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that `module` imports, wherever in the file, lazily or for types only.

    `from a import b` yields `a.b`, which may name an attribute: what counts for a rule is the beginning. A constant
    passed to `import_module` counts too.
    """
    for node in ast.walk(module.parse()):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value


def _origin(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def _called(node: ast.Call) -> str:
    """The last name of what is called: `bind` of `socket.bind(...)`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
