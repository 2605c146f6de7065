"""Owns how a rank of this engine has its pool watched: by its node, where that is in the rank's own process. It counts
nothing itself.

A sidecar sees no reads of layers: these stay between the prefill ranks.
"""

from __future__ import annotations

from pdlink.memory.layer_reader import LayerReader
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.runtime.node import Node
from pdlink.runtime.verbs import NodeVerbs


def watch_reader(node: NodeVerbs, reader: LayerReader | None) -> LayerReader | None:
    """`reader`, with each fetch of a layer timed; it goes into the pool."""
    return node.watch_reader(reader) if reader is not None and isinstance(node, Node) else reader


def watch_pool(node: NodeVerbs, pool: LayerShardedPool) -> None:
    """Have the pool's reads and scratch hits counted."""
    if isinstance(node, Node):
        node.watch_pool(pool)
