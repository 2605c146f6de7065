"""Owns the way into the conformance suite: one set of scenarios that every backend, built in or not, has to pass."""

from pdlink.testing.conformance.runner import Runner, run_conformance, scenario_names
from pdlink.testing.conformance.setup import MemorySource, Result, Setup

__all__ = ["MemorySource", "Result", "Runner", "Setup", "run_conformance", "scenario_names"]
