"""Owns which options and variables of sglang and pdlink the plug-in does not serve. It imports no sglang: values are
handed in, when sglang resolves its arguments and again when a manager is made.
"""

from __future__ import annotations

from typing import Protocol

from pdlink.backends.registry import parse_backends
from pdlink.bootstrap.access import Access
from pdlink.config import PREFIX, Settings, load_settings
from pdlink.errors import ConfigError, InvalidInput

RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
RELEASE_TIMEOUT = f"{RELEASE}_TIMEOUT"
RELEASE_SLACK_S = 2.0
"""For the fence itself, and for a scheduler that looks late."""


class Options(Protocol):
    """Resolved arguments of sglang, under the names that they have there."""

    pp_size: int
    dcp_size: int
    enable_kv_cache_sharding: bool
    enable_cp_tp_group_sharing: bool
    enable_hisparse: bool
    enable_pd_role_switch: bool
    disaggregation_mode: str
    disaggregation_decode_allocation_policy: str
    disaggregation_decode_host_receive_threshold: float


class Variables(Protocol):
    """sglang's `envs`."""

    def __getattr__(self, name: str) -> Variable: ...


class Variable(Protocol):
    def get(self) -> object: ...


def check_options(options: Options, envs: Variables) -> None:
    """Raise `InvalidInput` naming every option that must be left at its default."""
    unserved = {
        "--pp-size": options.pp_size > 1,
        "--dcp-size": options.dcp_size > 1,
        "--enable-kv-cache-sharding": options.enable_kv_cache_sharding,
        "--enable-cp-tp-group-sharing": options.enable_cp_tp_group_sharing,
        "--enable-hisparse": options.enable_hisparse,
        "--enable-pd-role-switch": options.enable_pd_role_switch,
        "--disaggregation-decode-allocation-policy": options.disaggregation_decode_allocation_policy != "early",
        "--disaggregation-decode-host-receive-threshold": options.disaggregation_decode_host_receive_threshold < 1,
        "SGLANG_DISAGG_STAGING_BUFFER": bool(envs.SGLANG_DISAGG_STAGING_BUFFER.get()),
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": bool(envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get()),
    }
    named = [name for name, is_set in unserved.items() if is_set]
    if named:
        raise InvalidInput(
            f"pdlink does not serve sglang with {', '.join(named)}; leave {'it' if len(named) == 1 else 'them'} at the "
            "default"
        )


def check_settings(settings: Settings | None = None) -> Settings:
    """The settings of this process, or those given. Raises `ConfigError` naming the variable and its value."""
    known = settings or load_settings()
    try:
        parse_backends(known.backends)
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}BACKENDS={known.backends!r} cannot be used: {error}") from error
    Access(known)  # credentials that cannot be used
    return known


def check_release(settings: Settings, is_on: bool, timeout_s: float) -> None:
    """Raise `ConfigError` where decode's scheduler would free pages of a failed request while pdlink may still write.

    `is_on` and `timeout_s` are what sglang's variables say. After that long it frees the pages whatever pdlink says.
    """
    if not is_on:
        raise ConfigError(
            f"{RELEASE} is off: pages of a request that failed on another rank would be reused while pdlink still "
            "writes them; leave it on"
        )
    longest_s = settings.drain_timeout_s + settings.abort_ack_timeout_s + RELEASE_SLACK_S
    if longest_s >= timeout_s:
        raise ConfigError(
            f"{RELEASE_TIMEOUT}={timeout_s:g} is too short for {PREFIX}DRAIN_TIMEOUT_S={settings.drain_timeout_s:g}: "
            f"sglang would free pages after {timeout_s:g} s, and pdlink may write them for {longest_s:g} s (with "
            f"{PREFIX}ABORT_ACK_TIMEOUT_S={settings.abort_ack_timeout_s:g} and {RELEASE_SLACK_S:g} s besides); set "
            f"{RELEASE_TIMEOUT} above {longest_s:g}, or lower {PREFIX}DRAIN_TIMEOUT_S"
        )
