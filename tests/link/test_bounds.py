"""What grows with requests is bounded, and who comes past a bound is told which one it is."""

from __future__ import annotations

import pytest

from pdlink.control import wire
from pdlink.control.frames import Frame, PageSpan
from pdlink.control.wire import MAX_SPANS, decode, encode
from pdlink.decode import merge
from pdlink.errors import FrameError, LimitReached
from pdlink.limits import num_open
from pdlink.prefill import sender as sender_module
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.direct import SOURCE, TARGET, serve
from tests.link.rig import PAGE_SIZE, Site, assert_all, finished, make_layout, wait_until
from tests.prefill.rig import SOLO, subscribe

pytestmark = pytest.mark.backend("ipc")


def test_many_requests_to_ranks_that_do_not_fit_tell_them_over_one_channel_each(stack) -> None:
    site = Site(stack, backends="ipc", confirm_timeout_s=3.0)
    owners = site.prefill(make_layout(2), 2)
    decode = site.decode(make_layout(2, latent_bytes=1312))
    senders = [owner.open("t49", {"kv": SOURCE}) for owner in owners]
    before = num_open()
    receivers = [decode.worker.receive(f"t{n}", site.instance, {"kv": [n % 16]}, PAGE_SIZE) for n in range(50)]
    assert {finished(one).poll() for one in receivers} == {ReceiverState.FAILED}
    assert {one.failure.reason for one in receivers if one.failure} == {FailureReason.INCOMPATIBLE}
    assert_all(senders, SenderState.ABORTED)
    assert len(decode.worker._teller._channels) <= len(owners)
    assert num_open() - before < 4 * len(owners) + 16
    wait_until(lambda: not decode.worker._teller._channels)


def test_a_request_that_is_published_too_often_is_refused_on_the_owner_and_fails_on_the_reader(
    site: Site, monkeypatch
) -> None:
    owners, decode = site.prefill(make_layout(2), 1), site.decode(make_layout(2))
    monkeypatch.setattr(sender_module, "MAX_PUBLICATIONS", 3)
    mine = owners[0].open("t", {"kv": SOURCE})
    for _ in range(3):
        mine.publish()
    with pytest.raises(LimitReached, match="published 3 times"):
        mine.publish(last=True)
    monkeypatch.setattr(merge, "MAX_PUBLICATIONS", 2)
    receiver = finished(decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE))
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.LIMIT
    assert "publishes more than 2 times" in receiver.failure.text
    assert_all([mine], SenderState.ABORTED)
    serve(site, owners, decode)


def test_a_subscribe_with_more_page_groups_than_any_layout_has_is_malformed(monkeypatch) -> None:
    spans = tuple(PageSpan(f"g{number}", 0, 1) for number in range(MAX_SPANS + 1))
    frame = Frame("t", 1, subscribe(SOLO, spans=spans))
    with monkeypatch.context() as patch:
        patch.setattr(wire, "MAX_SPANS", MAX_SPANS + 1)
        data = encode(frame)
    for refuse in (lambda: decode(data), lambda: encode(frame)):
        with pytest.raises(FrameError, match="too many items"):
            refuse()
    assert decode(encode(Frame("t", 1, subscribe(SOLO, spans=spans[:-1]))))
