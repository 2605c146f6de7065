"""Owns the look at pdlink's hooks in sglang, in a process of its own: install, apply, check, as sglang does it. Prints
one JSON object.
"""

from __future__ import annotations

import json
from importlib import import_module


def look() -> dict[str, str]:
    from pdlink_engines.sglang import hooks, plugin, version

    try:
        version.check_version()
        plugin.register()
        import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
        hooks.check_applied()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is why the hooks do not take
        return {"error": str(error) or type(error).__name__, "name": ""}
    return {"error": "", "name": hooks.backend_name()}


if __name__ == "__main__":
    print(json.dumps(look()), flush=True)
