from collections.abc import Iterator

import pytest

from pdlink.control.loop import ControlLoop
from pdlink.events import Events
from tests.control.loops import Box


@pytest.fixture
def loop() -> Iterator[ControlLoop]:
    made = ControlLoop(events=Events()).start()
    yield made
    made.close()
    assert not made.is_alive


@pytest.fixture
def heard(loop: ControlLoop) -> Box:
    """The names of the loop's events, as a box."""
    box = Box()
    loop.events.subscribe(lambda event: box(event.name))
    return box
