"""Owns `plan.json` of a dump: what the .npy files beside it are, in plain JSON. It writes no file."""

from __future__ import annotations

import json

from pdlink.layout.components import Component
from pdlink_engines.reference.demo.result import DemoResult
from pdlink_engines.reference.demo.spec import DemoSpec


def plan_of(spec: DemoSpec, result: DemoResult) -> str:
    """The plan as JSON.

    `received/REQUEST/COMPONENT.LAYER.npy` is uint8 [pages, page_bytes], in the order of the prompt; `expected` has the
    same of the unsplit run. A token t of a field starts at `offset + (t % page_size) * token_stride` of its page.
    With several decode ranks, each has a folder of its own under `received`, and pages with its heads: see `readers`.
    """
    layout = spec.layout()
    return json.dumps(
        {
            "model": spec.model,
            "page_size": spec.page_size,
            "num_layers": layout.num_layers,
            "components": [_component(one) for one in layout.components],
            "owners": [
                {"pp": rank.pp, "cp": rank.cp, "layers": layers}
                for rank, layers in zip(spec.prefill_ranks(), result.layers, strict=True)
            ],
            "readers": [_reader(spec, tp) for tp in range(spec.decode_tp)],
            "requests": [
                {
                    "request_id": one.request_id,
                    "num_tokens": one.num_tokens,
                    "decode_pages": one.pages[0],
                    "decode_pages_per_reader": [one.pages[tp] for tp in range(spec.decode_tp)],
                    "pulled_bytes": one.pulled_bytes,
                    "pulled_bytes_per_reader": [one.pulled[tp] for tp in range(spec.decode_tp)],
                    "tokens": one.tokens,
                }
                for one in result.requests
            ],
        },
        indent=1,
    )


def _reader(spec: DemoSpec, tp: int) -> dict[str, object]:
    heads = spec.kept_heads(tp)
    return {
        "tp": tp,
        "folder": str(spec.received_dir(tp).relative_to(spec.run_dir)),
        "heads": [heads.start, heads.stop] if heads else None,
        "components": [_component(one) for one in spec.decode_layout(tp).components],
    }


def _component(one: Component) -> dict[str, object]:
    return {
        "name": one.name,
        "dtype": one.dtype,
        "page_bytes": one.page_bytes,
        "layers": list(one.layers),
        "fields": [
            {
                "name": field.name,
                "offset": field.offset,
                "bytes_per_token": field.bytes_per_token,
                "token_stride": field.token_stride,
                "num_heads": field.num_heads,
                "head_stride": field.head_stride,
            }
            for field in one.fields
        ],
    }
