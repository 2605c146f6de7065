"""Keeping a rank registered: renewals, restarts of the service, refusals, replacement, death of the thread."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from pdlink.address import Address
from pdlink.bootstrap.directory import Directory
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.refusals import RegistrationConflict
from pdlink.bootstrap.standing import KeeperState
from pdlink.config import Settings
from pdlink.errors import DeadlineExceeded, InvalidInput, NotReady, PartDead, StaleIncarnation, StateError
from pdlink.events import Events
from pdlink.health import Health
from tests.bootstrap.values import PRINT, make_instance, make_layout
from tests.ports import held_port
from tests.processes import wait_until

NAME = "prefill-a"
WAIT_S = 60.0
SHORT = Settings(registration_lease_s=0.6)


class States:
    """Waits for the states that keepers go through, as their events tell them."""

    def __init__(self):
        self.events = Events()
        self.events.subscribe(self.see)
        self.seen = []
        self.changed = threading.Condition()

    def see(self, event):
        if event.name == "bootstrap.keeper":
            with self.changed:
                self.seen.append((event.fields["address"], event.fields["state"]))
                self.changed.notify_all()

    def wait(self, address, state, times=1):
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen.count((str(address), state)) >= times, WAIT_S), self.seen


def stopped():
    """The clock of a service whose leases last: of keepers with a short one, a busy machine lets some run out."""
    return 0.0


def test_ranks_that_are_kept_outlive_their_lease_and_leave_with_close(serve, client, keep, monkeypatch):
    renewed, renew, now = set(), Directory.renew, [0.0]

    def note(directory, key, at, *rest):
        status = renew(directory, key, at, *rest)
        renewed.add((key.worker_id, at))
        return status

    monkeypatch.setattr(Directory, "renew", note)
    server = serve(settings=SHORT, clock=lambda: now[0])
    keepers = [keep(one, server.address) for one in make_instance()]
    ask = client(server.address)
    version = ask.wait_ready(NAME, PRINT, WAIT_S).version
    for keeper in keepers:
        keeper.wait_registered(WAIT_S)
    for _ in range(4):
        now[0] += SHORT.registration_lease_s * 2 / 3
        assert wait_until(lambda: renewed >= {("w0", now[0]), ("w1", now[0])})
    assert ask.resolve(NAME, PRINT).version == version
    assert wait_until(lambda: all(keeper.is_healthy for keeper in keepers))
    keepers[1].close()
    with pytest.raises(NotReady, match="cp1"):
        ask.resolve(NAME, PRINT)
    keepers[1].close()
    assert set(keepers[1].states.values()) == {KeeperState.CLOSED}
    assert not keepers[1].is_healthy


def test_a_rank_registers_again_by_itself_when_the_service_restarts(serve, client, keep):
    server, states = serve(settings=SHORT), States()
    for one in make_instance():
        keep(one, server.address, events=states.events)
    states.wait(server.address, "registered", times=2)
    server.close()
    states.wait(server.address, "unreachable", times=2)
    serve(server.address, settings=SHORT)
    assert len(client(server.address).wait_ready(NAME, PRINT, WAIT_S).ranks) == 2
    states.wait(server.address, "registered", times=4)


def test_a_rank_registers_again_when_the_service_forgot_it(serve, client, keep):
    now = [0.0]
    server = serve(clock=lambda: now[0], settings=SHORT)
    for one in make_instance():
        keep(one, server.address).wait_registered(WAIT_S)
    ask = client(server.address)
    version = ask.resolve(NAME, PRINT).version
    now[0] = 100.0  # every lease runs out at once
    assert ask.wait_ready(NAME, PRINT, WAIT_S).version > version


def test_a_rank_registers_with_every_address_and_a_dead_one_delays_none(serve, client, keep, stack):
    first, second, dead = serve(), serve(), Address("127.0.0.1", stack.enter_context(held_port()))
    keepers = [keep(one, first.address, dead, second.address) for one in make_instance()]
    for server in (first, second):
        assert len(client(server.address).wait_ready(NAME, PRINT, WAIT_S).ranks) == 2
    for keeper in keepers:
        keeper.wait_registered(WAIT_S)
        assert keeper.is_healthy
        assert keeper.states[dead] is not KeeperState.REGISTERED
    late = serve(dead)
    assert len(client(late.address).wait_ready(NAME, PRINT, WAIT_S).ranks) == 2


def test_a_refusal_is_raised_and_ends_when_the_worker_in_the_way_leaves(serve, client, keep):
    server = serve(settings=SHORT, clock=stopped)
    other = keep(make_instance(make_layout(page_size=32))[1], server.address)
    other.wait_registered(WAIT_S)
    keeper = keep(make_instance()[0], server.address)
    with pytest.raises(RegistrationConflict, match=r"'w0' registers .*page_size 64.* live worker 'w1' registered 32"):
        keeper.wait_registered(WAIT_S)
    assert keeper.states == {server.address: KeeperState.REFUSED}
    assert isinstance(keeper.errors[server.address], RegistrationConflict)
    keep(make_instance(incarnation=2)[1], server.address)
    other.close()
    assert len(client(server.address).wait_ready(NAME, PRINT, WAIT_S).ranks) == 2


def test_a_process_that_was_replaced_stops_for_good(serve, client, keep):
    server, states = serve(settings=SHORT, clock=stopped), States()
    old = keep(make_instance(incarnation=1)[0], server.address, events=states.events)
    old.wait_registered(WAIT_S)
    new = [keep(one, server.address) for one in make_instance(incarnation=2)]
    states.wait(server.address, "replaced")
    assert not old.is_healthy
    with pytest.raises(StaleIncarnation, match="'w0'"):
        old.wait_registered(WAIT_S)
    old.close()
    assert client(server.address).wait_ready(NAME, PRINT, WAIT_S).ranks[0].incarnation == 2
    assert wait_until(lambda: all(keeper.is_healthy for keeper in new))


def test_a_process_that_starts_while_the_clock_is_back_registers_when_its_predecessor_is_forgotten(serve, client, keep):
    now = [0.0]
    server, states = serve(settings=SHORT, clock=lambda: now[0]), States()
    before, after = make_instance(incarnation=2)[0], make_instance(incarnation=1)[0]
    with RegistrationKeeper(before, [server.address]) as old:
        old.wait_registered(WAIT_S)
        new = keep(after, server.address, events=states.events)
        states.wait(server.address, "outranked")
        with pytest.raises(DeadlineExceeded, match=r"outranked: .*incarnation 1, but incarnation 2"):
            new.wait_registered(0.05)
        old._lanes[server.address]._withdraw = lambda: None  # as one that was killed
    now[0] = 100.0
    new.wait_registered(WAIT_S)
    assert wait_until(lambda: new.is_healthy)


def test_waiting_for_a_service_that_is_not_there_ends_and_says_so(keep, stack):
    dead = Address("127.0.0.1", stack.enter_context(held_port()))
    keeper = keep(make_instance()[0], dead)
    with pytest.raises(DeadlineExceeded, match=rf"{dead} (unreachable: nothing listens|starting)"):
        keeper.wait_registered(0.5)
    assert not keeper.is_healthy


def test_closing_does_not_wait_for_a_silent_service(keep):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        keeper = keep(
            make_instance()[0],
            Address("127.0.0.1", sock.getsockname()[1]),
            settings=Settings(resolve_timeout_s=WAIT_S * 10),
        )
        with sock.accept()[0]:
            began = time.monotonic()
            keeper.close()
            assert time.monotonic() - began < 15.0, "a connection that stays silent is given up after 20 s by itself"
        assert KeeperState.DEAD not in keeper.states.values()
    assert wait_until(lambda: not any(one.name.startswith("pdlink-keeper") for one in threading.enumerate()))


@pytest.mark.parametrize("defect", [RuntimeError("a defect"), SystemExit("a defect")], ids=lambda one: repr(one))
def test_the_death_of_the_thread_is_told(serve, keep, monkeypatch, defect):
    def fail(registration):
        raise defect

    server, states = serve(), States()
    health = Health(states.events)
    monkeypatch.setattr("pdlink.bootstrap.service_wire.pack_registration", fail)
    keeper = keep(make_instance()[0], server.address, events=states.events)
    states.wait(server.address, "dead")
    assert not keeper.is_healthy
    with pytest.raises(PartDead, match=r"thread pdlink-keeper-.* died \(.*a defect"):
        keeper.wait_registered(WAIT_S)
    (reason,) = health.report().reasons
    assert reason == str(keeper.errors[server.address])
    keeper.close()
    keeper.close()
    assert keeper.states == {server.address: "dead"}


def test_a_rank_may_register_more_later_under_its_own_name_only(serve, client, keep):
    server = serve()
    first, second = make_instance()
    keeper = keep(first, server.address)
    keep(second, server.address)
    before = client(server.address).wait_ready(NAME, PRINT, WAIT_S)
    more = replace(first, rank=replace(first.rank, transports={"nixl": b"agent"}))
    told = threading.Event()
    client(server.address).watch(
        NAME, PRINT, lambda answer: told.set() if answer.ranks[0].transports == {"nixl": b"agent"} else None
    )
    keeper.update(more)
    assert told.wait(WAIT_S)
    assert client(server.address).resolve(NAME, PRINT).version > before.version
    with pytest.raises(InvalidInput, match="cannot register"):
        keeper.update(second)


def test_a_keeper_starts_once_and_needs_an_address(serve):
    with pytest.raises(InvalidInput, match="at least one bootstrap address"):
        RegistrationKeeper(make_instance()[0], [])
    keeper = RegistrationKeeper(make_instance()[0], [serve().address])
    with keeper, pytest.raises(StateError, match="starts once"):
        keeper.start()
    with pytest.raises(StateError, match="starts once"):
        keeper.start()
    unused = RegistrationKeeper(make_instance()[0], [serve().address])
    unused.close()
    unused.close()
