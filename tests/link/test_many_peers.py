"""Thousands of peers stay within a bound of open files and threads, which all come back."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from pdlink.address import Address
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.messages import PROTOCOL, PrefillServerInfo, RankInfo
from pdlink.config import Settings, load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.decode.worker import DecodeWorker
from pdlink.errors import ConfigError
from pdlink.events import Events
from pdlink.layout.components import CacheLayout
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.layer_plan import LayerPlan, PlanKind
from pdlink.layout.parallel import ParallelSizes
from pdlink.layout.regions import Region
from pdlink.limits import FILES_PER_LINK, num_open
from pdlink.runtime import node as node_module
from pdlink.runtime.node import Node
from pdlink.testing.child import Child
from pdlink.testing.pattern import PatternPool
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState
from tests.backends.needs import mooncake_missing, nixl_missing
from tests.link.direct import serve
from tests.link.peers_process import INCARNATION
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Site, finished, make_layout, wait_until

BOOTSTRAPS = (Address("127.0.0.1", 1),)
LAYOUT = make_layout(1, latent_bytes=16)
LONG_S = 60.0


def owners_process(stack: contextlib.ExitStack, num_peers: int) -> list[int]:
    """A process with so many prefill ranks; the ports of their control sockets."""
    child = stack.enter_context(Child("owners", "tests.link.peers_process", ["owners", str(num_peers)]))
    ports = child.hear(LONG_S)
    assert isinstance(ports, list)
    return ports


def instance_of(name: str, layout: CacheLayout, ports: Sequence[int], regions: tuple[Region, ...]) -> PrefillServerInfo:
    """An instance of one rank a port. The first owns every layer, in memory that nothing is ever moved from."""
    sizes = ParallelSizes(cp=len(ports))
    owned = {one.name: one.layers for one in layout.components}
    plan = {rank: owned if rank.cp == 0 else dict.fromkeys(owned, ()) for rank in sizes.ranks()}
    kinds = dict.fromkeys(owned, PlanKind.SPLIT)
    assert LayerPlan(sizes, kinds, plan)
    ranks = [
        RankInfo(
            f"{name}/{rank}", INCARNATION, rank, plan[rank], () if rank.cp else regions, Address("127.0.0.1", port), {}
        )
        for rank, port in zip(sizes.ranks(), ports, strict=True)
    ]
    return PrefillServerInfo(name, PROTOCOL, layout, fingerprint(layout), sizes, kinds, tuple(ranks))


class NoWatch:
    """Follows nothing: these instances do not change."""

    num_open = 0

    def __init__(self) -> None:
        NoWatch.num_open += 1

    def stop(self) -> None:
        NoWatch.num_open -= 1

    close = stop


class Farm:
    """A decode worker, and prefill instances that it finds without a bootstrap service."""

    def __init__(self, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        self.known: dict[str, PrefillServerInfo] = {}
        told = load_settings({}, backends="ipc", **settings)
        self.node = stack.enter_context(Node(told))
        pool = PatternPool(LAYOUT, {one.name: one.layers for one in LAYOUT.components}, 4)
        stack.callback(pool.close)
        self.regions = tuple(pool.regions)
        self.worker: DecodeWorker = self.node.decode("dec", LAYOUT, pool.regions)
        monkeypatch.setattr(BootstrapClient, "wait_ready", lambda client, name, *rest: self.known[name])
        monkeypatch.setattr(BootstrapClient, "watch", lambda client, *rest: NoWatch())
        NoWatch.num_open = 0
        # zmq's own threads start with the first socket, and have files too.
        self.node.loop.connect(BOOTSTRAPS[0], lambda frame: None).close()
        flushed = threading.Event()
        self.node.loop.call_soon(flushed.set)
        assert flushed.wait(DEADLINE_S)

    def add(self, name: str, ports: Sequence[int]) -> PrefillInstance:
        self.known[name] = instance_of(name, LAYOUT, ports, self.regions)
        return PrefillInstance(name, BOOTSTRAPS)

    def ask(self, transfer_id: str, instance: PrefillInstance) -> None:
        """One request that moves nothing, and so says goodbye to every rank, each of which answers."""
        receiver = self.worker.receive(transfer_id, instance, {"kv": []}, PAGE_SIZE, prefix_tokens=PAGE_SIZE)
        wait_until(lambda: receiver.poll().is_final, LONG_S)
        assert receiver.poll() is ReceiverState.DONE

    def wait_settled(self) -> None:
        wait_until(lambda: self.worker.num_receives == 0, LONG_S)

    def num_ranks(self) -> int:
        return self.worker._links._num_ranks()


@contextlib.contextmanager
def impatience(worker: DecodeWorker) -> Iterator[None]:
    """Within it a link is let go of as soon as no request uses it; else they last, however slow a test is."""
    links = worker._links
    before = links._settings
    links._settings = before.model_copy(update={"link_idle_timeout_s": 0.0})
    yield
    links._settings = before


def settle(most: Callable[[], bool]) -> None:
    """Until zmq's own thread has closed what was let go of."""
    gc.collect()
    wait_until(most, LONG_S)


@pytest.mark.slow
def test_two_thousand_prefill_ranks_cost_two_files_each_and_give_them_back(stack, monkeypatch) -> None:
    num_peers = 2000
    ports = owners_process(stack, num_peers)
    with contextlib.ExitStack() as own:
        farm = Farm(own, monkeypatch)
        before, threads = num_open(), threading.active_count()
        instance = farm.add("pre", ports)
        farm.ask("t", instance)
        farm.wait_settled()
        assert farm.num_ranks() == num_peers
        assert num_open() - before <= FILES_PER_LINK * num_peers
        settle(lambda: threading.active_count() <= threads + 2)  # none for a rank that nothing is pulled from
        # Unused, the link goes with all that it holds, and comes back with the next request.
        with impatience(farm.worker):
            settle(lambda: farm.num_ranks() == 0 and num_open() <= before)
        assert NoWatch.num_open == 0
        farm.ask("u", instance)
        farm.wait_settled()
        assert farm.num_ranks() == num_peers
    settle(lambda: num_open() < before)


@pytest.mark.slow
def test_two_thousand_decode_ranks_cost_a_prefill_rank_one_file_each_and_give_it_back(stack) -> None:
    num_peers = 2000
    site = Site(stack, backends="ipc")
    (owner,) = site.prefill(LAYOUT, 1)
    before, threads = num_open(), threading.active_count()
    worker = owner.worker
    told = (worker.control_endpoint.port, fingerprint(LAYOUT).digest.hex(), worker.rank.incarnation)
    with Child("readers", "tests.link.peers_process", ["readers", str(num_peers), *map(str, told)]) as child:
        assert child.hear(LONG_S) == num_peers
        assert num_open() - before <= num_peers + 8
        settle(lambda: threading.active_count() <= threads)
        assert len(worker._requests.early) == num_peers
    settle(lambda: num_open() <= before)
    assert owner.node.loop.counters.dropped == 0


def test_links_beyond_the_most_peers_push_out_the_one_that_was_unused_for_longest(stack, monkeypatch) -> None:
    ports = owners_process(stack, 8)
    farm = Farm(stack, monkeypatch, max_peers=4)
    instances = [farm.add(f"pre{number}", ports[2 * number : 2 * number + 2]) for number in range(4)]
    before = num_open()
    for turn in range(3):
        for number, instance in enumerate(instances):
            farm.ask(f"t{turn}-{number}", instance)
            farm.wait_settled()
            assert farm.num_ranks() <= 4
    links = farm.worker._links
    assert [bool(links.known(one)) for one in instances] == [False, False, True, True]
    assert NoWatch.num_open == 2
    settle(lambda: num_open() - before <= 4 * FILES_PER_LINK)


def test_more_peers_in_use_than_allowed_are_refused_by_name_and_served_once_others_go(stack, monkeypatch) -> None:
    ports = owners_process(stack, 6)
    farm = Farm(stack, monkeypatch, max_peers=4)
    busy, other, large = farm.add("busy", ports[:3]), farm.add("other", ports[3:5]), farm.add("large", ports[1:])
    held = farm.worker.receive("held", busy, {"kv": [0]}, PAGE_SIZE)
    wait_until(lambda: held.poll() is ReceiverState.SUBSCRIBED)
    for transfer_id, instance in (("t", other), ("u", large)):
        refused = finished(farm.worker.receive(transfer_id, instance, {"kv": [1]}, PAGE_SIZE))
        assert refused.failure
        assert refused.failure.reason is FailureReason.LIMIT
        assert "PDLINK_MAX_PEERS=4" in refused.failure.text
    assert held.poll() is ReceiverState.SUBSCRIBED
    held.abort()
    farm.wait_settled()
    farm.ask("again", other)


def test_a_number_of_peers_that_this_process_cannot_open_files_for_is_refused_with_the_figures(monkeypatch) -> None:
    monkeypatch.setattr(node_module.limits, "soft_limit", lambda: 1024)
    monkeypatch.setattr(node_module.limits, "num_open", lambda: 24)
    with pytest.raises(ConfigError, match=r"PDLINK_MAX_PEERS=4096 needs \d+ open files .* may open 1024; .*ulimit -n"):
        Node(load_settings({}, backends="ipc", max_peers=4096))
    with Node(load_settings({}, backends="ipc"), Events()) as node:
        per_peer = FILES_PER_LINK + node.backends["ipc"].capabilities.files_per_peer
        assert node.settings.max_peers == (1024 - 24 - 256) // per_peer
    assert Settings().max_peers > 2000


MISSING = {"ipc": "", "nixl": nixl_missing(), "mooncake": mooncake_missing()}
CASES = [
    pytest.param("ipc", marks=pytest.mark.backend("ipc")),
    pytest.param("nixl", marks=[pytest.mark.backend("nixl-tcp"), pytest.mark.slow]),
    pytest.param("mooncake", marks=[pytest.mark.backend("mooncake-tcp"), pytest.mark.slow]),
]


def num_pullers() -> int:
    return sum(one.name.startswith(("pdlink-pull-", "pdlink-watch-")) for one in threading.enumerate())


@pytest.mark.parametrize("backend", CASES)
def test_an_unused_link_gives_back_what_its_transport_and_threads_had_and_works_again(stack, backend: str) -> None:
    if MISSING[backend]:
        pytest.skip(MISSING[backend])
    site = Site(stack, backends=backend)
    layout = make_layout(2)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    serve(site, owners, decode, "first")  # what a process has from its first pull on stays
    with impatience(decode.worker):
        wait_until(lambda: not num_pullers(), LONG_S)
        settle(lambda: not decode.worker._links._num_ranks())
    before = num_open()
    for number in range(2):
        serve(site, owners, decode, f"t{number}")
        assert num_open() > before
        # One puller a rank and one watch; the countdown to a watch's first answer has ended or is about to.
        wait_until(lambda: num_pullers() == 3, LONG_S)
        with impatience(decode.worker):
            wait_until(lambda: not num_pullers(), LONG_S)
            settle(lambda: num_open() <= before)
