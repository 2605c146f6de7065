"""Owns a plain paged pool for tests: every layer, in this process, nothing split. It stands beside the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pdlink.layout.components import CacheLayout
from pdlink_engines.reference.pool import ReadSpan


class SmallPool:
    """Pages of zeros in ordinary memory. It also checks that the engine keeps the order that the protocol states."""

    def __init__(self, layout: CacheLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.spans: list[tuple[tuple[int, ...], int]] = []
        self._regions = {
            (one.name, layer): torch.zeros((num_pages, one.page_bytes), dtype=torch.uint8)
            for one in layout.components
            for layer in one.layers
        }
        self._open = False
        self._stage: dict[tuple[str, int], str] = {}

    def begin_forward(self, spans: Sequence[ReadSpan]) -> None:
        assert not self._open
        self._open = True
        self._stage = {}
        for span in spans:
            size = self.layout.components[0].page_size
            assert len(span.pages) == -(-span.num_tokens // size)
            self.spans.append((tuple(span.pages), span.num_tokens))

    def read(self, component: str, layer: int) -> torch.Tensor:
        assert self._open
        self._stage[component, layer] = "read"
        return self._regions[component, layer]

    def write(self, component: str, layer: int, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        assert self._open
        assert self._stage[component, layer] == "read"
        self._stage[component, layer] = "written"
        for name, rows in fields.items():
            field = self.layout.component(component).field(name)
            assert rows.dtype == torch.uint8
            assert rows.shape == (len(slots), field.token_bytes)
            self._cells(component, layer, name, slots)[:] = rows.numpy()

    def rows(self, component: str, layer: int, field: str, slots: torch.Tensor) -> torch.Tensor:
        assert self._stage[component, layer] == "written"
        return torch.from_numpy(self._cells(component, layer, field, slots).gathered())

    def end_forward(self) -> None:
        assert self._open
        self._open = False

    def region_tensor(self, component: str, layer: int) -> torch.Tensor:
        return self._regions[component, layer]

    def _cells(self, component: str, layer: int, field: str, slots: torch.Tensor) -> _Cells:
        return _Cells(self, component, layer, field, slots)


class _Cells:
    """The bytes of some tokens of one field, by the field's own offsets and strides."""

    def __init__(self, pool: SmallPool, component: str, layer: int, field: str, slots: torch.Tensor) -> None:
        one = pool.layout.component(component)
        self._field = one.field(field)
        starts = self._field.starts(one.page_size)
        page, offset = slots.numpy() // one.page_size, slots.numpy() % one.page_size
        self._memory = pool.region_tensor(component, layer).numpy().reshape(-1)
        # [tokens, heads, bytes]
        within = torch.arange(self._field.bytes_per_token).numpy()
        self._where = (page[:, None] * one.page_bytes + starts[offset])[:, :, None] + within

    def __setitem__(self, _: slice, rows: object) -> None:
        self._memory[self._where] = rows.reshape(self._where.shape)  # type: ignore[attr-defined]

    def gathered(self) -> object:
        return self._memory[self._where].reshape(len(self._where), self._field.token_bytes)
