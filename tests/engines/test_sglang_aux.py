"""Rows of metadata that the sglang plug-in sends along: whole, of the same length, within the limit."""

from __future__ import annotations

import numpy as np
import pytest

from pdlink.errors import InvalidInput, LayoutError
from pdlink_engines.sglang.aux_rows import AuxBuffer, AuxRows

WAIT_S = 60.0


def rows(*widths: int, num_rows: int = 4) -> tuple[list[np.ndarray], AuxRows]:
    arrays = [np.zeros((num_rows, width), dtype=np.uint8) for width in widths]
    buffers = [AuxBuffer(one.ctypes.data, one.shape[1], num_rows) for one in arrays]
    return arrays, AuxRows(buffers, 1 << 10)


def test_a_row_of_every_buffer_goes_over_and_no_other() -> None:
    ours, sent = rows(64, 128)
    theirs, received = rows(64, 128)
    for number, array in enumerate(ours):
        array[:] = np.arange(array.size, dtype=np.uint8).reshape(array.shape) + number
    received.write(3, sent.read(1))
    for mine, got in zip(ours, theirs, strict=True):
        assert (got[3] == mine[1]).all()
        assert not got[:3].any()


def test_metadata_of_another_length_is_refused_and_nothing_written() -> None:
    arrays, received = rows(64, 128)
    with pytest.raises(InvalidInput, match="191 bytes of metadata, a row here has 192"):
        received.write(0, bytes([1]) * 191)
    assert not any(array.any() for array in arrays)


def test_a_row_that_is_not_there_is_refused() -> None:
    _, one = rows(64)
    for index in (-1, 4):
        with pytest.raises(InvalidInput, match="outside the 4 rows"):
            one.read(index)


def test_metadata_over_the_limit_is_refused_and_the_widest_buffer_named() -> None:
    with pytest.raises(LayoutError, match=r"1088 bytes, over the limit of 1024.*aux_data_ptrs\[1\] alone"):
        rows(64, 1024)
