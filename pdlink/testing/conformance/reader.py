"""Owns the process that plays the decode side: it runs the scenarios that it is told, one at a time.

Run as `python -m pdlink.testing.conformance.reader SETUP`. A scenario's name in, its outcome out. It is a process of
its own, so that an engine that takes its process down ends one scenario, and not the run.
"""

from __future__ import annotations

import json
import sys
import time
import traceback

from pdlink.testing.conformance.catalogue import SCENARIOS
from pdlink.testing.conformance.rig import Broken, Skipped, rig_for
from pdlink.testing.conformance.setup import Setup
from pdlink.testing.parent import Parent


def run_scenario(setup: Setup, name: str) -> dict[str, object]:
    started = time.monotonic()
    outcome, detail = "passed", ""
    try:
        with rig_for(setup) as rig:
            SCENARIOS[name](rig)
    except Skipped as reason:
        outcome, detail = "skipped", str(reason)
    except Broken as rule:
        outcome, detail = "failed", str(rule)
    except Exception:  # noqa: BLE001 - a process boundary: whatever it is, it is this scenario's outcome
        outcome, detail = "failed", traceback.format_exc()
    return {"outcome": outcome, "detail": detail, "seconds": time.monotonic() - started}


def main(setup_text: str) -> None:
    parent = Parent()
    setup = Setup.from_json(setup_text)
    for line in sys.stdin:
        parent.say(run_scenario(setup, json.loads(line)["scenario"]))


if __name__ == "__main__":
    main(sys.argv[1])
