"""The link in a process of its own, beside the engine: its server, and what an engine has of it."""

from pdlink.sidecar.client import SidecarNode, connect
from pdlink.sidecar.stream import SidecarGone

__all__ = ["SidecarGone", "SidecarNode", "connect"]
