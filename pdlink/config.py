"""Owns the settings of a process and their checks. It reads the environment when asked, never at import.

Precedence: keyword arguments, then `PDLINK_*` environment variables, then the defaults below. An unknown `PDLINK_*`
variable is refused with the nearest known name, because a mistyped timeout that is silently ignored is found in
production.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdlink.errors import ConfigError

PREFIX = "PDLINK_"
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Settings(BaseModel):
    """Every tunable of the library, with the unit in its name. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bind_host: str = Field("127.0.0.1", description="address that control sockets bind")
    advertise_host: str | None = Field(None, description="host told to peers; required for a wildcard bind")
    backends: str = Field("auto", description="transports to offer, best first, comma-separated, or auto")
    mooncake_protocol: Literal["tcp", "rdma", "nvlink_intra"] = Field(
        "tcp", description="what backend mooncake moves bytes over"
    )
    way: Literal["auto", "direct", "staged"] = Field(
        "auto", description="how pages move: one descriptor a run (direct), packed (staged), or whichever is quicker"
    )
    staging_slots: int = Field(4, ge=0, le=1 << 16, description="staging slots of each role of a process; 0: none")
    staging_slot_bytes: int = Field(8 << 20, ge=1 << 12, le=1 << 32, description="bytes of one staging slot")
    verify_digests: bool = Field(False, description="compare a digest of every page after the pull")

    resolve_timeout_s: Seconds = Field(5.0, description="one resolve against one bootstrap address")
    connect_timeout_s: Seconds = Field(5.0, description="a transport's connect to one owner")
    subscribe_timeout_s: Seconds = Field(10.0, description="first answer of an owner to a subscribe")
    progress_timeout_s: Seconds = Field(60.0, description="longest pause between pages once pages have come")
    transfer_timeout_s: Seconds = Field(300.0, description="a whole transfer, from open to its end")
    confirm_timeout_s: Seconds = Field(5.0, description="the verdicts of all owners after the last byte")
    abort_ack_timeout_s: Seconds = Field(1.0, description="wait for owners to acknowledge an abort")
    liveness_timeout_s: Seconds = Field(15.0, description="longest silence of an owner that is asked again and again")
    keepalive_interval_s: Seconds = Field(4.0, description="repeat of an answered subscribe, as a sign of life")
    drain_timeout_s: Seconds = Field(20.0, description="quarantine of destination pages after a failure")
    staging_timeout_s: Seconds = Field(20.0, description="wait for a staging slot, a packed one, or one to come back")
    resend_interval_s: Seconds = Field(0.5, description="repeat of an unanswered subscribe, release or abort")

    publication_lease_s: Seconds = Field(120.0, description="life of published pages that no reader holds")
    registration_lease_s: Seconds = Field(15.0, description="life of a registration that is not renewed")
    verdict_ttl_s: Seconds = Field(60.0, description="how long a verdict is repeated to duplicates")

    max_frame_bytes: int = Field(4 << 20, ge=1 << 10, le=1 << 30, description="largest control frame")
    max_aux_bytes: int = Field(64 << 10, ge=0, le=64 << 10, description="largest aux of a request")
    max_transfers: int = Field(16_384, ge=1, description="live transfers of one worker, subscriptions included")


def load_settings(environ: Mapping[str, str] | None = None, **overrides: object) -> Settings:
    """Settings from `environ` (the process's own by default) under `overrides`.

    Raises `ConfigError` naming the variable, its value and what is allowed.
    """
    env = os.environ if environ is None else environ
    known = {PREFIX + name.upper(): name for name in Settings.model_fields}
    values: dict[str, object] = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in _ours_elsewhere():
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment setting {variable}={text!r}{_nearest(variable, known)}")
        values[known[variable]] = text
    values.update({name: value for name, value in overrides.items() if value is not None})
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"setting {PREFIX}{name.upper()}={first.get('input')!r} cannot be used: {first['msg']}"
        ) from error


def _nearest(variable: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(variable, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known ones: {', '.join(sorted(known))}"


@cache
def _ours_elsewhere() -> frozenset[str]:
    """Variables with the prefix that other entry points read themselves."""
    return frozenset({"PDLINK_LOG", "PDLINK_SGLANG_BACKEND_NAME"})
