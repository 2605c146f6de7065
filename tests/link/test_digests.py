"""Whole requests whose pages are digested: of every kind, in every pair of memories, and found wrong where they are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdlink.backends import device_mix
from pdlink.backends.page_digests import Mix
from pdlink.backends.torch_mix import SCRATCH_WORDS, TorchMix
from pdlink.errors import BackendError, BackendUnavailable, TransferFailed
from pdlink.layout.regions import MemoryKind
from pdlink.prefill.chunk import Chunk, RankFacts
from pdlink.transfer.digests import DigestKind, DigestTable, host_rows
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.direct import SOURCE, TARGET, gated, serve, start
from tests.link.rig import PAGE_SIZE, Site, assert_all, assert_whole, make_layout
from tests.link.test_pretend_gpus import PretendSite
from tests.pretend_gpu import PretendDriver, pretend_gpus

pytestmark = pytest.mark.backend("ipc")

PATIENCE_S = 30.0
KINDS = [one.value for one in DigestKind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_was_written_after_it_was_published_fails_the_request_and_is_named(site: Site, kind: str) -> None:
    owners = site.prefill(make_layout(4), 2, verify_digests=True, digest_kind=kind)
    decode, gate = gated(site, verify_digests=True)
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    owners[1].pool.view("index_k", 3)[SOURCE[1]][77] ^= 1
    gate.open.set()
    # The owner's name, component, layer, page (decode's own), kind, and both values, which differ.
    says = (
        rf"digest of 'index_k' layer 3, page {TARGET['kv'][1]} differs from what {owners[1].worker.rank.worker_id} "
        rf"published: {kind} ([0-9a-f]{{16}}) here, ([0-9a-f]{{16}}) there"
    )
    with pytest.raises(TransferFailed, match=says) as caught:
        receiver.wait(PATIENCE_S)
    found = re.search(says, str(caught.value))
    assert found
    assert found[1] != found[2]
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.DIGEST
    assert receiver.poll() is ReceiverState.FAILED
    assert_all(senders, SenderState.ABORTED)
    assert all(sender.failure and "digest of 'index_k' layer 3" in str(sender.failure) for sender in senders)
    serve(site, owners, decode)


@pytest.mark.parametrize("kind", KINDS)
def test_digests_that_only_the_owner_was_asked_for_are_compared_too(site: Site, kind: str) -> None:
    owners = site.prefill(make_layout(4), 2, verify_digests=True, digest_kind=kind)
    decode, gate = gated(site)
    receiver, _ = start(site, owners, decode)
    gate.wait_held(2)
    owners[0].pool.view("latent", 0)[SOURCE[0]][0] ^= 0x80
    gate.open.set()
    with pytest.raises(TransferFailed, match=rf"digest of 'latent' layer 0, page 4 .* {kind}"):
        receiver.wait(PATIENCE_S)


def test_an_owner_of_a_later_version_is_refused_by_both_sides_and_nothing_is_written(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(chunk: Chunk, rank: RankFacts) -> DigestTable:
        return DigestTable("blake3-128", np.zeros((2 * sum(map(len, chunk.layers.values())), 3), dtype=np.uint64))

    monkeypatch.setattr(Chunk, "digests", later)
    owners = site.prefill(make_layout(4), 2, verify_digests=True)
    decode = site.decode(make_layout(4), verify_digests=True)
    receiver, senders = start(site, owners, decode)
    with pytest.raises(TransferFailed, match=r"'blake3-128' on prefill .* upgrade pdlink on decode, or set PDLINK_DIG"):
        receiver.wait(PATIENCE_S)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.INCOMPATIBLE
    assert_all(senders, SenderState.ABORTED)
    assert all("'blake3-128' on prefill" in str(sender.failure) for sender in senders)
    assert decode.pool.find_touched() is None


def test_pages_that_decode_cannot_digest_are_no_success(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = site.prefill(make_layout(4), 2, verify_digests=True)
    decode, gate = gated(site, verify_digests=True)
    receiver, _ = start(site, owners, decode)
    gate.wait_held(2)

    def fail(*args: object, **rest: object) -> None:
        raise BackendError("device 0 could not make digests")

    monkeypatch.setattr("pdlink.backends.page_digests.page_digests", fail)
    gate.open.set()
    with pytest.raises(TransferFailed, match="device 0 could not make digests"):
        receiver.wait(PATIENCE_S)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.BACKEND


# --- pages on devices, of pretence -------------------------------------------------------------------


class MixOnHost:
    """What a device would compute, by the same operations, where pretended device memory lies in truth."""

    opened: list[int]

    def __init__(self, device: int) -> None:
        self.opened.append(device)
        scratch = torch.zeros(SCRATCH_WORDS, dtype=torch.int64)
        self._mix = TorchMix(scratch, lambda one: torch.from_numpy(host_rows(one)))
        self.digests = self._mix.digests

    def close(self) -> None:
        del self._mix


def unusable(device: int) -> Mix:
    raise BackendUnavailable("no torch for that")


@pytest.fixture
def site_on_devices(stack: contextlib.ExitStack) -> PretendSite:
    driver: PretendDriver = stack.enter_context(pretend_gpus())
    site = PretendSite(stack, backends="ipc", verify_digests=True, resend_interval_s=0.1)
    site.driver = driver
    return site


@pytest.mark.parametrize(
    ("prefill", "decode", "kind"),
    [
        ("reduces", "reduces", DigestKind.MIX64),
        ("reduces", "copies", DigestKind.MIX64),
        ("copies", "reduces", DigestKind.XXH3_64),
        ("copies", "copies", DigestKind.XXH3_64),
    ],
)
def test_pages_on_devices_are_digested_there_or_from_copies_and_both_are_alike(
    site_on_devices: PretendSite, monkeypatch: pytest.MonkeyPatch, prefill: str, decode: str, kind: DigestKind
) -> None:
    """Prefill's pages are on device 0, decode's on device 1. One request goes well, the other's page is damaged."""
    opened: list[int] = []
    monkeypatch.setattr(MixOnHost, "opened", opened, raising=False)
    able: dict[int, Callable[[int], Mix]] = {0: MixOnHost, 1: MixOnHost}
    able |= {device: unusable for device, does in enumerate((prefill, decode)) if does == "copies"}
    monkeypatch.setattr(device_mix, "DeviceMix", lambda device: able[device](device))
    site = site_on_devices
    layout = make_layout(3)
    owners = site.prefill(layout, 2)
    assert {owner.worker._facts.digest_kind for owner in owners} == {kind}
    reader = site.decode(layout, page_gap=40)
    assert {one.memory for one in reader.pool.regions} == {MemoryKind.CUDA}
    serve(site, owners, reader, "well")
    assert sorted(set(opened)) == [0, 1] if (prefill, decode) == ("reduces", "reduces") else len(set(opened)) <= 1

    receiver = reader.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    senders[0].publish(SOURCE, last=True)
    told = damage_what_is_told(owners[1].worker._facts, monkeypatch)
    senders[1].publish(SOURCE, last=True)
    with pytest.raises(TransferFailed, match=rf"page 9 differs .*: {kind} [0-9a-f]{{16}} here, {told[0]:016x} there"):
        receiver.wait(PATIENCE_S)
    assert_all(senders, SenderState.ABORTED)


def damage_what_is_told(facts: RankFacts, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on this owner tells the last page of its first layer a digest of other bytes; which, is added here."""
    made, told = Chunk.digests, [0xBAD]

    def digests(chunk: Chunk, rank: RankFacts) -> DigestTable | None:
        table = made(chunk, rank)
        if table and rank is facts:
            table.values[0, -1] = told[0]
        return table

    monkeypatch.setattr(Chunk, "digests", digests)
    return told


def test_a_pool_in_host_memory_and_one_on_a_device_have_the_same_digests(stack: contextlib.ExitStack) -> None:
    """An owner whose pages are in host memory makes what it is set to; a reader with others makes the same."""
    site = Site(stack, backends="ipc", verify_digests=True, digest_kind="mix64")
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout, page_gap=8)
    serve(site, owners, decode)
    assert_whole(decode, "good", TARGET)
