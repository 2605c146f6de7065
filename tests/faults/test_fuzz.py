"""Frames that were valid, damaged on their way: no process minds, no request hangs, and no wrong byte is a success."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.faults import episode, whole
from tests.faults.cluster import Plan, running, said
from tests.faults.hosts import loopback
from tests.faults.load import Load
from tests.faults.mutate import KINDS
from tests.faults.stranger import shout_at_bootstrap
from tests.faults.table import wanted_hashes
from tests.link.transports import TRANSPORTS

NUM_PAGES = 5
KEPT = 10
"""Failed requests whose pages are kept aside at most: with twice as many a reader runs out of its 96 pages."""

pytestmark = pytest.mark.faults

Script = list[tuple[str, float, int]]
scripts = st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0, 1), st.integers(0, 255)), max_size=8)


def fuzz(transport: str, logs: Path, num_examples: int) -> None:
    """Damage the frames of one request at a time as hypothesis likes, each after a good one and before the next."""
    if reason := TRANSPORTS[transport].missing():
        pytest.skip(reason)
    # Digests: without them or encryption, whoever rewrites frames may well say that other pages are meant.
    settings = {"verify_digests": True, "subscribe_timeout_s": 3.0, "progress_timeout_s": 3.0}
    plan = Plan(TRANSPORTS[transport], middleman=True, settings=settings)
    with running(plan, loopback(plan.hosts), logs) as cluster:
        load = Load(cluster, random.Random(1))
        scene = episode.Scene(load, random.Random(1))
        scene.open()
        kept = 0

        @hypothesis.settings(max_examples=num_examples, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
        @hypothesis.given(to_prefill=scripts, to_decode=scripts)
        @hypothesis.example(to_prefill=[], to_decode=[("cut", 0.0, 0)] * 4)
        @hypothesis.example(to_prefill=[("repeat", 0.5, 200)] * 4, to_decode=[])
        def one_request(to_prefill: Script, to_decode: Script) -> None:
            nonlocal kept
            for to, script in (("prefill", to_prefill), ("decode", to_decode)):
                cluster.ask("middleman", do="script", to=to, damage=script)
            one = load.begin("reader0", NUM_PAGES, gap_s=0.0)
            assert load.drain(), f"{one.name} has no terminal state: {one}"
            assert cluster.unexpected == [], said(logs)
            for to in ("prefill", "decode"):
                cluster.ask("middleman", do="script", to=to, damage=[])
            good = load.begin("reader0", NUM_PAGES, gap_s=0.0)
            assert load.drain()
            assert good.state == "done", f"after {one}: {good.said.get('why')}"
            for request in (one, good):
                assert request.said["ends"] == 1
                if request.state == "done":
                    wanted = wanted_hashes(request.name, NUM_PAGES, episode.layout_line())
                    assert request.said["hashes"] == wanted, f"{request.name} is wrong"
            kept += one.state != "done"
            if kept == KEPT:
                assert load.settle() == ""
                kept = 0
            load.forget()

        one_request()
        assert load.settle() == ""
        assert whole.make_whole(load) == ""
        assert scene.kept_more(scene.count()) == []


@pytest.mark.timeout(240)
@pytest.mark.backend("ipc")
def test_damaged_frames_never_make_wrong_bytes_a_success_nor_a_request_hang(tmp_path: Path) -> None:
    fuzz("ipc", tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "transport", [pytest.param(one, marks=pytest.mark.backend(one)) for one in ("ipc", "nixl-tcp", "mooncake-tcp")]
)
def test_many_damaged_frames_never_make_wrong_bytes_a_success_nor_a_request_hang(
    transport: str, tmp_path: Path
) -> None:
    fuzz(transport, tmp_path, 10)


@pytest.mark.timeout(240)
@pytest.mark.backend("ipc")
def test_damaged_requests_and_noise_are_refused_by_a_bootstrap_that_serves_on(tmp_path: Path) -> None:
    plan = Plan(TRANSPORTS["ipc"], num_bootstraps=1)
    with running(plan, loopback(plan.hosts), tmp_path) as cluster:
        load = Load(cluster, random.Random(1))
        episode.warm_up(load)
        assert shout_at_bootstrap(cluster.bootstrap_addresses[0], random.Random(3), 300) > 100
        cluster.kill("reader0")  # the next one must ask it
        cluster.revive()
        one = load.begin("reader0", NUM_PAGES)
        load.drain()
        assert one.state == "done", f"{one.said.get('why')}\n{said(tmp_path)}"
        assert cluster.unexpected == []
