"""Whole requests between device pools, by every way, while the engines' own streams stand still."""

import contextlib
import ctypes

import numpy as np
import pytest

from pdlink.errors import TransferFailed
from pdlink.layout.regions import MemoryKind
from pdlink.transfer.states import SenderState
from tests.backends.needs import nixl_missing
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Site, assert_all, assert_whole, make_layout
from tests.link.staged import assert_slots_back

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

NUM_PAGES = 96
WAYS = [("ipc", "direct"), ("ipc", "staged"), ("nixl", "direct"), ("nixl", "staged")]


class DeviceSite(Site):
    """Prefill ranks keep their pools on the first GPU, decode ranks on the last."""

    def pool(self, layout, owned, num_pages=16, page_gap=0):
        import torch

        from pdlink.testing.device_pool import DevicePool

        is_decode = all(set(owned.get(one.name, ())) == set(one.layers) for one in layout.components)
        device = torch.cuda.device_count() - 1 if is_decode else 0
        pool = DevicePool(layout, owned, num_pages, torch.device("cuda", device), page_gap=page_gap)
        self._stack.callback(pool.close)
        return pool


@contextlib.contextmanager
def blocked_streams():
    """Every GPU's default stream, and one more, wait for a flag that is set at the end."""
    import torch

    from pdlink.backends.cuda_driver import PinnedBlock, call, on_device

    flag = PinnedBlock(64, 0)
    view = np.ctypeslib.as_array((ctypes.c_uint32 * 16).from_address(flag.address))
    view[:] = 0
    streams = []
    for device in range(torch.cuda.device_count()):
        streams += [torch.cuda.default_stream(device), torch.cuda.Stream(device)]
        with on_device(device):
            for stream in streams[-2:]:
                call("cuStreamWaitValue32", stream.cuda_stream, flag.address, 1, 0)
    try:
        yield streams
    finally:
        view[:] = 1
        for stream in streams:
            stream.synchronize()
        flag.close()


@pytest.mark.parametrize(("backend", "way"), WAYS)
def test_a_request_ends_well_while_the_streams_of_both_engines_are_blocked(backend, way):
    if backend == "nixl" and (reason := nixl_missing()):
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        site = DeviceSite(stack, backends=backend, way=way, staging_slots=4, staging_device_slot_bytes=2 << 20)
        layout = make_layout(6)
        owners = site.prefill(layout, 2, num_pages=128)
        decode = site.decode(layout, num_pages=128)
        assert {one.memory for one in decode.pool.regions} == {MemoryKind.CUDA}
        for name in ("warm", "blocked"):
            target = {"kv": site.scatter(decode.pool, NUM_PAGES)}
            pages = [site.scatter(owner.pool, NUM_PAGES) for owner in owners]
            senders = [owner.open(name, {"kv": ids}) for owner, ids in zip(owners, pages, strict=True)]
            receiver = decode.worker.receive(name, site.instance, target, NUM_PAGES * PAGE_SIZE)
            with blocked_streams() if name == "blocked" else contextlib.nullcontext([]) as streams:
                for sender, ids in zip(senders, pages, strict=True):
                    sender.publish(ids, last=True)
                result = receiver.wait(DEADLINE_S)
                assert not any(stream.query() for stream in streams)
            assert {str(one) for ways in result.ways.values() for one in ways} == {
                "mapped" if (backend, way) == ("ipc", "direct") else way
            }
            assert_all(senders, SenderState.RELEASED)
            assert decode.pool.find_wrong(name, target) is None
            if name == "warm":
                assert_whole(decode, name, target)
        if way == "staged":
            assert_slots_back([decode.node, *(owner.node for owner in owners)])


@pytest.mark.parametrize("kind", ["auto", "xxh3-64"])
def test_digests_of_device_pages_are_made_and_compared_while_the_streams_of_both_engines_are_blocked(kind):
    """By a reduction there under `auto`, else on the host."""
    with contextlib.ExitStack() as stack:
        site = DeviceSite(stack, backends="ipc", verify_digests=True, digest_kind=kind)
        layout = make_layout(3)
        owners = site.prefill(layout, 2, num_pages=64)
        assert {owner.worker._facts.digest_kind for owner in owners} == {"mix64" if kind == "auto" else kind}
        decode = site.decode(layout, num_pages=32)
        for name in ("warm", "blocked"):
            target = {"kv": site.scatter(decode.pool, 20)}
            pages = [site.scatter(owner.pool, 20) for owner in owners]
            senders = [owner.open(name, {"kv": ids}) for owner, ids in zip(owners, pages, strict=True)]
            receiver = decode.worker.receive(name, site.instance, target, 20 * PAGE_SIZE)
            with blocked_streams() if name == "blocked" else contextlib.nullcontext([]) as streams:
                for sender, ids in zip(senders, pages, strict=True):
                    sender.publish(ids, last=True)
                receiver.wait(DEADLINE_S)
                assert not any(stream.query() for stream in streams)
            assert_all(senders, SenderState.RELEASED)
            assert decode.pool.find_wrong(name, target) is None


class HalfOnHost(DeviceSite):
    """One side's pools are in host memory."""

    host_side = "prefill"

    def pool(self, layout, owned, num_pages=16, page_gap=0):
        is_decode = all(set(owned.get(one.name, ())) == set(one.layers) for one in layout.components)
        maker = Site if self.host_side == ("decode" if is_decode else "prefill") else DeviceSite
        return maker.pool(self, layout, owned, num_pages, page_gap)


@pytest.mark.parametrize("kind", ["xxh3-64", "mix64"])
@pytest.mark.parametrize("host_side", ["prefill", "decode", "neither"])
def test_damage_is_found_whatever_the_kind_and_the_memory_of_either_side(host_side, kind):
    """One request goes well. Of the next a page is written between its digest and the pull."""
    if reason := nixl_missing():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        site = HalfOnHost(stack, backends="nixl", way="direct", verify_digests=True, digest_kind=kind)
        site.host_side = host_side
        layout = make_layout(3)
        owners = site.prefill(layout, 2, num_pages=32)
        decode = site.decode(layout, num_pages=32)
        target = {"kv": site.scatter(decode.pool, 8)}
        for name in ("well", "badly"):
            receiver = decode.worker.receive(name, site.instance, target, 8 * PAGE_SIZE)
            senders = [owner.open(name, {"kv": list(range(8))}) for owner in owners]
            if name == "badly":
                facts, pool = owners[1].worker._facts, owners[1].pool
                facts.__dict__["digest"] = then_write(facts.digest, pool, 5)
            for sender in senders:
                sender.publish(list(range(8)), last=True)
            if name == "well":
                receiver.wait(DEADLINE_S)
                assert_whole(decode, name, target)
                assert_all(senders, SenderState.RELEASED)
        says = rf"layer 2, page {target['kv'][5]} differs .*: {kind} [0-9a-f]{{16}} here, [0-9a-f]{{16}} there"
        with pytest.raises(TransferFailed, match=says):
            receiver.wait(DEADLINE_S)
        assert_all(senders, SenderState.ABORTED)


def then_write(digest, pool, page):
    """Make the digests of pages, then let an engine that tells nobody write one of them."""

    def digest_and_write(*asked):
        made = digest(*asked)
        pool.fill("someone else", {"kv": [page]})
        return made

    return digest_and_write


def test_nothing_is_told_before_the_device_event_of_a_publication():
    import torch

    with contextlib.ExitStack() as stack:
        site = DeviceSite(stack, backends="ipc")
        layout = make_layout(2)
        (owner,) = site.prefill(layout, 1, num_pages=32)
        decode = site.decode(layout, num_pages=32)
        target = {"kv": site.scatter(decode.pool, 8)}
        receiver = decode.worker.receive("t", site.instance, target, 8 * PAGE_SIZE)
        pages = site.scatter(owner.pool, 8)
        sender = owner.open("t", {"kv": pages})
        with blocked_streams() as streams:
            event = torch.cuda.Event()
            event.record(streams[1])
            sender.publish(pages, last=True, ready=event)
            with pytest.raises(TimeoutError):
                receiver.wait(0.5)
        receiver.wait(DEADLINE_S)
        assert_whole(decode, "t", target)
