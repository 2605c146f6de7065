"""Owns the way from tokens to bytes inside pages: reads and writes token rows by field. It holds no memory.

A page-shaped buffer is not indexed by token: a row's bytes lie where its component's fields say, which may be in
several places of the page.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdlink.errors import LayoutError
from pdlink.layout import Component, Field

_UNITS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


def read_rows(
    pages: torch.Tensor, component: Component, field: Field, page: torch.Tensor, row: torch.Tensor
) -> torch.Tensor:
    """uint8 [n, token_bytes], a copy: the bytes of `field` at (page[i], row[i]).

    `pages` is uint8 [num_pages, page_bytes] with pages whole; `page` and `row` are int64 [n].
    """
    unit = _unit(component, field)
    rows = _view(pages, component, field, unit)[page, row]
    return rows.reshape(len(page), field.token_bytes // unit).view(torch.uint8)


def write_rows(
    pages: torch.Tensor, component: Component, field: Field, page: torch.Tensor, row: torch.Tensor, data: torch.Tensor
) -> None:
    """Put `data`, uint8 [n, token_bytes], at (page[i], row[i]) of `field`. Of rows named twice, either may win."""
    if not len(page):
        return
    unit = _unit(component, field)
    flat = data.reshape(-1)
    if flat.data_ptr() % unit or flat.storage_offset() % unit:
        flat = flat.clone()
    typed = flat.view(unit_dtype(unit)).view(len(page), field.num_heads, field.bytes_per_token // unit)
    _view(pages, component, field, unit)[page, row] = typed


def put_fields(
    pages: torch.Tensor, component: Component, slots: torch.Tensor, fields: Mapping[str, torch.Tensor]
) -> None:
    """Put rows of several fields at `slots` (int64 [n], page * page_size + row)."""
    page, row = split_slots(slots, component.page_size)
    for name, data in fields.items():
        write_rows(pages, component, component.field(name), page, row, data)


def put_pages(target: torch.Tensor, page_ids: torch.Tensor, pages: torch.Tensor) -> None:
    """Copy `pages`, uint8 [n, page_bytes], to `page_ids` (int64 [n]) of `target`, padding and all."""
    dtype = unit_dtype(next((unit for unit, _ in _UNITS if target.shape[1] % unit == 0), 1))
    target.view(dtype).index_copy_(0, page_ids, pages.view(dtype))


def copy_rows(
    component: Component,
    source: torch.Tensor,
    source_page: torch.Tensor,
    target: torch.Tensor,
    target_page: torch.Tensor,
    row: torch.Tensor,
) -> None:
    """Copy whole token rows, every field of them, from pages of `source` to pages of `target`, same row in the page."""
    for field in component.fields:
        write_rows(target, component, field, target_page, row, read_rows(source, component, field, source_page, row))


def move_rows(pages: torch.Tensor, component: Component, source: torch.Tensor, target: torch.Tensor) -> None:
    """Move the rows at slots `source` to slots `target` (page * page_size + row, int64 [n]), field by field.

    All sources are read before any target is written, so the two sets may overlap.
    """
    source_page, source_row = split_slots(source, component.page_size)
    target_page, target_row = split_slots(target, component.page_size)
    for field in component.fields:
        rows = read_rows(pages, component, field, source_page, source_row)
        write_rows(pages, component, field, target_page, target_row, rows)


def split_slots(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] slots -> int64 [n] pages and int64 [n] rows in them."""
    page = torch.div(slots, page_size, rounding_mode="floor")
    return page, slots - page * page_size


def check_slots(slots: torch.Tensor, component: Component, num_pages: int) -> None:
    """Raise `LayoutError` unless `slots` is int64 [n] with every slot inside the pool."""
    check_slot_shape(slots)
    limit = num_pages * component.page_size
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= limit):
        raise LayoutError(
            f"slots span {int(slots.min())}..{int(slots.max())}, outside the {limit} slots of a pool of "
            f"{num_pages} pages of {component.page_size} tokens"
        )


def check_slot_shape(slots: torch.Tensor) -> None:
    """Raise `LayoutError` unless `slots` is int64 [n]."""
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise LayoutError(f"slots must be int64 [n], got {slots.dtype} {list(slots.shape)}")


def check_rows(component: Component, field: Field, data: torch.Tensor, num_rows: int) -> None:
    """Raise `LayoutError` unless `data` is uint8 [num_rows, token_bytes] of `field`."""
    if data.dtype != torch.uint8 or tuple(data.shape) != (num_rows, field.token_bytes):
        raise LayoutError(
            f"field {field.name!r} of {component.name!r} takes uint8 [{num_rows}, {field.token_bytes}], got "
            f"{data.dtype} {list(data.shape)}"
        )


def unit_dtype(unit: int) -> torch.dtype:
    return dict(_UNITS).get(unit, torch.uint8)


def _unit(component: Component, field: Field) -> int:
    """The widest machine word that divides every figure of the field: rows are moved in words, not bytes."""
    figures = (component.page_bytes, field.offset, field.bytes_per_token, field.token_stride, field.head_stride)
    return next((unit for unit, _ in _UNITS if not any(one % unit for one in figures)), 1)


def _view(pages: torch.Tensor, component: Component, field: Field, unit: int) -> torch.Tensor:
    """[num_pages, page_size, num_heads, words] over the field's bytes in place."""
    words = pages.view(unit_dtype(unit))
    return words.as_strided(
        (len(pages), component.page_size, field.num_heads, field.bytes_per_token // unit),
        (words.stride(0), field.token_stride // unit, field.head_stride // unit, 1),
        words.storage_offset() + field.offset // unit,
    )
