"""Owns the process that tries a sidecar's transports as the process of an engine would open them, says which there are,
and ends. The sidecar's own process loads none of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from pdlink.config import Settings
from pdlink.errors import PdlinkError
from pdlink.limits import raise_soft_limit
from pdlink.observability.logs import set_up
from pdlink.observability.span_export import export_spans
from pdlink.runtime.node import Node
from pdlink.sidecar.engine_process import SERVICE
from pdlink.testing.parent import Parent


def main() -> None:
    parent = Parent()
    told = json.loads(sys.stdin.readline() or "{}")
    if not told:
        return  # the sidecar ended at once
    settings = Settings.model_validate(told["settings"])
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    set_up(settings.log, settings.log_format)
    raise_soft_limit()
    try:
        if settings.tracing:
            export_spans(SERVICE)
        with Node(settings) as node:
            answer: dict[str, object] = {"backends": list(node.backends)}
    except PdlinkError as error:
        answer = {"error": str(error)}
    with contextlib.suppress(BrokenPipeError):  # the sidecar has ended meanwhile
        parent.say(answer)


if __name__ == "__main__":
    main()
