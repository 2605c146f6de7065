"""One interface for copies, whatever memory they are in; a device that is not there is named."""

from __future__ import annotations

import numpy as np
import pytest

from pdlink.backends.copiers import HostCopier, open_copier
from pdlink.errors import BackendUnavailable
from pdlink.layout.regions import MemoryKind
from pdlink.transfer.packing import PageTable, pack, pack_runs

NO_DEVICE = 4096


def test_host_memory_is_copied_by_the_calling_thread_and_over_on_return() -> None:
    source = np.arange(8 * 64, dtype=np.uint8).reshape(8, 64)
    slot = np.zeros((3, 64), dtype=np.uint8)
    base, size = (np.array([one], dtype=np.int64) for one in (source.__array_interface__["data"][0], 64))
    batch = pack(pack_runs(np.array([5, 0, 2])), PageTable(base, size, size), slot.__array_interface__["data"][0])
    copier = open_copier(MemoryKind.HOST)
    assert isinstance(copier, HostCopier)
    copying = copier.start(batch)
    assert copying.is_over
    copying.wait()
    assert np.array_equal(slot, source[[5, 0, 2]])
    slot[:] = 0
    assert not copier.copy(batch, lambda: True)
    assert not slot.any()
    copier.close()
    copier.close()


def test_a_device_that_is_not_there_has_no_copier() -> None:
    with pytest.raises(BackendUnavailable, match="device"):
        open_copier(MemoryKind.CUDA, NO_DEVICE)
