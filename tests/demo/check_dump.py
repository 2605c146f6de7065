"""Checks a folder that `pdlink demo --dump` wrote, with numpy and the standard library alone.

Every page that a decode rank received must equal the expected one in the bytes of the prompt's tokens, of the heads
that the rank keeps; every layer must have exactly one owner, and the bytes pulled must be those of the pages. Prints
one line for each fault; exits 1 when there is any.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def token_bytes(component: dict, page_size: int, num_tokens: int, heads: list | None) -> np.ndarray:
    """int64 [tokens, bytes of one]: where the bytes of a prompt's tokens lie in its pages, laid end to end.

    `heads` are those to count, of fields that have several.
    """
    tokens = np.arange(num_tokens)
    starts = tokens // page_size * component["page_bytes"]
    columns = []
    for field in component["fields"]:
        begin, end = heads or (0, field["num_heads"])
        for head in range(begin, end):
            first = starts + field["offset"] + tokens % page_size * field["token_stride"] + head * field["head_stride"]
            columns.append(first[:, None] + np.arange(field["bytes_per_token"]))
    return np.concatenate(columns, axis=1)


def owner_faults(plan: dict) -> list[str]:
    found = []
    for component in plan["components"]:
        for layer in component["layers"]:
            owners = [one["cp"] for one in plan["owners"] if layer in one["layers"].get(component["name"], [])]
            if len(owners) != 1:
                found.append(f"{component['name']} layer {layer} has owners {owners}")
    return found


def reader_faults(folder: Path, plan: dict, request: dict, number: int) -> list[str]:
    found = []
    reader, page_size, num_tokens = plan["readers"][number], plan["page_size"], request["num_tokens"]
    num_pages = -(-num_tokens // page_size)
    pulled = [0] * len(plan["owners"])
    for component, whole in zip(reader["components"], plan["components"], strict=True):
        ours = token_bytes(whole, page_size, num_tokens, reader["heads"])
        theirs = token_bytes(component, page_size, num_tokens, None)
        for at, owner in enumerate(plan["owners"]):
            pulled[at] += len(owner["layers"].get(component["name"], [])) * num_pages * component["page_bytes"]
        for layer in component["layers"]:
            name = f"{request['request_id']}/{component['name']}.{layer}.npy"
            expected, received = np.load(folder / "expected" / name), np.load(folder / reader["folder"] / name)
            wrong = np.argwhere(expected.reshape(-1)[ours] != received.reshape(-1)[theirs])
            if len(expected) != len(received) or len(wrong):
                page = int(wrong[0][0]) // page_size if len(wrong) else "?"
                found.append(f"{reader['folder']}/{name}: page {page} differs")
    if pulled != request["pulled_bytes_per_reader"][number]:
        found.append(f"{request['request_id']}: decode rank {number} pulled other bytes than its pages have")
    if len(set(request["decode_pages_per_reader"][number])) != num_pages:
        found.append(f"{request['request_id']}: decode rank {number} used pages twice")
    return found


def faults(folder: Path) -> list[str]:
    plan = json.loads((folder / "plan.json").read_text())
    found = owner_faults(plan)
    for request in plan["requests"]:
        for number in range(len(plan["readers"])):
            found += reader_faults(folder, plan, request, number)
    return found


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines) or "every page is right")
    sys.exit(1 if lines else 0)
