"""Pages on GPUs of which readers take some heads or some tokens: the bytes, by every way, and their digests."""

import contextlib
from dataclasses import replace

import pytest

from pdlink.layout.regions import MemoryKind
from tests.backends.needs import nixl_missing
from tests.link.rig import Site
from tests.link.staged import assert_slots_back
from tests.topology.cache import Pool
from tests.topology.sockets import Pair
from tests.topology.test_unasked import by_heads, by_tokens, from_heads

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


class OnDevice(Pool):
    """A pool whose memory is a tensor on a GPU; `rows` is a picture of it on the host."""

    def on(self, device):
        import torch

        if self.segment:
            self.tensor = torch.from_numpy(self.segment.array.copy()).to(f"cuda:{device}")
            torch.cuda.synchronize(device)
            moved = self.tensor.data_ptr() - self.segment.address
            places = {"memory": MemoryKind.CUDA, "device": device}
            self.regions = tuple(replace(one, base_address=one.base_address + moved, **places) for one in self.regions)
        return self

    def upload(self):
        import torch

        if self.segment:
            self.tensor.copy_(torch.from_numpy(self.segment.array.copy()))
            torch.cuda.synchronize(self.tensor.device)

    def download(self):
        if self.segment:
            self.segment.array[:] = self.tensor.cpu().numpy()


@pytest.mark.parametrize("make", [by_heads, from_heads, by_tokens])
@pytest.mark.parametrize(
    ("backend", "way"), [("ipc", "direct"), ("ipc", "staged"), ("nixl", "direct"), ("nixl", "staged")]
)
@pytest.mark.parametrize("digests", ["off", "auto", "xxh3-64"])
def test_parts_of_pages_on_gpus_come_out(make, backend, way, digests):
    import torch

    if backend == "nixl" and (reason := nixl_missing()):
        pytest.skip(reason)
    settings = {"staging_slots": 4, "staging_device_slot_bytes": 1 << 20}
    if digests != "off":
        settings |= {"verify_digests": True, "digest_kind": digests}
    last = torch.cuda.device_count() - 1
    with contextlib.ExitStack() as stack:
        site = Site(stack, backends=backend, way=way, **settings)
        pair = Pair(
            stack,
            site,
            make(),
            lambda layout, owned, is_decode: OnDevice(layout, owned, 12, 3).on(last if is_decode else 0),
        )
        dcp = pair.topology.taken.sizes.dcp
        for number, source in enumerate(([3, 0, 7, 8], [11, 2])):
            moved = pair.move(f"t{number}", source, [5, 1, 9, 10][: len(source) // dcp])
            assert moved == {"mapped" if (backend, way) == ("ipc", "direct") else way}
        if way == "staged":
            assert_slots_back(pair.nodes)
