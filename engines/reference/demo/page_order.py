"""Owns the order in which the demo hands out pages: scattered, so that page ids and positions differ."""

from __future__ import annotations

import zlib

import numpy as np


def scattered_pages(num_pages: int, side: str) -> list[int]:
    """Every page of a pool once, in an order that depends on the side alone."""
    order = np.random.default_rng(zlib.crc32(side.encode())).permutation(num_pages)
    return [int(page) for page in order]
