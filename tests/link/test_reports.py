"""What the log and listeners are told of requests that ended well: each once, whatever happens right after."""

from __future__ import annotations

import logging

import pytest

from pdlink.events import Event
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Decode, Owner, Site, make_layout, wait_until
from tests.link.test_frames import publish_all

pytestmark = pytest.mark.backend("ipc")


def pair_of(site: Site) -> tuple[list[Owner], Decode, list[Event]]:
    """And the ends of requests that the decode side tells."""
    layout = make_layout(4)
    owners, decode, told = site.prefill(layout, 2), site.decode(layout), []
    decode.node.events.subscribe(lambda event: told.append(event) if event.name == "transfer.end" else None)
    return owners, decode, told


def move(site: Site, owners: list[Owner], decode: Decode, transfer_id: str) -> None:
    receiver = decode.worker.receive(transfer_id, site.instance, {"kv": [5, 6]}, 2 * PAGE_SIZE)
    publish_all(owners, transfer_id)
    receiver.wait(DEADLINE_S)


def test_an_end_is_told_once_and_says_how_long_ago_it_was(site: Site) -> None:
    owners, decode, told = pair_of(site)
    for number in range(3):
        move(site, owners, decode, f"t{number}")
    wait_until(lambda: len(told) == 3)
    decode.worker.close()
    assert [event.fields["transfer_id"] for event in told] == ["t0", "t1", "t2"]
    assert all(event.fields["state"] == "done" and event.fields["ago_s"] >= 0 for event in told)


def test_an_end_right_before_the_worker_closes_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlink.decode.end_reports.REPORT_AFTER_S", 2 * DEADLINE_S)
    owners, decode, told = pair_of(site)
    move(site, owners, decode, "t")
    assert not told
    decode.worker.close()
    assert [event.fields["state"] for event in told] == ["done"]


def test_a_handler_of_the_log_that_raises_keeps_no_other_end_from_being_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdlink.decode.end_reports.REPORT_AFTER_S", 2 * DEADLINE_S)
    owners, decode, told = pair_of(site)
    log = logging.getLogger("pdlink.decode")

    def refuse(record: logging.LogRecord) -> bool:
        if record.levelno == logging.INFO and "t0" in record.getMessage():
            raise RuntimeError("a filter of the engine's")
        return True

    with caplog.at_level(logging.INFO, "pdlink.decode"):
        log.addFilter(refuse)
        try:
            for number in range(3):
                move(site, owners, decode, f"t{number}")
            decode.worker.close()
        finally:
            log.removeFilter(refuse)
    assert [event.fields["transfer_id"] for event in told] == ["t1", "t2"]
    assert "the end of transfer t0 could not be told" in caplog.text
