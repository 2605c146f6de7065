"""Checks a folder that `pdlink demo --dump` wrote, with numpy and the standard library alone.

Every received page must equal the expected one in the bytes of the prompt's tokens, every layer must have exactly one
owner, and the bytes pulled must be those of the pages. Prints one line for each fault; exits 1 when there is any.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def token_mask(component: dict, page_size: int, num_pages: int, num_tokens: int) -> np.ndarray:
    """bool [num_pages, page_bytes]: bytes that belong to tokens of the prompt."""
    mask = np.zeros((num_pages, component["page_bytes"]), dtype=bool)
    for token in range(num_tokens):
        for field in component["fields"]:
            for head in range(field["num_heads"]):
                start = field["offset"] + (token % page_size) * field["token_stride"] + head * field["head_stride"]
                mask[token // page_size, start : start + field["bytes_per_token"]] = True
    return mask


def faults(folder: Path) -> list[str]:
    plan = json.loads((folder / "plan.json").read_text())
    found = []
    for component in plan["components"]:
        for layer in component["layers"]:
            owners = [one["cp"] for one in plan["owners"] if layer in one["layers"].get(component["name"], [])]
            if len(owners) != 1:
                found.append(f"{component['name']} layer {layer} has owners {owners}")
    for request in plan["requests"]:
        num_pages = -(-request["num_tokens"] // plan["page_size"])
        pulled = [0] * len(plan["owners"])
        for component in plan["components"]:
            mask = token_mask(component, plan["page_size"], num_pages, request["num_tokens"])
            for owner in plan["owners"]:
                pulled[owner["cp"]] += len(owner["layers"].get(component["name"], [])) * mask.size
            for layer in component["layers"]:
                name = f"{request['request_id']}/{component['name']}.{layer}.npy"
                ours, theirs = (np.load(folder / side / name) for side in ("expected", "received"))
                wrong = np.argwhere((ours != theirs) & mask)
                if ours.shape != theirs.shape or len(wrong):
                    found.append(f"{name}: page {wrong[0][0] if len(wrong) else '?'} differs")
        if pulled != request["pulled_bytes"]:
            found.append(f"{request['request_id']}: pulled {request['pulled_bytes']} bytes where pages have {pulled}")
        if len(set(request["decode_pages"])) != num_pages:
            found.append(f"{request['request_id']}: {num_pages} pages in {request['decode_pages']}")
    return found


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines) or "every page is right")
    sys.exit(1 if lines else 0)
