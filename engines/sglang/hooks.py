"""Owns the places of sglang that the plug-in changes, and the proof that each change took. It starts nothing.

sglang's registry swallows what goes wrong with a hook (sglang/srt/plugins/hook_registry.py), so that every hook here
has a check of its own, which looks at what sglang's modules would really call.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable
from typing import Any

from pdlink.errors import ConfigError, PdlinkError, StateError

SETTING = "PDLINK_SGLANG_BACKEND_NAME"
OWN_NAME = "pdlink"
BORROWED_NAMES = ("mooncake", "nixl")
"""Names of sglang's own backends that pdlink can serve under instead. Everything that sglang asks of a name then holds,
and neither its choices nor its enum change."""
_LAYER_SPLIT_NAME = "mooncake"
"""The one name with which sglang lets layers be split."""
_LAYER_SPLIT_STEP = "handle_model_specific_adjustments"
_PD_STEP = "handle_pd_disaggregation"
_UTILS = "sglang.srt.disaggregation.utils"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_POOL_CLASSES = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Those that sglang can serve a model with on CPU."""
_DECODE = "sglang.srt.disaggregation.decode"
_QUEUE_CLASS = "DecodePreallocQueue"
_MAKES_RECEIVER = f"{_DECODE}.{_QUEUE_CLASS}._create_receiver_and_enqueue"


def backend_name() -> str:
    """The name of `--disaggregation-transfer-backend` that pdlink serves under in this process.

    Raises `ConfigError` for a name that it cannot take.
    """
    name = os.environ.get(SETTING, OWN_NAME)
    if name not in (OWN_NAME, *BORROWED_NAMES):
        raise ConfigError(f"{SETTING}={name!r} cannot be used; it is {OWN_NAME} or one of {', '.join(BORROWED_NAMES)}")
    return name


def refuse_choice(name: str, reason: str) -> None:
    """Offer the name and refuse whoever chooses it: for an sglang that pdlink cannot serve and others may use."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from pdlink_engines.sglang.plugin import refusal

    def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
        if _serves(server_args):
            raise refusal(reason)
        previous(server_args)

    if name not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([name])
    register_resolution_hook(_PD_STEP)(refuse)


def install(name: str) -> None:
    """Ask sglang to apply every hook; it does so when all plug-ins have been loaded."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if name == OWN_NAME:
        add_disagg_transfer_backend_choices([name])
        HookRegistry.register(f"{_UTILS}.TransferBackend", _extended(TransferBackend), HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", kv_class, HookType.AROUND)
    HookRegistry.register(f"{_UTILS}.build_kv_layer_ids", kv_layer_ids, HookType.AFTER)
    register_resolution_hook(_LAYER_SPLIT_STEP)(allow_layer_split)
    register_resolution_hook(_PD_STEP)(check_arguments)
    if _shares_pools():
        for kind in _POOL_CLASSES:
            HookRegistry.register(f"{_POOLS}.{kind}._create_buffers", in_shared_memory, HookType.AROUND)
    if _DECODE in sys.modules:  # as in every process that serves requests: others need not load it for this
        HookRegistry.register(_MAKES_RECEIVER, hand_on_trace, HookType.AFTER)


def check_applied() -> None:
    """Raise `StateError` naming every hook that sglang would not call."""
    missing = faults(backend_name())
    if missing:
        raise StateError(
            f"pdlink's hooks into sglang did not take: {'; '.join(missing)}. Another plug-in may stand in the way "
            "(SGLANG_PLUGINS chooses which are loaded), or this sglang was changed"
        )


def faults(name: str) -> list[str]:
    """What is wrong with the hooks, a phrase each; empty when all took."""
    from sglang.srt.arg_groups import choices, resolution_hooks
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = []
    if name not in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        found.append(f"--disaggregation-transfer-backend does not offer {name!r}")
    if name not in {one.value for one in utils.TransferBackend}:
        found.append(f"TransferBackend has no {name!r}")
    for step, hook in ((_LAYER_SPLIT_STEP, allow_layer_split), (_PD_STEP, check_arguments)):
        if hook not in resolution_hooks._HOOKS.get(step, ()):
            found.append(f"the resolution step {step} is not wrapped")
    for attribute, hook in (("get_kv_class", kv_class), ("build_kv_layer_ids", kv_layer_ids)):
        if not _calls(getattr(utils, attribute), hook):
            found.append(f"{attribute} of {_UTILS} does not call pdlink")
    for kind in _POOL_CLASSES:
        target = f"{_POOLS}.{kind}._create_buffers"
        if target in HookRegistry._hooks and not _calls(
            getattr(sys.modules[_POOLS], kind)._create_buffers, in_shared_memory
        ):
            found.append(f"the buffers of {kind} are not made by pdlink")
    if _MAKES_RECEIVER in HookRegistry._hooks and not _calls(
        getattr(sys.modules[_DECODE], _QUEUE_CLASS)._create_receiver_and_enqueue, hand_on_trace
    ):
        found.append(f"{_QUEUE_CLASS} does not tell receivers the trace of their request")
    for attribute in ("TransferBackend", "get_kv_class", "build_kv_layer_ids"):
        ours = getattr(utils, attribute)
        stale = [module for module in _holders(attribute) if getattr(sys.modules[module], attribute) is not ours]
        found += [f"{module} still has sglang's own {attribute}" for module in stale]
    return found


# --- the hooks ----------------------------------------------------------------------------------------


def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """pdlink's classes for the backend that it serves; `KVArgs` is sglang's own."""
    if transfer_backend.value != backend_name() or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    if class_type.value == "bootstrap_server":
        from pdlink_engines.sglang.bootstrap import PdlinkKVBootstrapServer

        return PdlinkKVBootstrapServer
    from pdlink_engines.sglang.manager import PdlinkKVManager
    from pdlink_engines.sglang.receiver import PdlinkKVReceiver
    from pdlink_engines.sglang.sender import PdlinkKVSender

    return {"manager": PdlinkKVManager, "sender": PdlinkKVSender, "receiver": PdlinkKVReceiver}[class_type.value]


def kv_layer_ids(result: Any, **arguments: Any) -> Any:
    """Global layer ids, and what the pool says besides, where pdlink moves the KV; sglang's own ids elsewhere."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().disaggregation_transfer_backend != backend_name():
        return None
    from pdlink_engines.sglang.layer_ids import layer_ids_of

    pool, draft_pool = arguments["token_to_kv_pool"], arguments["draft_token_to_kv_pool"]
    return layer_ids_of(pool, draft_pool, arguments["num_draft_entries"])


def in_shared_memory(original: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the buffers of a CPU pool where other processes can map them."""
    if str(pool.device) != "cpu":
        return original(pool, *args, **kwargs)
    from pdlink_engines.sglang.shared_pools import shared_pools

    with shared_pools():
        return original(pool, *args, **kwargs)


def hand_on_trace(decode_request: Any, *_arguments: Any, **_more: Any) -> None:
    """Tell a receiver of pdlink's, which sglang makes with a room and nothing else, the trace of its request."""
    from pdlink_engines.sglang.receiver import PdlinkKVReceiver
    from pdlink_engines.sglang.traces import trace_parent_of

    if isinstance(decode_request.kv_receiver, PdlinkKVReceiver):
        decode_request.kv_receiver.trace_parent = trace_parent_of(decode_request.req.time_stats.trace_ctx)


def check_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what pdlink does not serve before any weights are loaded. Raises `SystemExit` with the reason."""
    if _serves(server_args):
        from pdlink_engines.sglang.plugin import refusal
        from pdlink_engines.sglang.settings import check_served

        try:
            check_served(server_args)
        except PdlinkError as error:
            raise refusal(str(error)) from error
    previous(server_args)


def allow_layer_split(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let layers be split over any transport of pdlink's: sglang's check of the backend's name is passed, every other
    one is kept."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    chosen = resolving_view(server_args)
    name = chosen.disaggregation_transfer_backend
    if name != backend_name() or name == _LAYER_SPLIT_NAME or not chosen.enable_dsa_cache_layer_split:
        previous(server_args)
        return
    declare_resolution(server_args, OWN_NAME, disaggregation_transfer_backend=_LAYER_SPLIT_NAME)
    try:
        previous(server_args)
    finally:
        declare_resolution(server_args, OWN_NAME, disaggregation_transfer_backend=name)


# --- inside -------------------------------------------------------------------------------------------


def _serves(server_args: Any) -> bool:
    """Whether a prefill or decode server with these arguments moves its KV with pdlink."""
    from sglang.srt.arg_groups.overrides import resolving_view

    chosen = resolving_view(server_args)
    return (
        chosen.disaggregation_mode in ("prefill", "decode") and chosen.disaggregation_transfer_backend == backend_name()
    )


def _extended(backends: type[enum.Enum]) -> type[enum.Enum]:
    """sglang's closed enum of backends with pdlink's name in it."""
    members = {one.name: one.value for one in backends}
    return enum.Enum(backends.__name__, {**members, OWN_NAME.upper(): OWN_NAME}, module=backends.__module__)


def _shares_pools() -> bool:
    """Whether CPU pools of this process are to be in shared memory: where `ipc` is asked for by name, and in processes
    that make pools, which have loaded their classes before any plug-in."""
    return "ipc" in os.environ.get("PDLINK_BACKENDS", "").replace(" ", "").split(",") and _POOLS in sys.modules


def _calls(function: Any, hook: Any) -> bool:
    """Whether `hook` is one of the functions that sglang's registry has put around `function`."""
    while function is not None:
        if any(cell.cell_contents is hook for cell in function.__closure__ or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _holders(attribute: str) -> list[str]:
    """Loaded modules of sglang that have the name, from wherever they imported it."""
    return [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("sglang.srt.") and attribute in vars(module or enum)
    ]
