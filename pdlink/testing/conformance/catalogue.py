"""Owns the list of scenarios: name -> what runs it. The names are what a report shows and a test is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

from pdlink.testing.conformance import scenarios_bytes, scenarios_life, scenarios_peers
from pdlink.testing.conformance.rig import Rig

Scenario = Callable[[Rig], None]


def _public(module: ModuleType) -> Mapping[str, Scenario]:
    return {
        name: made
        for name, made in vars(module).items()
        if callable(made) and not name.startswith("_") and getattr(made, "__module__", "") == module.__name__
    }


SCENARIOS: Mapping[str, Scenario] = {
    **_public(scenarios_bytes),
    **_public(scenarios_peers),
    **_public(scenarios_life),
}
