"""Pages on devices, of pretence, of which readers take some heads or tokens: kernels alone move and digest them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from pdlink.backends import device_mix
from pdlink.layout.regions import MemoryKind
from tests.link.rig import Site
from tests.link.staged import assert_slots_back
from tests.link.test_digests import MixOnHost
from tests.pretend_gpu import pretend_gpus
from tests.topology.cache import Pool
from tests.topology.sockets import Pair
from tests.topology.strategies import Topology
from tests.topology.test_unasked import by_heads, by_tokens, from_heads

pytestmark = pytest.mark.backend("ipc")


@pytest.mark.parametrize("make", [by_heads, from_heads, by_tokens])
@pytest.mark.parametrize(("setting", "way"), [("direct", "mapped"), ("staged", "staged")])
def test_parts_of_pages_on_devices_come_out_and_are_digested_there(
    make: Callable[[], Topology], setting: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixOnHost, "opened", [], raising=False)
    monkeypatch.setattr(device_mix, "DeviceMix", MixOnHost)
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(pretend_gpus())
        options = {"staging_slots": 3, "staging_device_slot_bytes": 1 << 16, "verify_digests": True}
        site = Site(stack, backends="ipc", way=setting, confirm_timeout_s=30.0, **options)
        pair = Pair(
            stack,
            site,
            make(),
            lambda layout, owned, is_decode: Pool(
                layout, owned, 12, 3, memory=MemoryKind.CUDA, device=int(is_decode), allocate=driver.allocate
            ),
        )
        dcp = pair.topology.taken.sizes.dcp
        for number, source in enumerate(([3, 0, 7, 8], [11, 2])):
            before = driver.num_kernels
            assert pair.move(f"t{number}", source, [5, 1, 9, 10][: len(source) // dcp]) == {way}
            assert driver.num_kernels > before
        assert set(MixOnHost.opened) == {0, 1}
        if way == "staged":
            assert_slots_back(pair.nodes)
