import logging

import pytest

from pdlink.errors import IncompatibleError, Mismatch
from pdlink.events import Event, Events


def test_every_listener_hears_every_event_in_order():
    events, one, two = Events(), [], []
    events.subscribe(one.append)
    events.subscribe(two.append)
    events.emit("a", num_bytes=1)
    events.emit("b")
    assert one == two == [Event("a", {"num_bytes": 1}), Event("b")]


def test_a_removed_listener_hears_no_more():
    events, heard = Events(), []
    remove = events.subscribe(heard.append)
    events.emit("a")
    remove()
    remove()
    events.emit("b")
    assert [event.name for event in heard] == ["a"]


def test_a_listener_that_raises_is_dropped_and_the_others_hear_on(caplog):
    events, heard = Events(), []

    def broken(event):
        heard.append("broken")
        raise RuntimeError("no")

    events.subscribe(broken)
    events.subscribe(lambda event: heard.append(event.name))
    with caplog.at_level(logging.ERROR):
        events.emit("a")
        events.emit("b")
    assert heard == ["broken", "a", "b"]
    assert len([record for record in caplog.records if "was removed" in record.getMessage()]) == 1


def test_a_listener_may_leave_and_others_join_while_an_event_is_told():
    events, heard = Events(), []

    def once(event):
        heard.append(event.name)
        remove()
        events.subscribe(lambda later: heard.append(f"late {later.name}"))

    remove = events.subscribe(once)
    events.emit("a")
    events.emit("b")
    assert heard == ["a", "late b"]


def test_a_field_may_have_any_name():
    events, heard = Events(), []
    events.subscribe(heard.append)
    events.emit("a", name="n", self="s", event=1)
    assert heard == [Event("a", {"name": "n", "self": "s", "event": 1})]


def test_an_incompatible_error_says_the_first_mismatch_and_counts_the_others():
    first = Mismatch("page_size", "64", "32", "use one page size")
    error = IncompatibleError([first, Mismatch("dtype", "a", "b")], "decode-0")
    assert str(error) == (
        "incompatible peer at decode-0: page_size is 64 on prefill and 32 on decode; use one page size (+1 more)"
    )
    assert error.mismatches[0] == first


def test_an_incompatible_error_without_a_mismatch_is_a_bug():
    with pytest.raises(ValueError, match="at least one"):
        IncompatibleError([])
