"""Owns `plan.json` of a dump: what the .npy files beside it are, in plain JSON. It writes no file."""

from __future__ import annotations

import json

from pdlink_engines.reference.demo.result import DemoResult
from pdlink_engines.reference.demo.spec import DemoSpec


def plan_of(spec: DemoSpec, result: DemoResult) -> str:
    """The plan as JSON.

    `received/REQUEST/COMPONENT.LAYER.npy` is uint8 [pages, page_bytes], in the order of the prompt; `expected` has the
    same of the unsplit run. A token t of a field starts at `offset + (t % page_size) * token_stride` of its page.
    """
    layout = spec.layout()
    return json.dumps(
        {
            "model": spec.model,
            "page_size": spec.page_size,
            "num_layers": layout.num_layers,
            "components": [
                {
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
                for one in layout.components
            ],
            "owners": [{"cp": rank, "layers": layers} for rank, layers in enumerate(result.layers)],
            "requests": [
                {
                    "request_id": one.request_id,
                    "num_tokens": one.num_tokens,
                    "decode_pages": one.pages,
                    "pulled_bytes": one.pulled_bytes,
                    "tokens": one.tokens,
                }
                for one in result.requests
            ],
        },
        indent=1,
    )
