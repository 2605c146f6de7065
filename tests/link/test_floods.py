"""Whoever floods a control port takes memory within a bound, and starves nobody."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from pdlink.decode.receiver import Receiver
from pdlink.layout.fingerprint import fingerprint
from pdlink.testing.child import Child
from pdlink.transfer.states import ReceiverState
from tests.link.direct import SOURCE, TARGET
from tests.link.rig import PAGE_SIZE, Site, assert_whole, make_layout, wait_until

LONG_S = 60.0
MOST_BYTES = 400 << 20
"""Two queues of 250 frames of up to a megabyte, and what zmq reads ahead."""


def is_past_resolving(receiver: Receiver) -> Callable[[], bool]:
    return lambda: receiver.poll() is not ReceiverState.RESOLVING


@pytest.mark.backend("ipc")
@pytest.mark.parametrize("num_strangers", [2])
def test_a_flood_on_a_prefill_port_starves_nobody_and_stays_within_bounds(stack, caplog, num_strangers: int) -> None:
    site = Site(stack, backends="ipc", max_transfers=64, resend_interval_s=0.2)
    layout = make_layout(2)
    (owner,), decode = site.prefill(layout, 1, max_transfers=64), site.decode(layout)
    counters, process = owner.node.loop.counters, psutil.Process()
    worker = owner.worker
    told = (worker.control_endpoint.port, fingerprint(layout).digest.hex(), worker.rank.incarnation)
    before = process.memory_info().rss
    with Child("flood", "tests.link.peers_process", ["flood", str(num_strangers), *map(str, told)]) as child:
        assert child.hear(LONG_S) == num_strangers
        wait_until(lambda: counters.malformed > 20, LONG_S)
        for number in range(5):
            receiver: Receiver = decode.worker.receive(f"t{number}", site.instance, TARGET, 3 * PAGE_SIZE)
            if number % 2:  # an early subscribe among the strangers' own
                wait_until(is_past_resolving(receiver), LONG_S)
            owner.open(f"t{number}", {"kv": SOURCE}).publish(SOURCE, last=True)
            receiver.wait(LONG_S)
            assert_whole(decode, f"t{number}", TARGET)
        assert process.memory_info().rss - before < MOST_BYTES
        assert len(worker._requests.early) <= 64
        assert len(worker._requests.strays) <= 64
    assert counters.malformed > 20
    assert owner.node.health().ok
    assert sum("malformed" in one.message for one in caplog.records) < counters.malformed
