"""Owns how a rank of the demo opens its link: the library in its own process, or the sidecar of its side."""

from __future__ import annotations

from pdlink.config import load_settings
from pdlink.runtime.node import Node
from pdlink.runtime.verbs import NodeVerbs
from pdlink.sidecar import connect
from pdlink_engines.reference.demo.spec import DemoSpec


def open_node(spec: DemoSpec, side: str) -> NodeVerbs:
    """For a rank of `side`, which is "prefill" or "decode"."""
    return connect(spec.socket(side)) if spec.sidecar else Node(load_settings(backends=spec.backend))
