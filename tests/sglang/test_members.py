"""sglang's scheduler finds on pdlink's objects whatever its source asks of a transfer backend's."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.nursery import Nursery
from tests.sglang.rig import Rig
from tests.sglang.talk import ask_all

SOURCES = (
    "disaggregation/prefill.py",
    "disaggregation/decode.py",
    "disaggregation/utils.py",
    "disaggregation/role_switch.py",
    "managers/scheduler.py",
    "managers/disagg_service.py",
    "managers/tokenizer_manager.py",
)
# The last name before a member tells whose it is, by sglang's own habit.
OWNERS = {
    "kv_manager": "manager",
    "kv_mgr": "manager",
    "disagg_kv_sender": "sender",
    "sender": "sender",
    "kv_receiver": "receiver",
    "receiver": "receiver",
    "bootstrap_server": "bootstrap",
    "disaggregation_bootstrap_server": "bootstrap",
}
# Methods of both senders and receivers, which one function of sglang polls.
POLLERS = ("poller", "pollers")
PREFILL_ONLY = "poll_pp_consensus"
"""What only senders are asked: sglang's own receivers have none."""
# Asked for only when something is switched on that pdlink refuses when the server starts.
REFUSED = {
    "manager": {
        "_staging_handler": "SGLANG_DISAGG_STAGING_BUFFER",
        "set_kv_buffer_tensors": "SGLANG_DISAGG_STAGING_BUFFER",
        "_prefetch_staging_reqs": "SGLANG_DISAGG_STAGING_BUFFER",
        "transfer_infos": "SGLANG_DISAGG_STAGING_BUFFER",
    },
    "sender": {},
    "receiver": {},
    "bootstrap": {},
}


def chain(node: ast.expr) -> list[str]:
    """`a.b.c` as its names; a call or subscript inside counts as what it is called on."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    return ["?"]


def touched(source: str) -> Iterator[tuple[str, str]]:
    """(owner, member) for every attribute that the source reads, sets or asks for by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            *_, last, member = ["", *chain(node)]
            if last in OWNERS:
                yield OWNERS[last], member
            if last in POLLERS:
                yield "sender", member
            if last in POLLERS and member != PREFILL_ONLY:
                yield "receiver", member
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            last = chain(node.args[0])[-1]
            if last in OWNERS and isinstance(node.args[1], ast.Constant):
                yield OWNERS[last], str(node.args[1].value)


def sglang_touches() -> dict[str, list[str]]:
    root = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang/srt")))
    found: dict[str, set[str]] = {owner: set() for owner in REFUSED}
    for name in SOURCES:
        for owner, member in touched((root / name).read_text(encoding="utf-8")):
            found[owner].add(member)
    return {owner: sorted(members - set(REFUSED[owner])) for owner, members in found.items()}


def abstract_members(name: str) -> list[str]:
    """What sglang's abstract class declares, abstract or not."""
    root = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang/srt")))
    tree = ast.parse((root / "disaggregation/base/conn.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    names = [node.name for node in found.body if isinstance(node, ast.FunctionDef)]
    names += [
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return sorted(set(names))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("self.kv_manager.kv_args.state_types", ("manager", "kv_args")),
        ("req.disagg_kv_sender._early_send_wait_event = ev", ("sender", "_early_send_wait_event")),
        ("x = getattr(sender, 'supports_host_tensor_indices', False)", ("sender", "supports_host_tensor_indices")),
        ("decode_req.kv_receiver.kv_mgr.is_abort_release_safe(1)", ("manager", "is_abort_release_safe")),
        ("[poller.poll() for poller in pollers]", ("receiver", "poll")),
        ("poller.poll_pp_consensus()", ("sender", "poll_pp_consensus")),
    ],
)
def test_a_member_that_is_touched_is_found(source: str, found: tuple[str, str]) -> None:
    assert found in set(touched(source))


def test_the_installed_sglang_touches_what_is_known_to_matter() -> None:
    found = sglang_touches()
    assert {"kv_args", "prefill_info_table", "try_ensure_parallel_info", "is_dummy_cp_rank"} <= set(found["manager"])
    assert {"poll", "pop_decode_prefix_len", "_early_send_wait_event", "get_max_transfer_tokens"} <= set(
        found["sender"]
    )
    assert {"abort_notified", "bootstrap_infos", "conclude_state", "require_staging"} <= set(found["receiver"])


def test_every_member_that_sglang_touches_is_there(nursery: Nursery, tmp_path: Path) -> None:
    found = sglang_touches()
    rig = Rig(nursery, tmp_path, 1, 2)
    try:
        rig.start("ipc")
        room = rig.room()
        rig.open(room)
        prefill, decode = rig.prefill[0], rig.decode
        missing = {
            "prefill manager": prefill.do("missing", names=found["manager"], of="manager"),
            "decode manager": decode.do("missing", names=found["manager"], of="manager"),
            "sender": prefill.do("missing", names=found["sender"], of="sender", room=room),
            "receiver": decode.do("missing", names=found["receiver"], of="receiver", room=room),
            "bootstrap": prefill.do("missing", names=found["bootstrap"], of="bootstrap"),
        }
        for who, of, base in (
            (prefill, "manager", "BaseKVManager"),
            (prefill, "sender", "BaseKVSender"),
            (decode, "receiver", "BaseKVReceiver"),
        ):
            missing[base] = who.do("missing", names=abstract_members(base), of=of, room=room)
        assert {who: names for who, names in missing.items() if names} == {}
        # The check itself can fail.
        assert ask_all([prefill], "missing", names=["no_such_member"], of="manager") == [["no_such_member"]]
    finally:
        rig.close()
