"""Owns one resolution of sglang's server arguments for a DSA model with split layers, as JSON on its last line.

    python -m tests.sglang.resolve_process BACKEND [ARGUMENT=JSON ...]

`SGLANG_SEEMS` in the environment is taken for the version of sglang.

The check of the GPU's generation is answered for it, since there is none here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

MODEL = Path(__file__).parent / "models" / "tiny-dsa"


def main() -> None:
    if "SGLANG_SEEMS" in os.environ:
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: os.environ["SGLANG_SEEMS"] if name == "sglang" else real(name)
    import torch

    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    stated = {
        "model_path": str(MODEL),
        "load_format": "dummy",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "tp_size": 2,
        "attn_cp_size": 2,
        "enable_prefill_cp": True,
        "cp_strategy": "interleave",
        "enable_dsa_cache_layer_split": True,
        "disaggregation_mode": "prefill",
        "disaggregation_transfer_backend": sys.argv[1],
        "mem_fraction_static": 0.5,
        "kv_cache_dtype": "bfloat16",
    }
    stated |= {name: json.loads(value) for name, value in (one.split("=", 1) for one in sys.argv[2:])}
    arguments = ServerArgs(**stated)
    try:
        arguments.resolve_once()
    except (ValueError, AssertionError) as error:
        print(json.dumps({"refused": str(error)}))
        return
    view = resolving_view(arguments)
    print(json.dumps({"backend": view.disaggregation_transfer_backend, "split": view.enable_dsa_cache_layer_split}))


if __name__ == "__main__":
    main()
