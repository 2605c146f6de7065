"""Owns keeping one rank registered with every bootstrap address: register, renew, register again, withdraw.

One thread for each address, so that a dead service delays no other. It decides nothing about what is registered.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from pdlink.address import Address
from pdlink.bootstrap import service_wire
from pdlink.bootstrap.access import Access, renewed_access
from pdlink.bootstrap.directory import LeaseStatus
from pdlink.bootstrap.messages import Registration
from pdlink.bootstrap.renewed import Renewed
from pdlink.bootstrap.rpc import Link
from pdlink.bootstrap.standing import KeeperState, Teller, describe
from pdlink.config import Settings
from pdlink.errors import (
    AccessDenied,
    DeadlineExceeded,
    FrameError,
    IncompatibleError,
    InvalidInput,
    NotOwner,
    PartDead,
    PdlinkError,
    StaleIncarnation,
    StateError,
)
from pdlink.events import Events
from pdlink.secret import Secret
from pdlink.threads import SupervisedThread
from pdlink.v1 import bootstrap_pb2 as pb

log = logging.getLogger("pdlink.bootstrap")
RETRY_INTERVAL_S = 0.25
DENIED_INTERVAL_S = 2.0
"""Credentials that are refused are not better the next moment."""
WITHDRAW_TIMEOUT_S = 1.0
JOIN_TIMEOUT_S = 5.0


class RegistrationKeeper:
    """Keeps `registration` alive at every one of `addresses` from `start` to `close`, which withdraws it for good.

    It makes an owner key, without which no other process can renew, change or withdraw the registration.
    Raises `ConfigError` for credentials that cannot be used, or that would go over the network in plain text.

    `states` and the events `bootstrap.keeper` (address, state, error) say how each address stands.
    """

    def __init__(
        self,
        registration: Registration,
        addresses: Sequence[Address],
        settings: Settings | None = None,
        *,
        events: Events | None = None,
    ) -> None:
        if not addresses:
            raise InvalidInput("a worker needs at least one bootstrap address to register with; write host:port")
        settings, events = settings or Settings(), events or Events()
        access = renewed_access(settings)
        access.get().check(addresses, sends_keys=registration.rank.control_keys is not None)
        self._changed = threading.Condition()
        owner = Secret(secrets.token_bytes(32))
        self._accepted = threading.Event()
        """Set once any address has accepted the registration: whoever is in the way from then on came later."""
        shared = (self._changed, self._accepted, access, owner)
        self._lanes = {one: _Lane(one, registration, settings, events, *shared) for one in addresses}
        self._started = False
        self._closed = False

    def start(self) -> RegistrationKeeper:
        """Begin; returns at once. See `wait_registered`."""
        if self._started or self._closed:
            raise StateError("a registration keeper starts once; make another one")
        self._started = True
        for lane in self._lanes.values():
            lane.start()
        return self

    @property
    def states(self) -> Mapping[Address, KeeperState]:
        return {address: lane.state for address, lane in self._lanes.items()}

    @property
    def errors(self) -> Mapping[Address, Exception]:
        """The latest error of each address that is not registered."""
        return {address: lane.error for address, lane in self._lanes.items() if lane.error is not None}

    @property
    def is_healthy(self) -> bool:
        """Registered with at least one address, and no thread dead."""
        states = self.states.values()
        return KeeperState.REGISTERED in states and KeeperState.DEAD not in states

    @property
    def is_replaced(self) -> bool:
        """Whether a newer process has taken the worker's name, and no address keeps this one."""
        states = self.states.values()
        return KeeperState.REPLACED in states and KeeperState.REGISTERED not in states

    def standing(self) -> tuple[str, bool]:
        """What is wrong with the registration, or nothing, and whether that makes this process unwell."""
        if self._closed:
            return "", False
        nowhere_s = time.monotonic() - max(lane.stood_at for lane in self._lanes.values())
        return describe(self.states, self.errors, nowhere_s)

    def wait_registered(self, timeout_s: float) -> None:
        """Wait until one address has accepted the registration.

        Raises the refusal when every address refuses, and `DeadlineExceeded` with what each said.
        """
        settled = (KeeperState.REFUSED, KeeperState.REPLACED, KeeperState.DEAD, KeeperState.CLOSED)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    KeeperState.REGISTERED in self.states.values() or all(s in settled for s in self.states.values())
                ),
                timeout_s,
            )
            states, errors = dict(self.states), dict(self.errors)
        if KeeperState.REGISTERED in states.values():
            return
        refusal = next((one for one in errors.values() if isinstance(one, PdlinkError)), None)
        if refusal is not None and all(state in settled for state in states.values()):
            raise refusal
        said = "; ".join(
            f"{address} {state}: {errors.get(address, 'no answer yet')}" for address, state in states.items()
        )
        raise DeadlineExceeded(f"no bootstrap accepted the registration within {timeout_s:g} s: {said}")

    def update(self, registration: Registration) -> None:
        """Register something else under the same worker and incarnation (new regions, another transport)."""
        for lane in self._lanes.values():
            lane.update(registration)

    def stop(self) -> None:
        """Have the threads withdraw everywhere and end; returns at once."""
        self._closed = True
        for lane in self._lanes.values():
            lane.stop()

    def close(self) -> None:
        """Withdraw everywhere and end the threads. A service that went silent delays this by seconds, no more."""
        self.stop()
        for lane in self._lanes.values():
            lane.join()

    def __enter__(self) -> RegistrationKeeper:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Lane:
    """The registration at one address, and the thread that keeps it."""

    def __init__(
        self,
        address: Address,
        registration: Registration,
        settings: Settings,
        events: Events,
        changed: threading.Condition,
        accepted: threading.Event,
        access: Renewed[Access],
        owner: Secret,
    ) -> None:
        self._owner = owner
        self._access = access
        self.state = KeeperState.STARTING
        self.error: Exception | None = None
        self.stood_at = time.monotonic()
        """When it was last known to be registered, or was made."""
        self._address = address
        self._registration = registration
        self._settings = settings
        self._events = events
        self._changed = changed
        self._accepted = accepted
        self._sent: Registration | None = None
        self._lease_s = settings.registration_lease_s
        self._stopping = False
        self._wake = threading.Event()
        self._link = Link(address, access.get())
        self._link_lock = threading.Lock()
        worker_id = registration.rank.worker_id
        self._teller = Teller(worker_id, address)
        self._thread = SupervisedThread(
            self._run,
            f"pdlink-keeper-{worker_id}-{address}",
            f"prefill {worker_id}",
            events=events,
            on_death=lambda death: self._enter(KeeperState.DEAD, PartDead(death.text)),
            at_end=lambda: self._link.close(),
        )

    def start(self) -> None:
        self._thread.start()

    def update(self, registration: Registration) -> None:
        if registration.key != self._registration.key:
            raise InvalidInput(f"a keeper of {self._registration.key} cannot register {registration.key}")
        self._registration = registration
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        with self._link_lock:
            if self._sent is None:  # nothing to withdraw: cut short a call that waits for a silent service
                self._link.close()

    def join(self) -> None:
        self._thread.join(JOIN_TIMEOUT_S + self._settings.resolve_timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._step())
                self._wake.clear()
            if self._sent is not None:
                self._withdraw()
            self._enter(KeeperState.CLOSED)
        except StaleIncarnation as error:
            self._enter(KeeperState.REPLACED, error)

    def _step(self) -> float:
        """Register or renew, whichever is due; seconds until the next step. Raises `StaleIncarnation`."""
        registration = self._registration
        try:
            if self._sent != registration:
                self._register(registration)
            elif not self._renew(registration):
                self._sent = None
                return 0.0
        except StaleIncarnation as error:
            if self._accepted.is_set():
                raise
            self._enter(KeeperState.OUTRANKED, error)
            return RETRY_INTERVAL_S
        except (IncompatibleError, InvalidInput) as error:
            self._sent = None
            self._enter(KeeperState.REFUSED, error)
            return RETRY_INTERVAL_S
        except AccessDenied as error:
            self._sent = None
            self._enter(KeeperState.REFUSED, error)
            self._renew_link()
            return DENIED_INTERVAL_S
        except PdlinkError as error:
            self._enter(KeeperState.UNREACHABLE, error)
            self._renew_link()
            return RETRY_INTERVAL_S
        self._enter(KeeperState.REGISTERED)
        return self._lease_s / 3

    def _renew_link(self) -> None:
        """Dial again with renewed credentials, where there are any."""
        access = self._access.get()
        with self._link_lock:
            if access is self._link.access or self._stopping:
                return
            self._link.close()
            self._link = Link(self._address, access)

    def _register(self, registration: Registration) -> None:
        request = pb.RegisterRequest(
            registration=service_wire.pack_registration(registration), owner_key=self._owner.reveal()
        )
        data = self._link.call("Register", request, self._settings.resolve_timeout_s)
        self._keep_lease(service_wire.parse(pb.RegisterResponse, data).lease_s)
        self._sent = registration
        self._accepted.set()

    def _renew(self, registration: Registration) -> bool:
        request = pb.RenewRequest(workers=[service_wire.pack_key(registration.key, self._owner)])
        timeout_s = min(self._settings.resolve_timeout_s, self._lease_s / 3)
        answer = service_wire.parse(pb.RenewResponse, self._link.call("Renew", request, timeout_s))
        if len(answer.statuses) != 1:
            raise FrameError(f"bootstrap {self._address} answered one renewal with {len(answer.statuses)} statuses")
        self._keep_lease(answer.lease_s)
        status = service_wire.unpack_status(answer.statuses[0])
        key = registration.key
        if status is LeaseStatus.NOT_OWNER:
            raise NotOwner(
                f"worker {key.worker_id!r} of instance {key.instance!r} is registered by another process at bootstrap "
                f"{self._address}; give each worker a name of its own"
            )
        if status is LeaseStatus.REPLACED:
            raise StaleIncarnation(
                f"worker {key.worker_id!r} of instance {key.instance!r} was replaced by a newer process at "
                f"bootstrap {self._address}"
            )
        return status is LeaseStatus.RENEWED

    def _withdraw(self) -> None:
        request = pb.WithdrawRequest(worker=service_wire.pack_key(self._registration.key, self._owner))
        try:
            self._link.call("Withdraw", request, WITHDRAW_TIMEOUT_S)
        except PdlinkError as error:
            log.info("could not withdraw from bootstrap %s, its lease will run out: %s", self._address, error)

    def _keep_lease(self, lease_s: float) -> None:
        if not 0 < lease_s <= 86_400:
            raise FrameError(f"bootstrap {self._address} grants a lease of {lease_s} s")
        self._lease_s = lease_s

    def _enter(self, state: KeeperState, error: Exception | None = None) -> None:
        with self._changed:
            moved = state is not self.state
            if KeeperState.REGISTERED in (state, self.state):
                self.stood_at = time.monotonic()
            self.state, self.error = state, error
            self._changed.notify_all()
        self._teller.tell(state, error, moved=moved)
        if moved:
            self._events.emit("bootstrap.keeper", address=str(self._address), state=str(state), error=str(error or ""))
