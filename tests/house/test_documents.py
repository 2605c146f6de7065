"""The maps and links in the documents name what is there, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.tree import GENERATED, REPO, source_files

MAP = REPO / "pdlink" / "README.md"
# One line a file: a list item or a table row that begins with the path in backticks and then says something.
ENTRY = re.compile(r"^\s*(?:[-*]|\|)\s*`(?P<path>[\w/]+\.py)`\s*(?P<words>.*)$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
SKIPPED = {".venv", ".git", ".cache", "build", "dist", "node_modules"}


def entries(text: str) -> dict[str, list[str]]:
    """Path -> what each of its lines says."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := ENTRY.match(line):
            words = " ".join(re.findall(r"[A-Za-z]+", match["words"]))
            found.setdefault(match["path"], []).append(words)
    return found


def faults(text: str, files: set[str]) -> list[str]:
    listed = entries(text)
    missing = [f"{path}: no line" for path in sorted(files - set(listed))]
    stale = [f"{path}: no such file" for path in sorted(set(listed) - files)]
    twice = [f"{path}: {len(lines)} lines" for path, lines in sorted(listed.items()) if len(lines) > 1]
    silent = [f"{path}: says nothing" for path, lines in sorted(listed.items()) if "" in lines]
    return missing + stale + twice + silent


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "a/b.py: no line"),
        ("see `a/b.py` for more", "a/b.py: no line"),
        ("- `a/b.py`: owns b\n- `a/c.py`: owns c", "a/c.py: no such file"),
        ("- `a/b.py`: owns b\n| `a/b.py` | owns b |", "a/b.py: 2 lines"),
        ("- `a/b.py`", "a/b.py: says nothing"),
        ("| `a/b.py` | |", "a/b.py: says nothing"),
    ],
)
def test_a_fault_in_a_map_is_noticed(text: str, fault: str) -> None:
    assert faults(text, {"a/b.py"}) == [fault]


def test_both_forms_of_a_map_line_are_read() -> None:
    assert faults("- `a/b.py`: owns b\n  * `c.py` owns c\n| `d.py` | owns d |", {"a/b.py", "c.py", "d.py"}) == []


def test_the_map_of_pdlink_has_one_line_for_every_file() -> None:
    assert MAP.is_file(), f"{MAP.relative_to(REPO)} is missing"
    files = {str(path.relative_to(MAP.parent)) for path in source_files(MAP.parent) if path.name != "__init__.py"}
    assert faults(MAP.read_text(encoding="utf-8"), files) == []


def test_the_map_of_pdlink_names_every_package() -> None:
    assert MAP.is_file(), f"{MAP.relative_to(REPO)} is missing"
    text = MAP.read_text(encoding="utf-8")
    folders = sorted(path.parent.relative_to(MAP.parent) for path in MAP.parent.rglob("__init__.py"))
    assert GENERATED.relative_to(MAP.parent) in folders
    assert [f"{folder}/" for folder in folders if folder.parts and f"`{folder}/`" not in text] == []


def documents() -> list[Path]:
    found = (path for path in REPO.rglob("*.md") if not SKIPPED & set(path.relative_to(REPO).parts))
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(REPO).parts))


def dead_links(document: Path) -> list[str]:
    targets = [match["target"] for match in LINK.finditer(document.read_text(encoding="utf-8"))]
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    return [target for target in local if target and not (document.parent / target).exists()]


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("[here](a.md) [there](b.md#x) [away](https://example.org/) [up](#top)")
    assert dead_links(document) == ["b.md"]


def test_no_document_has_a_dead_link() -> None:
    assert REPO / "README.md" in documents()
    assert {str(path.relative_to(REPO)): dead_links(path) for path in documents() if dead_links(path)} == {}
