"""Owns which settings pdlink runs with inside sglang: `PDLINK_*` variables first, then what sglang's own say."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_serving
from sglang.srt.utils.network import get_local_ip_auto

from pdlink.address import Address
from pdlink.bootstrap.tls import read_server
from pdlink.config import PREFIX, Settings, load_settings
from pdlink_engines.sglang.options import check_options, check_release, check_settings

LONGEST_TRANSFER_S = 86_400.0
"""The most that the setting takes."""


def process_settings() -> Settings:
    """Settings of this process.

    Control sockets bind where sglang's HTTP server does, or, if that is every interface, the address that sglang takes
    for this machine's. A transfer may take as long as sglang lets a decode request wait. Raises `ConfigError`.
    """
    defaults = {
        "bind_host": own_host(),
        "transfer_timeout_s": min(float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get()), LONGEST_TRANSFER_S),
    }
    return load_settings(**{name: value for name, value in defaults.items() if PREFIX + name.upper() not in os.environ})


def check_served(server_args: Any, settings: Settings | None = None) -> None:
    """Raise `InvalidInput` or `ConfigError` for what pdlink does not serve of sglang's (resolved) arguments, and of the
    variables of both. `settings` default to those of the environment."""
    chosen = resolving_view(server_args)
    check_options(chosen, envs)
    known = check_settings(settings)
    if chosen.disaggregation_mode == "prefill":
        read_server(known)  # the certificate of the bootstrap that it runs
    if chosen.disaggregation_mode == "decode":
        is_on = bool(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get())
        timeout_s = float(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get())
        check_release(known, is_on, timeout_s)


def own_host() -> str:
    """The address of this machine that peers reach, as far as sglang knows."""
    host = get_serving().host
    return get_local_ip_auto() if Address(host, 0).is_wildcard else host
