"""pdlink moves layer-split KV caches from prefill ranks to decode ranks.

This module owns the version only. Importing it loads nothing heavy: torch, grpc and the transports load on
first use, from the submodule that needs them.
"""

__version__ = "0.1.0"
