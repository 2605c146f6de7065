"""Owns the settings of a process, their checks, and where each came from. It reads the environment when asked, never at
import, and files through `config_file`.

Precedence: keyword arguments (flags), then `PDLINK_*` environment variables, then a YAML file, then the defaults below.
An unknown `PDLINK_*` variable or key is refused with the nearest known name, because a mistyped timeout that is
silently ignored is found in production.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from pdlink.config_file import read_config_file
from pdlink.errors import ConfigError
from pdlink.secret import HIDDEN

PREFIX = "PDLINK_"
FILE_VARIABLE = "PDLINK_CONFIG"
"""Names the YAML file of settings, where no flag does."""
_SECRET = re.compile("TOK|SECRET|PASS|KEY|CRED|BEARER")
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _in_lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class Settings(BaseModel):
    """Every tunable of the library, with the unit in its name. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    bind_host: str = Field("127.0.0.1", description="address that control sockets bind")
    advertise_host: str | None = Field(None, description="host told to peers; required for a wildcard bind")
    backends: str = Field("auto", description="transports to offer, best first, comma-separated, or auto")
    mooncake_protocol: Literal["tcp", "rdma", "nvlink_intra"] = Field(
        "tcp", description="what backend mooncake moves bytes over"
    )
    way: Literal["auto", "direct", "staged"] = Field(
        "auto", description="how pages move: one descriptor a run (direct), packed (staged), or whichever is quicker"
    )
    staging_slots: int = Field(4, ge=0, le=1 << 16, description="staging slots of each role and device; 0: none")
    staging_slot_bytes: int = Field(8 << 20, ge=1 << 12, le=1 << 32, description="bytes of one slot in host memory")
    staging_device_slot_bytes: int = Field(
        256 << 20, ge=1 << 12, le=1 << 32, description="bytes of one slot in device memory, for pages that lie there"
    )
    pool_reader: Literal["auto", "broadcast", "peer"] = Field(
        "auto", description="how a layer-sharded pool reads layers of other ranks; auto: peer where it works and pays"
    )
    require_draft: bool = Field(
        False,
        description="decode: refuse prefill instances that lack a draft model which decode has; else the draft's pages "
        "are left as they are",
    )
    verify_digests: bool = Field(False, description="hash pages when they are published, and compare after the pull")
    digest_kind: Literal["auto", "xxh3-64", "mix64"] = Field(
        "auto", description="prefill: how pages are hashed; auto: mix64 where they lie on a device, else xxh3-64"
    )

    sidecar_socket: str | None = Field(None, description="unix socket at which a sidecar listens")

    # Waits of a transfer. Each says on which side it runs and what happens when it is over.
    resolve_timeout_s: Seconds = Field(
        5.0, description="decode: until a bootstrap knows the whole prefill instance; then the request fails"
    )
    connect_timeout_s: Seconds = Field(
        5.0,
        description="decode: a transport's connect to one owner, where that waits for it (mooncake); then the next "
        "transport is tried, or the pull fails",
    )
    subscribe_timeout_s: Seconds = Field(
        10.0,
        description="decode: first answer of each owner to a subscribe; then the transfer fails by that owner's name",
    )
    first_page_timeout_s: Seconds = Field(
        300.0,
        description="decode: from the subscribe to the first page of any owner, prefill's queue included; then the "
        "transfer fails and names the owners that published nothing",
    )
    progress_timeout_s: Seconds = Field(
        60.0, description="decode: longest pause between pages once pages have come; then the transfer fails"
    )
    transfer_timeout_s: Seconds = Field(
        600.0, description="decode: a whole transfer, from open to the last byte; then it fails"
    )
    confirm_timeout_s: Seconds = Field(
        5.0,
        description="decode: the verdicts of all owners after the last byte; then the transfer fails, never succeeds",
    )
    abort_ack_timeout_s: Seconds = Field(
        1.0, description="decode: acknowledgements of an abort; then the end is reported without them"
    )
    liveness_timeout_s: Seconds = Field(
        15.0,
        description="longest silence of the other side while a transfer runs; then decode fails it, and prefill ends "
        "the request and has its pages and slots back",
    )
    keepalive_interval_s: Seconds = Field(
        4.0,
        description="decode: repeat of an answered subscribe, as a sign of life; capped at a third of "
        "liveness_timeout_s, so that a longer one changes nothing",
    )
    drain_timeout_s: Seconds = Field(
        20.0, description="decode: wait for a failed pull to be quiet; then its link is broken, which makes it so"
    )
    staging_timeout_s: Seconds = Field(
        20.0,
        description="wait for a free staging slot, for a packed one, or for one to come back; then the transfer fails",
    )
    resend_interval_s: Seconds = Field(0.5, description="repeat of an unanswered subscribe, release, abort or stage")

    link_idle_timeout_s: Seconds = Field(300.0, description="life of a link that no request uses: sockets and threads")
    publication_lease_s: Seconds = Field(
        120.0, description="prefill: published pages without any reader; then they expire"
    )
    registration_lease_s: Seconds = Field(15.0, description="life of a registration that is not renewed")
    verdict_ttl_s: Seconds = Field(
        60.0, description="prefill: how long a verdict is repeated to duplicates; later ones are denied"
    )

    tls_certificate: str | None = Field(
        None, description="PEM file of this side's certificate and its chain: what a bootstrap serves TLS with"
    )
    tls_key: str | None = Field(None, description="PEM file of the private key of tls_certificate")
    tls_ca: str | None = Field(None, description="PEM file of the CA that certificates of the other side must be from")
    tls_client_auth: Literal["none", "require"] = Field(
        "none", description="whether a bootstrap demands certificates of its callers (mTLS)"
    )
    tls_server_name: str | None = Field(
        None, description="name in the bootstrap's certificate, where it is not the host that is dialled"
    )
    token: SecretStr | None = Field(None, description="shared token that a bootstrap demands and its callers send")
    token_file: str | None = Field(
        None,
        description="file of it: a caller sends the first line, a bootstrap takes any line; read again when changed",
    )
    control_curve: Literal["auto", "on", "off"] = Field(
        "auto", description="encrypt and authenticate control sockets (CURVE); auto: where a token or TLS is set"
    )
    allow_plaintext_secrets: bool = Field(
        False, description="send the token and control keys to other machines without TLS"
    )

    log: Annotated[LogLevel, BeforeValidator(_in_lower_case)] = Field(
        "warning", description="level of the log of commands"
    )
    log_format: Literal["text", "json"] = Field("text", description="lines of the log of commands, or JSON objects")

    tracing: bool = Field(False, description="make OpenTelemetry spans with the tracer provider of the process")
    http_bind: str | None = Field(
        None,
        description="host:port, or host:first-last for the first free one, of /healthz, /readyz, /metrics; unset: none",
    )

    max_frame_bytes: int = Field(4 << 20, ge=1 << 10, le=1 << 30, description="largest control frame")
    max_aux_bytes: int = Field(64 << 10, ge=0, le=64 << 10, description="largest aux of a request")
    max_registrations: int = Field(
        65_536, ge=1, le=1 << 20, description="workers that a bootstrap keeps; more are refused"
    )
    max_peers: int = Field(
        4096, ge=1, le=1 << 16, description="prefill ranks that a decode worker is linked to at once; unused links go"
    )
    max_queued_frames: int = Field(
        1000, ge=8, le=1 << 20, description="control frames that wait for one peer; more are dropped, and repeated"
    )
    max_transfers: int = Field(16_384, ge=1, description="live transfers of one worker, subscriptions included")

    @property
    def is_secured(self) -> bool:
        """Whether a token or TLS is set."""
        return any(one is not None for one in (self.token, self.token_file, self.tls_ca, self.tls_certificate))

    @property
    def uses_curve(self) -> bool:
        """Whether control sockets of this side demand CURVE."""
        return self.control_curve == "on" or (self.control_curve == "auto" and self.is_secured)


class Origin(StrEnum):
    """Where a value came from, the strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one value came from. `where` names the variable, or the file and its key; empty for the other origins."""

    origin: Origin
    where: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the source of each by its name."""

    settings: Settings
    sources: Mapping[str, Source]


def load_settings(
    environ: Mapping[str, str] | None = None, *, file: str | None = None, **overrides: object
) -> Settings:
    """Settings from `environ` (the process's own by default) under `overrides`, and above those of the YAML `file`, or
    of the one that `PDLINK_CONFIG` names.

    Raises `ConfigError` with everything that is wrong: the variable or the key, its value and what is allowed.
    """
    return trace_settings(environ, file=file, **overrides).settings


def trace_settings(environ: Mapping[str, str] | None = None, *, file: str | None = None, **overrides: object) -> Loaded:
    """Like `load_settings`, and where each value came from."""
    values, sources, problems = _gather(os.environ if environ is None else environ, file, overrides)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        for name in dict.fromkeys(str(one["loc"][0]) for one in error.errors(include_input=False)):
            told = _told(sources[name], name, values[name])
            problems.append(f"{told} cannot be used: {_allowed(name)}")
        raise ConfigError(*problems) from error
    if problems:
        raise ConfigError(*problems)
    default = Source(Origin.DEFAULT)
    return Loaded(settings, {name: sources.get(name, default) for name in Settings.model_fields})


def _gather(
    env: Mapping[str, str], file: str | None, overrides: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, Source], list[str]]:
    """What each known setting is given as, unchecked, by whom, and what is wrong with the names."""
    values: dict[str, object] = {}
    sources: dict[str, Source] = {}
    problems: list[str] = []
    if path := file or env.get(FILE_VARIABLE):
        try:
            lines, problems = read_config_file(path, Settings.model_fields, _SECRETS)
        except ConfigError as error:
            lines, problems = {}, list(error.problems)
        for name, text in lines.items():
            values[name], sources[name] = text, Source(Origin.FILE, f"{path}: {name}")
    known = {PREFIX + name.upper(): name for name in Settings.model_fields}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in _ours_elsewhere():
            continue
        if variable not in known:
            problems.append(
                f"unknown environment setting {variable}={_shown(variable, text)}{nearest(variable, known)}"
            )
            continue
        values[known[variable]], sources[known[variable]] = text, Source(Origin.ENVIRONMENT, variable)
    for name, given in overrides.items():
        if given is None:
            continue
        if name not in Settings.model_fields:
            problems.append(f"unknown setting {name}={_shown(name, given)}{nearest(name, Settings.model_fields)}")
        else:
            values[name], sources[name] = given, Source(Origin.FLAG)
    return values, sources, problems


def _told(source: Source, name: str, value: object) -> str:
    """A value as a refusal names it, and who gave it."""
    if source.origin is Origin.FLAG:
        return f"option or argument {name}={_shown(name, value)}"
    kind = "environment setting" if source.origin is Origin.ENVIRONMENT else "setting in"
    return f"{kind} {source.where}={_shown(name, value)}"


def _allowed(name: str) -> str:
    """What a setting takes, as advice."""
    schema = Settings.model_json_schema()["properties"][name]
    if choices := schema.get("enum"):
        return f"use {', '.join(choices[:-1])} or {choices[-1]}"
    kind = schema.get("type")
    if kind == "boolean":
        return "use true or false"
    if kind not in ("integer", "number"):
        return "give it as text"
    if kind == "number":
        return f"give seconds as a number above {schema['exclusiveMinimum']:g} and at most {schema['maximum']:g}"
    least, most = schema["minimum"], schema.get("maximum")
    return f"give a whole number {f'of at least {least}' if most is None else f'from {least} to {most}'}"


_SECRETS = frozenset({"token"})
"""Settings whose value nobody else may read."""


def _shown(name: str, value: object) -> str:
    """The value as errors show it; that of anything like a secret, mistyped ones included, is hidden."""
    name = name.upper()
    if name.endswith(("_FILE", "_KEY", "_CA", "_CERTIFICATE")):
        return repr(value)
    return HIDDEN if _SECRET.search(name) else repr(value)


def nearest(name: str, known: Collection[str]) -> str:
    """What an error says after a name that is not known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known ones: {', '.join(sorted(known))}"


@cache
def _ours_elsewhere() -> frozenset[str]:
    """Variables with the prefix that other entry points read themselves."""
    return frozenset({FILE_VARIABLE, "PDLINK_SGLANG_BACKEND_NAME"})
