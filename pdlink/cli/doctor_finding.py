"""Owns one finding of `pdlink doctor`: what was looked at, how it is, and what to do. It looks at nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. Whatever is not well has a fix; raises `ValueError` otherwise, which is a bug of ours."""

    name: str
    state: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.state not in (OK, WARNING, ERROR) or (self.state != OK) != bool(self.fix):
            raise ValueError(f"finding {self.name!r} is {self.state!r} with the fix {self.fix!r}")

    def as_object(self) -> dict[str, str]:
        return asdict(self)


def ok(name: str, text: str) -> Finding:
    return Finding(name, OK, text)


def warning(name: str, text: str, fix: str) -> Finding:
    return Finding(name, WARNING, text, fix)


def error(name: str, text: str, fix: str) -> Finding:
    return Finding(name, ERROR, text, fix)
