"""Only monotonic clocks decide: a clock that jumps can change no deadline, lease or order, since nobody looks at it."""

from __future__ import annotations

import ast

import pytest

from tests.house.tree import modules

# Where the time of day is what is wanted, and why.
WANTED = {
    "pdlink.prefill.rank": "an incarnation must be greater than that of the process before; ties to no deadline",
    "pdlink.bootstrap.server": "where versions begin; they are compared for change only",
    "pdlink.observability.tracing": "spans say when they began, by the time of day",
    "pdlink.bootstrap.tls": "certificates run out by the time of day",
    "pdlink.testing.conformance.rig": "an incarnation",
}
OF_DAY = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}

pytestmark = pytest.mark.faults


def uses(tree: ast.AST) -> set[str]:
    """The clocks of the day that code names, imported by name or as an attribute."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            found |= {f"{owner}.{node.attr}"} if (owner, node.attr) in OF_DAY else set()
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{one.name}" for one in node.names if (node.module, one.name) in OF_DAY}
    return found


@pytest.mark.parametrize(
    "source", ["import time\ntime.time()", "f(time.time_ns)", "from time import time", "datetime.datetime.now()"]
)
def test_a_clock_of_the_day_is_noticed(source: str) -> None:
    assert uses(ast.parse(source)) != set()


def test_a_monotonic_clock_is_none() -> None:
    assert uses(ast.parse("time.monotonic(); time.perf_counter(); when.time()")) == set()


def test_nothing_but_names_and_certificates_takes_the_time_of_day() -> None:
    found = {one.name for one in modules() if one.name.startswith("pdlink.") and uses(one.parse())}
    assert found == set(WANTED)
