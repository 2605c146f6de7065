"""Owns regions: where the pages of one (component, layer) lie in memory. It allocates and registers nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdlink.errors import LayoutError
from pdlink.layout.components import CacheLayout

MAX_ADDRESS = (1 << 63) - 1


class MemoryKind(StrEnum):
    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that holds the pages of one component of one layer.

    Page p is the `page_bytes` bytes at `base_address + p * page_stride`. All figures are bytes and fit int64;
    `num_pages` is at least 1 (a rank that owns nothing has no region). The owner of the memory keeps it mapped
    until the region is deregistered. Raises `LayoutError`.
    """

    component: str
    layer: int
    base_address: int
    page_stride: int
    page_bytes: int
    num_pages: int
    memory: MemoryKind = MemoryKind.HOST
    device: int = 0

    def __post_init__(self) -> None:
        where = f"region of {self.component!r} layer {self.layer}"
        if self.num_pages < 1 or self.page_bytes < 1 or self.layer < 0:
            raise LayoutError(
                f"{where} has num_pages={self.num_pages} and page_bytes={self.page_bytes}; a rank that owns nothing "
                "registers nothing"
            )
        if self.page_stride < self.page_bytes:
            raise LayoutError(f"{where} has page_stride={self.page_stride} below page_bytes={self.page_bytes}")
        if self.base_address < 1 or self.end_address > MAX_ADDRESS:
            raise LayoutError(f"{where} spans addresses {self.base_address:#x}..{self.end_address:#x}")
        if self.page_stride > MAX_ADDRESS or self.device < 0:
            raise LayoutError(f"{where} has page_stride={self.page_stride} and device={self.device}")

    @property
    def end_address(self) -> int:
        """First address past the last page."""
        return self.base_address + (self.num_pages - 1) * self.page_stride + self.page_bytes

    @property
    def nbytes(self) -> int:
        return self.end_address - self.base_address

    @property
    def is_dense(self) -> bool:
        """Whether neighbouring pages touch, so that a run of pages is one range."""
        return self.page_stride == self.page_bytes


def check_region(region: Region, layout: CacheLayout) -> None:
    """Raise `LayoutError` unless `region` holds pages of a layer that `layout` has."""
    component = layout.component(region.component)
    if region.layer not in component.layers:
        raise LayoutError(f"component {component.name!r} has no layer {region.layer}")
    if region.page_bytes != component.page_bytes:
        raise LayoutError(
            f"region of {component.name!r} layer {region.layer} has page_bytes={region.page_bytes}, the layout says "
            f"{component.page_bytes}"
        )
