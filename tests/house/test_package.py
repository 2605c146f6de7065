"""What is built can be shipped: the wheel and the sdist are whole, and the wheel works with what it declares alone."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import processes
from tests.house.tree import REPO, ROOTS

BUILT_FROM = ["pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE", "Makefile"]
EXTRAS = {"nixl-cu12", "nixl-cu13", "mooncake", "mooncake-cpu", "sglang", "vllm", "otel", "dev"}


@dataclass(frozen=True, slots=True)
class Built:
    """A copy of the source as it was, and the wheel and the sdist made of it. The wheel is made from the sdist."""

    source: Path
    wheel: Path
    sdist: Path

    def wheel_names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("build")
    source, dist = root / "source", root / "dist"
    source.mkdir()
    for name in BUILT_FROM:
        shutil.copy(REPO / name, source / name)
    for folder in [*ROOTS, "proto", "tests/house"]:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPO / folder, source / folder, ignore=ignored)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)], cwd=root)
    return Built(source, next(dist.glob("*.whl")), next(dist.glob("*.tar.gz")))


def run(command: Sequence[str], cwd: Path) -> str:
    """Standard output of `command`, which must succeed; nothing of the calling environment decides its imports."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PDLINK_"))}
    done = processes.run(command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the wheel and what the wheel requires, and nothing else of ours."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    packages = next(home.glob("lib/python*/site-packages"))
    for name in required(built.metadata().get_all("Requires-Dist", [])):
        link(importlib.metadata.distribution(name), packages)
    # Built wheels are installed by the pip of this environment: the new one has none, which is quicker.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin" / "python")]
    run([*pip, "install", "--no-index", "--quiet", str(built.wheel)], cwd=home)
    return home / "bin"


def required(lines: Sequence[str]) -> set[str]:
    """Names of the distributions that `lines` lead to here, extras left out; versions must fit."""
    names: set[str] = set()
    waiting = [Requirement(line) for line in lines]
    while waiting:
        item = waiting.pop()
        extras = ["", *item.extras]
        if item.marker and not any(item.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        here = importlib.metadata.distribution(item.name)
        assert item.specifier.contains(here.version, prereleases=True), f"{item} is not met by {here.version}"
        if here.name not in names:
            names.add(here.name)
            waiting += [Requirement(line) for line in here.requires or []]
    return names


def link(distribution: importlib.metadata.Distribution, packages: Path) -> None:
    tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in {"..", "__pycache__"}}
    for top in tops:
        here = Path(str(distribution.locate_file(top)))
        if here.exists() and not (packages / top).exists():
            (packages / top).symlink_to(here)


def test_the_wheel_carries_every_source_file_and_no_other(built: Built) -> None:
    expected = set()
    for folder, top in ROOTS.items():
        kept = (path for path in (built.source / folder).rglob("*") if path.suffix in {".py", ".pyi", ".cu"})
        expected |= {str(top / path.relative_to(built.source / folder)) for path in kept}
    expected |= {"pdlink/py.typed", "pdlink/README.md"}
    assert len(expected) > 40
    carried = {name for name in built.wheel_names() if ".dist-info/" not in name}
    assert sorted(carried ^ expected) == []


def test_the_wheel_carries_the_licence_and_the_notice(built: Built) -> None:
    metadata = built.metadata()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("License-File", [])) == {"LICENSE", "NOTICE"}
    carried = {name.partition(".dist-info/")[2] for name in built.wheel_names()}
    assert {"licenses/LICENSE", "licenses/NOTICE"} <= carried


def test_the_wheel_states_its_python_and_its_extras(built: Built) -> None:
    metadata = built.metadata()
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) >= EXTRAS


def test_the_sdist_carries_the_protos_and_what_a_build_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    protos = {str(path.relative_to(built.source)) for path in (built.source / "proto").rglob("*.proto")}
    assert protos
    assert protos | set(BUILT_FROM) | {"proto/generate.py"} <= names
    assert [name for name in names if name.startswith("tests")] == []


def test_every_package_folder_is_listed_in_pyproject() -> None:
    listed = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [
        ".".join([top, *init.parent.relative_to(REPO / folder).parts])
        for folder, top in ROOTS.items()
        for init in (REPO / folder).rglob("__init__.py")
    ]
    assert sorted(set(listed) ^ set(found)) == [], (
        "list exactly the folders with an __init__.py under [tool.setuptools]"
    )
    folders = {path.parent for folder in ROOTS for path in (REPO / folder).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_wheel_is_what_an_installed_pdlink_imports(installed: Path, tmp_path: Path) -> None:
    code = "import pdlink, pdlink_engines; print(pdlink.__file__); print(pdlink_engines.__file__)"
    files = run([str(installed / "python"), "-c", code], cwd=tmp_path).split()
    assert len(files) == 2
    assert [file for file in files if not Path(file).is_relative_to(installed.parent)] == []


def test_what_the_wheel_requires_is_all_that_its_environment_has(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u, json; print(json.dumps([bool(u.find_spec(n)) for n in ('grpc', 'pytest')]))"
    assert json.loads(run([str(installed / "python"), "-c", code], cwd=tmp_path)) == [True, False]


def test_the_installed_command_tells_its_version(installed: Path, tmp_path: Path) -> None:
    version = re.search(r'__version__ = "(.+)"', (REPO / "pdlink" / "__init__.py").read_text())
    assert version
    assert version[1] in run([str(installed / "pdlink"), "--version"], cwd=tmp_path)


def test_the_installed_command_plans(installed: Path, tmp_path: Path) -> None:
    options = ["plan", "--model", "glm-5.2", "--cp", "4", "--tokens", "8192", "--json"]
    plan = json.loads(run([str(installed / "pdlink"), *options], cwd=tmp_path).splitlines()[-1])
    assert round(plan["unsplit_gib"], 2) == 0.77
    assert round(plan["owned_gib"], 2) == 0.20
