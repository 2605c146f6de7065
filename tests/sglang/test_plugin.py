"""The plug-in takes in every process of sglang, or ends it with the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.nursery import Nursery

TIMEOUT_S = 120.0
# Without split layers.
PLAIN = ["enable_dsa_cache_layer_split=false", "enable_prefill_cp=false", "attn_cp_size=1", "tp_size=1"]


@dataclass(frozen=True, slots=True)
class Ended:
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path) -> Run:
    """Run a module of these tests to its end."""

    def call(module: str, *arguments: str, **environ: str) -> Ended:
        with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err, open(os.devnull) as nothing:
            streams = (nothing.fileno(), out.fileno(), err.fileno())
            ended = nursery.fork(f"tests.sglang.{module}", list(arguments), environ, *streams).wait(TIMEOUT_S)
            return Ended((tmp_path / "out").read_text(), (tmp_path / "err").read_text() if ended else "it did not end")

    return call


def told(ended: Ended) -> dict[str, Any]:
    assert ended.stdout, ended.stderr[-3000:]
    value = json.loads(ended.stdout.splitlines()[-1])
    assert isinstance(value, dict)
    return value


def test_pdlink_is_one_more_backend(run: Run) -> None:
    found = told(run("plugin_process", "nothing"))
    assert "pdlink" in found["choices"]
    assert found["served"] == ["pdlink"]
    assert found["same"] is True
    kinds = ["KVArgs", "PdlinkKVManager", "PdlinkKVSender", "PdlinkKVReceiver", "PdlinkKVBootstrapServer"]
    assert found["kinds"] == kinds


def test_pdlink_serves_under_the_name_of_another_backend(run: Run) -> None:
    found = told(run("plugin_process", "nothing", PDLINK_SGLANG_BACKEND_NAME="nixl"))
    assert found["served"] == ["nixl"]
    assert "pdlink" not in found["choices"]


@pytest.mark.parametrize(("transports", "is_shared"), [("ipc,nixl", True), ("nixl", False), ("auto", False)])
def test_pools_on_cpu_are_shared_memory_where_ipc_is_asked_for(run: Run, transports: str, is_shared: bool) -> None:
    assert told(run("plugin_process", "nothing", PDLINK_BACKENDS=transports))["shared"] is is_shared


def test_a_receiver_is_told_the_span_that_sglang_has_for_its_request(run: Run) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    found = told(run("trace_process", f"00-{trace}-b7ad6b7169203331-01"))
    assert found["off"] == {"kind": "TraceNullContext", "span": "", "told": ""}
    for name, kind in (("on", "TraceReqContext"), ("async", "TraceReqContextAsync")):
        assert found[name]["kind"] == kind
        assert found[name]["told"] == f"00-{trace}-{found[name]['span']}-01"


def test_sglang_runs_without_pdlink_where_plug_ins_are_chosen(run: Run) -> None:
    found = told(run("plugin_process", "nothing", SGLANG_PLUGINS="none"))
    assert found["served"] == []
    assert "pdlink" not in found["choices"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no-kv-class", ["did not take", "get_kv_class of sglang.srt.disaggregation.utils does not call pdlink"]),
        ("no-layer-ids", ["did not take", "build_kv_layer_ids of sglang.srt.disaggregation.utils"]),
        ("no-enum", ["did not take", "TransferBackend has no 'pdlink'"]),
        ("no-trace", ["did not take", "DecodePreallocQueue does not tell receivers the trace of their request"]),
        ("no-module", ["pdlink cannot serve this sglang", "hooks"]),
    ],
)
def test_a_process_in_which_something_did_not_take_ends_and_names_it(run: Run, damage: str, words: list[str]) -> None:
    ended = run("plugin_process", damage)
    assert ended.stdout == ""
    last = ended.stderr.splitlines()[-1]
    assert [word for word in words if word not in last] == []


def test_another_sglang_goes_on_without_pdlink_and_says_so(run: Run) -> None:
    found = told(run("plugin_process", "other-version"))
    assert found["served"] == []


def test_another_sglang_is_refused_where_pdlink_is_chosen(run: Run) -> None:
    for name in ("pdlink", "nixl"):
        ended = run("resolve_process", name, *PLAIN, PDLINK_SGLANG_BACKEND_NAME=name, SGLANG_SEEMS="0.5.24")
        assert ended.stdout == ""
        last = ended.stderr.splitlines()[-1]
        assert [
            word for word in ("sglang 0.5.24 is installed", "made for 0.5.23", "SGLANG_PLUGINS") if word not in last
        ] == []
    assert told(run("resolve_process", "nixl", *PLAIN, SGLANG_SEEMS="0.5.24"))["backend"] == "nixl"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ([], {"PDLINK_BACKENDS": "nixl,tpc"}, ["PDLINK_BACKENDS='nixl,tpc' cannot be used", "unknown backend 'tpc'"]),
        ([], {"PDLINK_DRAIN_TIMEOUT_S": "soon"}, ["PDLINK_DRAIN_TIMEOUT_S='soon'"]),
        ([], {"PDLINK_DRAIN_TIMEOUT_SEC": "1"}, ["unknown environment setting PDLINK_DRAIN_TIMEOUT_SEC"]),
        ([], {"SGLANG_DISAGG_STAGING_BUFFER": "1"}, ["does not serve sglang with SGLANG_DISAGG_STAGING_BUFFER"]),
        (["enable_pd_role_switch=true"], {}, ["does not serve sglang with --enable-pd-role-switch"]),
        (
            ['disaggregation_mode="decode"'],
            {"PDLINK_DRAIN_TIMEOUT_S": "40"},
            ["PDLINK_DRAIN_TIMEOUT_S=40", "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT=30"],
        ),
    ],
)
def test_what_cannot_be_served_ends_the_server_when_its_arguments_resolve(
    run: Run, arguments: list[str], environ: dict[str, str], words: list[str]
) -> None:
    ended = run("resolve_process", "pdlink", *PLAIN, *arguments, **environ)
    assert ended.stdout == ""
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: pdlink cannot serve this sglang")
    assert [word for word in words if word not in last] == []


def test_settings_of_pdlink_do_not_matter_to_who_does_not_choose_it(run: Run) -> None:
    assert told(run("resolve_process", "nixl", *PLAIN, PDLINK_BACKENDS="tpc"))["backend"] == "nixl"


def test_a_name_that_pdlink_cannot_take_ends_the_process(run: Run) -> None:
    ended = run("plugin_process", "nothing", PDLINK_SGLANG_BACKEND_NAME="mori")
    assert ended.stdout == ""
    assert "PDLINK_SGLANG_BACKEND_NAME='mori' cannot be used" in ended.stderr


@pytest.mark.parametrize("name", ["pdlink", "nixl"])
def test_layers_may_be_split_with_pdlink(run: Run, name: str) -> None:
    found = told(run("resolve_process", name, PDLINK_SGLANG_BACKEND_NAME=name))
    assert found == {"backend": name, "split": True}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nixl"], "currently only supports the mooncake transfer backend"),
        (["pdlink", 'cp_strategy="zigzag"'], "--cp-strategy interleave"),
        (["pdlink", 'disaggregation_mode="decode"', "enable_prefill_cp=false"], "not supported on decode workers"),
    ],
)
def test_every_other_check_of_sglang_is_kept(run: Run, arguments: list[str], words: str) -> None:
    assert words in str(told(run("resolve_process", *arguments))["refused"])
