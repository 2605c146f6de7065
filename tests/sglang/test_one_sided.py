"""A peer without the plug-in is refused by name, never paired by position; another backend's name serves both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.nursery import Nursery
from tests.sglang.rig import FAILED, SUCCESS, WAITING, Rig
from tests.sglang.talk import ask_all

FOREIGN = {"SGLANG_PLUGINS": "none", "MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}


def test_a_decode_server_without_the_plug_in_is_told_why_it_gets_nothing(nursery: Nursery, tmp_path: Path) -> None:
    rig = Rig(nursery, tmp_path, 2, 5, decode_backend="mooncake", decode_environ=FOREIGN)
    try:
        ask_all(rig.prefill, "start", transports="ipc")
        assert rig.decode.do("start")["type"] == "MooncakeKVManager"
        assert rig.decode.do("ensure", bootstrap_port=rig.port, num_attempts=3) is False
        log = rig.decode.log.read_text()
        assert "Failed to get prefill server info: 409, this prefill server moves its KV cache with pdlink" in log
        assert "uses a transfer backend of sglang's own" in rig.prefill[0].log.read_text()
    finally:
        rig.close()


def test_a_prefill_server_without_the_plug_in_is_named_by_decode(nursery: Nursery, tmp_path: Path) -> None:
    rig = Rig(nursery, tmp_path, 2, 5, prefill_backend="mooncake", prefill_environ=FOREIGN)
    try:
        told = ask_all(rig.prefill, "start")
        assert {one["type"] for one in told} == {"MooncakeKVManager"}
        rig.decode.do("start", transports="ipc")
        room = rig.room()
        assert rig.decode.do("ensure", bootstrap_port=rig.port)
        assert rig.decode.do("open", room=room, bootstrap_port=rig.port) == FAILED
        text = rig.decode.do("explain", room=room)
        assert f"127.0.0.1:{rig.port} does not run pdlink (it answered 404 to /pdlink)" in text
    finally:
        rig.close()


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_a_request_moves_under_the_name_of_another_backend(name: str, nursery: Nursery, tmp_path: Path) -> None:
    environ = {"PDLINK_SGLANG_BACKEND_NAME": name}
    rig = Rig(nursery, tmp_path, 2, 5, prefill_backend=name, decode_backend=name, environ=environ)
    try:
        assert {one["type"] for one in rig.start("ipc")} == {"PdlinkKVManager"}
        room, source, target = rig.room(), [1, 2, 3], [6, 1, 8]
        ask_all(rig.prefill, "fill", seed=9)
        rig.decode.do("blank")
        rig.open(room)
        rig.decode.do("receive", room=room, pages=target, aux=5)
        ask_all(rig.prefill, "poll_all_until", room=room, states=[WAITING])
        ask_all(rig.prefill, "begin", room=room, num_pages=3, aux_index=2)
        ask_all(rig.prefill, "send", room=room, pages=source, last=True, index_pages=source, aux=2)
        assert rig.decode.do("poll_until_final", room=room)[-1] == SUCCESS
        assert rig.decode.do("differences", seed=9, source=source, target=target) == []
    finally:
        rig.close()
