"""Owns the layout fingerprint: the fields on which two sides must agree, and the difference between two of them.

Who owns which layer, and how many pages a pool has, are not part of it: those may differ between sides.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from pdlink.errors import Mismatch
from pdlink.layout.components import CacheLayout, Component

_FIXES = {
    "page_size": "start both servers with the same page size",
    "page_bytes": "use the same KV cache dtype and storage format on both servers",
    "dtype": "use the same KV cache dtype on both servers",
    "layers": "serve the same model on both servers",
    "num_layers": "serve the same model on both servers",
    "fields": "use the same cache storage format on both servers",
    "heads": "serve the same model on both servers, and give its components total_heads where tp splits their heads",
    "page_group": "use engines whose components share page lists alike",
}
_ABSENT = "absent"


@dataclass(frozen=True)
class Fingerprint:
    """Named facts of a layout as text, ordered by importance, and a digest over all of them."""

    items: tuple[tuple[str, str], ...]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; equal digests mean equal items."""
        hasher = hashlib.sha256()
        for name, value in self.items:
            hasher.update(f"{len(name)}:{name}={len(value)}:{value};".encode())
        return hasher.digest()[:16]


def fingerprint(layout: CacheLayout) -> Fingerprint:
    """The fingerprint of `layout`. Draft components are left out: either side may lack a draft model."""
    items = [("num_layers", str(layout.num_layers))]
    for component in sorted(layout.components, key=lambda one: one.name):
        if not component.is_draft:
            items += _component_items(component)
    return Fingerprint(tuple(items))


def compare(prefill: Fingerprint, decode: Fingerprint) -> tuple[Mismatch, ...]:
    """Every field that differs, in the order of the fingerprint; empty when the sides agree."""
    ours, theirs = dict(prefill.items), dict(decode.items)
    names = list(ours) + [name for name in theirs if name not in ours]
    return tuple(
        Mismatch(name, ours.get(name, _ABSENT), theirs.get(name, _ABSENT), _FIXES.get(name.split(".")[-1], ""))
        for name in names
        if ours.get(name) != theirs.get(name)
    )


def _component_items(component: Component) -> list[tuple[str, str]]:
    """Of a component by heads a side may hold some only, in an order of its own: what both must agree on is how many
    there are and what one of them takes."""
    if component.is_by_heads:
        facts = {
            "page_size": str(component.page_size),
            "dtype": component.dtype,
            "layers": ",".join(map(str, component.layers)),
            "page_group": component.page_group,
            "heads": str(component.model_heads),
            "fields": "; ".join(sorted(f"{one.name}:{one.bytes_per_token}B" for one in component.fields)),
        }
        return [(f"{component.name}.{name}", value) for name, value in facts.items()]
    fields = "; ".join(
        f"{one.name}@{one.offset}:{one.bytes_per_token}B/{one.token_stride}x{one.num_heads}/{one.head_stride}"
        for one in sorted(component.fields, key=lambda one: (one.offset, one.name))
    )
    facts = {
        "page_size": str(component.page_size),
        "dtype": component.dtype,
        "page_bytes": str(component.page_bytes),
        "layers": ",".join(map(str, component.layers)),
        "page_group": component.page_group,
        "fields": fields,
    }
    return [(f"{component.name}.{name}", value) for name, value in facts.items()]
