"""Owns the entry point that sglang calls in each of its processes: install the hooks, and stop a process in which one
did not take.

sglang logs and forgets what a plug-in raises (sglang/srt/plugins/__init__.py catches `Exception`), and would go on
without it. `SystemExit` is none, so that is what a refusal is.
"""

from __future__ import annotations

import functools
import logging

from pdlink.errors import InvalidInput

log = logging.getLogger("pdlink.sglang")


def register() -> None:
    """Install pdlink into this process of sglang. Raises `SystemExit` with the reason where that cannot be done."""
    try:
        from pdlink_engines.sglang import hooks, version

        name = hooks.backend_name()
        try:
            version.check_version()
        except InvalidInput as error:
            # Others may share this environment: only who chooses pdlink is refused.
            log.warning("pdlink is not offered: %s", error)
            hooks.refuse_choice(name, str(error))
            return
        hooks.install(name)
        _check_when_applied()
    except Exception as error:  # anything at all: the server must not go on without its transfer backend
        raise refusal(str(error) or repr(error)) from error


def refusal(reason: str) -> SystemExit:
    """What ends this process, with the reason, which is logged too."""
    log.critical("pdlink cannot serve this sglang: %s", reason)
    return SystemExit(
        f"error: pdlink cannot serve this sglang: {reason} (to run sglang without pdlink, set SGLANG_PLUGINS to the "
        "plug-ins that you want, or to 'none')"
    )


def _check_when_applied() -> None:
    """sglang applies hooks once all plug-ins are loaded; look at the outcome right after that."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from pdlink_engines.sglang import hooks

    apply = HookRegistry.apply_hooks

    @functools.wraps(apply)
    def apply_and_check() -> None:
        apply()
        try:
            hooks.check_applied()
        except Exception as error:  # as above
            raise refusal(str(error) or repr(error)) from error

    HookRegistry.apply_hooks = staticmethod(apply_and_check)
