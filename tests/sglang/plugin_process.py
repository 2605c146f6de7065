"""Owns one process of sglang that loads its plug-ins, and says what came of it, as JSON on its last line.

    python -m tests.sglang.plugin_process WHAT

WHAT damages something first: `nothing`, `no-kv-class`, `no-layer-ids`, `no-enum`, `no-trace`, `other-version`,
`no-module`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any


def damage(what: str) -> None:
    """Make one thing go wrong as it would for a user: another plug-in, another sglang, a broken install."""
    if what == "other-version":
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.5.24" if name == "sglang" else real(name)
    if what == "no-module":
        sys.modules["pdlink_engines.sglang.hooks"] = None
    targets = {
        "no-kv-class": "get_kv_class",
        "no-layer-ids": "build_kv_layer_ids",
        "no-enum": "TransferBackend",
        "no-trace": "_create_receiver_and_enqueue",
    }
    if what in targets:
        from sglang.srt.plugins.hook_registry import HookRegistry

        apply = HookRegistry._apply_target.__func__

        def fail(cls: Any, target: str, hooks: Any) -> None:
            if target.endswith("." + targets[what]):
                raise RuntimeError("this target cannot be patched")
            apply(cls, target, hooks)

        HookRegistry._apply_target = classmethod(fail)


def main() -> None:
    damage(sys.argv[1])
    import sglang.srt.managers.disagg_service as service
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.disaggregation.decode as decode
    import sglang.srt.disaggregation.prefill as prefill
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    names = [name for name in ("pdlink", "mooncake", "nixl") if name in {one.value for one in TransferBackend}]
    print(
        json.dumps(
            {
                "choices": list(DISAGG_TRANSFER_BACKEND_CHOICES),
                "served": [name for name in names if _module(get_kv_class(TransferBackend(name), KVClassType.MANAGER))],
                "shared": _is_shared(),
                "same": prefill.get_kv_class is decode.get_kv_class is service.get_kv_class is get_kv_class,
                "kinds": [
                    get_kv_class(TransferBackend(names[0]), kind).__name__
                    for kind in KVClassType
                    if names[0] == "pdlink"
                ],
            }
        )
    )


def _is_shared() -> bool:
    """Whether a pool that sglang makes now can be mapped by other processes."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from pdlink.backends.shm import locate

    pool = MHATokenToKVPool(
        256,
        page_size=16,
        dtype=torch.float32,
        head_num=2,
        head_dim=16,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    pool.k_buffer[1][7] = 3.0
    addresses, lengths, _ = pool.get_contiguous_buf_infos()
    places = [locate(address, nbytes) for address, nbytes in zip(addresses, lengths, strict=True)]
    if any((place is None) != (places[0] is None) for place in places):
        raise AssertionError(f"some buffers are shared and some are not: {places}")
    return places[0] is not None


def _module(kind: type) -> bool:
    return kind.__module__.startswith("pdlink_engines.sglang.")


if __name__ == "__main__":
    main()
