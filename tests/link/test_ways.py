"""The way that a link takes by itself: measured when it is first used, and by what it costs from then on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging

import pytest

from pdlink.backends.base import Backend, PullHandle, PullStatus
from pdlink.decode import calibration
from pdlink.decode.receiver import ReceiveResult
from pdlink.errors import BackendError, TransferFailed
from pdlink.transfer.descriptors import PullBatch
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Decode, Gate, Owner, Site, make_layout
from tests.link.staged import assert_slots_back, publish_scattered, staged_site

NUM_PAGES = 12
"""Times four layers and two components: enough descriptors to be worth a look."""


class Costly(Gate):
    """A transport that takes `each_s` for every descriptor, and a nanosecond for ten bytes, by a clock of its own."""

    each_s = 100e-6

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.open.set()
        self.capabilities = dataclasses.replace(inner.capabilities, gathers=False)
        self.batches: list[int] = []
        self.now_s = 0.0

    def submit(self, batch: PullBatch) -> PullHandle:
        self.batches.append(batch.num_descriptors)
        self.now_s += self.each_s * batch.num_descriptors + batch.nbytes / 10e9
        return super().submit(batch)


class Cheap(Costly):
    each_s = 0.0


class Failing(Costly):
    """Nothing that is posted ends well."""

    def poll(self, handle: PullHandle) -> PullStatus:
        handle.error = BackendError("the link is down")
        return PullStatus.FAILED


@pytest.fixture
def site(stack: contextlib.ExitStack) -> Site:
    return staged_site(stack, staging_slot_bytes=1 << 20)


def auto(site: Site, kind: type[Costly], monkeypatch: pytest.MonkeyPatch) -> tuple[Decode, Costly]:
    """A decode side that is free to choose, and whose clock of measurements is the transport's."""
    made: list[Costly] = []

    def wrap(inner: Backend) -> Backend:
        made.append(kind(inner))
        return made[0]

    layout = make_layout(4, page_size=PAGE_SIZE, latent_bytes=16)
    decode = site.decode(layout, wrap=wrap, num_pages=64, way="auto")
    monkeypatch.setattr(calibration, "perf_counter", lambda: made[0].now_s)
    return decode, made[0]


def pull(site: Site, owners: list[Owner], decode: Decode, name: str, num_pages: int = NUM_PAGES) -> ReceiveResult:
    target = {"kv": site.scatter(decode.pool, num_pages)}
    receiver = decode.worker.receive(name, site.instance, target, num_pages * PAGE_SIZE)
    publish_scattered(site, owners, num_pages, name)
    result = receiver.wait(DEADLINE_S)
    assert decode.pool.find_wrong(name, target) is None
    return result


def owners_of(site: Site) -> list[Owner]:
    return site.prefill(make_layout(4, latent_bytes=16), 1, num_pages=64)


def test_scattered_pages_are_packed_over_a_link_whose_descriptors_are_measured_to_be_expensive(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owners = owners_of(site)
    decode, backend = auto(site, Costly, monkeypatch)
    with caplog.at_level(logging.INFO, "pdlink.decode"):
        assert set(pull(site, owners, decode, "a").ways.values()) == {("staged",)}
    assert len([one for one in caplog.records if "us a descriptor" in one.message]) == 1
    measured = len(backend.batches)
    assert set(pull(site, owners, decode, "b").ways.values()) == {("staged",)}
    assert max(backend.batches[measured:]) == 1  # large ranges alone, and nothing is measured again
    (text,) = decode.worker.explain(site.instance).values()
    assert "descriptors cost more than packing" in text
    assert_slots_back([decode.node, owners[0].node])


def test_pages_stay_where_they_are_over_a_link_whose_descriptors_are_measured_to_be_cheap(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = owners_of(site)
    decode, _ = auto(site, Cheap, monkeypatch)
    result = pull(site, owners, decode, "a")
    assert set(result.ways.values()) == {("direct",)}
    (text,) = decode.worker.explain(site.instance).values()
    assert "descriptors cost less than packing" in text
    assert_slots_back([decode.node, owners[0].node])


def test_a_pull_of_few_descriptors_is_direct_and_measures_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = owners_of(site)
    decode, backend = auto(site, Costly, monkeypatch)
    result = pull(site, owners, decode, "a", num_pages=1)
    assert set(result.ways.values()) == {("direct",)}
    assert backend.batches == [8]
    (text,) = decode.worker.explain(site.instance).values()
    assert "too few to pack" in text


def test_a_link_that_fails_while_it_is_measured_fails_the_request_with_its_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = owners_of(site)
    decode, _ = auto(site, Failing, monkeypatch)
    receiver = decode.worker.receive("a", site.instance, {"kv": list(range(NUM_PAGES))}, NUM_PAGES * PAGE_SIZE)
    publish_scattered(site, owners, NUM_PAGES, "a")
    with pytest.raises(TransferFailed, match="the link is down"):
        receiver.wait(DEADLINE_S)
    assert_slots_back([decode.node, owners[0].node])


def test_pages_are_not_packed_where_the_owner_reaches_its_slots_over_another_backend_only(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is free to choose, and has nothing but a backend that gathers: it offers no slots."""
    site = staged_site(stack, way="auto")
    owners = owners_of(site)
    decode, _ = auto(site, Costly, monkeypatch)
    assert set(pull(site, owners, decode, "a").ways.values()) == {("direct",)}
    (text,) = decode.worker.explain(site.instance).values()
    assert "offers no staging slots" in text
