"""Owns the shape in which engines know a cache: token-shaped buffers by layer, buffer tables, copies to host and back.

It holds no memory and decides nothing: every byte is the pool's. sglang's MLA and DSA pools are asked for these very
things, so that a wrapper of such a pool translates names and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pdlink.errors import LayoutError
from pdlink.layout import Component
from pdlink.memory.sharded_pool import LayerShardedPool


@dataclass(frozen=True, slots=True)
class BufferTable:
    """Owned buffers of one component for registration with a transport, by increasing layer: one entry for each.

    `nbytes` is a whole buffer, `page_bytes` one page of it (sglang's data_lens and item_lens).
    """

    layers: tuple[int, ...]
    addresses: tuple[int, ...]
    nbytes: tuple[int, ...]
    page_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Rows of owned layers in host memory: component -> layer -> field -> uint8 [num_rows, token_bytes]."""

    num_rows: int
    rows: Mapping[str, Mapping[int, Mapping[str, torch.Tensor]]]

    @property
    def nbytes(self) -> int:
        return sum(
            data.nbytes for layers in self.rows.values() for fields in layers.values() for data in fields.values()
        )


class CacheView:
    """One pool as an engine's attention sees it. Threads and collectives as `LayerShardedPool` says.

    `dtypes` gives the element type in which a component is handed out (default: uint8). A key buffer of a component
    whose tokens follow each other is [num_tokens, num_heads, elements of a head], a page-shaped one stays uint8
    [num_pages, page_bytes]. All are views, and live as long as what `LayerShardedPool.read` gives.
    """

    def __init__(self, pool: LayerShardedPool, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        self.pool = pool
        self._dtypes = dict(dtypes or {})
        for name, dtype in self._dtypes.items():
            _check_dtype(pool.layout.component(name), dtype)

    def wait_for_loads(self, wait: Callable[[str, int], None] | None) -> None:
        """Before rows of an owned layer are used, `wait(component, layer)` returns once its load from a host is there,
        or has made the device wait for it. None: nothing is being loaded."""
        self.pool.wait_for_loads(wait)

    def key_buffer(self, layer: int) -> torch.Tensor:
        """`latent` or `k` of a layer. Collective as `read`."""
        return self.buffer("latent" if self._has("latent") else "k", layer)

    def value_buffer(self, layer: int, num_elements: int | None = None) -> torch.Tensor:
        """`v` of a layer; with MLA the first `num_elements` of each latent row, which are its value."""
        if not self._has("latent"):
            return self.buffer("v", layer)
        whole = self.buffer("latent", layer)
        return whole if num_elements is None else whole[..., :num_elements]

    def index_buffer(self, layer: int) -> torch.Tensor:
        """Indexer keys of a layer, page-shaped: uint8 [num_pages, page_bytes]."""
        return self.pool.read("index_k", layer)

    def buffer(self, component: str, layer: int) -> torch.Tensor:
        """Any component of a layer, shaped by tokens. Raises `LayoutError` where tokens do not follow each other."""
        about = self.pool.layout.component(component)
        heads = _heads_of(about)
        rows = self.pool.read(component, layer).view(self.pool.num_pages * about.page_size, heads, -1)
        return rows.view(self._dtypes.get(component, torch.uint8))

    def buffers_of(self, component: str) -> BufferTable:
        """The owned buffers of a component, in layer order; empty where this rank owns none."""
        regions = sorted((one for one in self.pool.regions() if one.component == component), key=lambda one: one.layer)
        return BufferTable(
            tuple(one.layer for one in regions),
            tuple(one.base_address for one in regions),
            tuple(one.nbytes for one in regions),
            tuple(one.page_bytes for one in regions),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's owned buffers, which is what the cache takes; scratch is `pool.nbytes_scratch`."""
        return self.pool.nbytes_owned

    def copy_out(self, slots: torch.Tensor, components: Sequence[str] | None = None) -> HostCopy:
        """A copy of token rows of all owned layers in host memory. Layers of other ranks are theirs to copy.

        `slots` is int64 [n], page * page_size + row. Outside a forward; waits for the device.
        """
        names = [one.name for one in self.pool.layout.components] if components is None else components
        rows = {
            name: {
                layer: {
                    field.name: self.pool.owned_rows(name, layer, field.name, slots).cpu()
                    for field in self.pool.layout.component(name).fields
                }
                for layer in self.pool.owned.get(name, ())
            }
            for name in names
        }
        return HostCopy(len(slots), rows)

    def copy_in(self, copy: HostCopy, slots: torch.Tensor) -> None:
        """Put back at `slots` what `copy_out` gave, in the same order. All ranks of a shard group call it alike.

        What scratch holds of the touched layers is invalid from then on. Raises `LayoutError` for another row count.
        """
        if len(slots) != copy.num_rows:
            raise LayoutError(f"a copy of {copy.num_rows} rows cannot be put at {len(slots)} slots")
        for name in copy.rows:
            for layer in self.pool.layout.component(name).layers:
                self.pool.restore_rows(name, layer, slots, copy.rows[name].get(layer))

    def _has(self, component: str) -> bool:
        return any(one.name == component for one in self.pool.layout.components)


def _heads_of(about: Component) -> int:
    """Heads of a component whose one field's tokens and heads follow each other without a gap."""
    field = about.fields[0]
    dense = (
        len(about.fields) == 1
        and field.offset == 0
        and field.token_stride == field.token_bytes
        and (field.num_heads == 1 or field.head_stride == field.bytes_per_token)
        and about.page_bytes == about.page_size * field.token_bytes
    )
    if not dense:
        raise LayoutError(f"tokens of {about.name!r} do not follow each other in its pages; read it by pages")
    return field.num_heads


def _check_dtype(about: Component, dtype: torch.dtype) -> None:
    nbytes = about.fields[0].bytes_per_token
    if nbytes % dtype.itemsize:
        raise LayoutError(
            f"{about.name!r} has {nbytes} bytes a token and head, no multiple of {dtype} ({dtype.itemsize})"
        )
