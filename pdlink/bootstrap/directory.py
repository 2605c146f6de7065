"""Owns who is registered, until when, and whether an instance is whole. No sockets, no threads, no clock of its own.

Every call takes `now`, in seconds of any clock that never goes back; leases that have run out by then are dropped
first, so no answer rests on a dead entry. One caller at a time.
"""

from __future__ import annotations

import heapq
import hmac
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pdlink.bootstrap.compat import differences, plan_faults
from pdlink.bootstrap.inspection import DirectoryView, InstanceView, WorkerView
from pdlink.bootstrap.messages import Endpoint, PrefillServerInfo, RankInfo, Registration, Side, WorkerKey
from pdlink.bootstrap.refusals import RegistrationConflict
from pdlink.errors import InvalidInput, Mismatch, NotOwner, NotReady, StaleIncarnation, UnknownInstance
from pdlink.layout import Fingerprint, LayerPlan, RankCoordinates, fingerprint

MAX_WORKERS = 65_536
MAX_BYTES = 2 << 30
"""Of all registrations together, as they came over the wire. A large rank takes some kilobytes."""
GONE_TTL_S = 3600.0
"""How long a life that ended is kept from coming back."""
_SHOWN_FAULTS = 8
_RANK = re.compile(r"dp\d+\.pp\d+\.cp\d+\.tp\d+")


class LeaseStatus(StrEnum):
    RENEWED = "renewed"
    UNKNOWN = "unknown"
    """Nothing of that name is registered: register again."""
    REPLACED = "replaced"
    """A newer process has taken the name: stop."""
    NOT_OWNER = "not_owner"
    """Another process registered it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a caller shows of itself. `owner` is a digest of its owner key (empty: it has none), `identity` who it is by
    its certificate (empty: it showed none)."""

    owner: bytes = b""
    identity: str = ""


NO_CLAIM = Claim()


@dataclass(slots=True)
class _Entry:
    registration: Registration
    expires_at: float
    timer: int
    """Which of the queued deadlines is this entry's."""
    claim: Claim
    """Of whoever registered it."""
    num_bytes: int = 0


@dataclass(slots=True)
class _Instance:
    version: int = 0
    workers: dict[str, _Entry] = field(default_factory=dict)
    places: dict[RankCoordinates, str] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    answer: PrefillServerInfo | str | None = None
    """What resolve says of this version: the instance, or why it is not ready."""

    def any_registration(self) -> Registration:
        return next(iter(self.workers.values())).registration


class Directory:
    """The registrations of all instances. Renewing costs O(log n) at most once a lease, and O(1) otherwise.

    Versions count up from `first_version` over all instances, so a version is never used twice.
    """

    def __init__(
        self, lease_s: float, first_version: int = 0, max_workers: int = MAX_WORKERS, max_bytes: int = MAX_BYTES
    ) -> None:
        self.lease_s = lease_s
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._versions = itertools.count(first_version + 1)
        self._max_workers = max_workers
        self._instances: dict[str, _Instance] = {}
        self._changed: set[str] = set()
        self._expired: list[WorkerKey] = []
        self._timers = itertools.count()
        # (time, timer, instance, worker): one for each live worker, put back when met too early, and those of
        # withdrawn workers until their time.
        self._deadlines: list[tuple[float, int, str, str]] = []
        self._num_workers = 0
        # Lives that ended by a withdrawal or a newer life, until when they must not come back; the oldest first.
        self._gone: dict[WorkerKey, float] = {}

    def register(self, registration: Registration, now: float, claim: Claim = NO_CLAIM, num_bytes: int = 0) -> bool:
        """Put the worker's registration in place of what it said before; whether anything but the lease changed.

        The same incarnation needs the same owner, and a newer one the same identity where the one before showed any.
        Raises `StaleIncarnation` for a process that has been replaced or has withdrawn, `NotOwner` for somebody else's
        registration, and `RegistrationConflict` where another live worker holds the rank or registered other settings.
        A refused registration changes nothing. `num_bytes` is what it takes; `InvalidInput` where there is no room.
        """
        self.expire(now)
        _check_not_gone(self._gone.get(registration.key, now), registration, now)
        name, rank = registration.instance, registration.rank
        instance = self._instances.get(name) or _Instance()
        held = instance.workers.get(rank.worker_id)
        if held is not None:
            _check_claim(held, registration, claim)
        if held is not None and held.registration == registration:
            held.expires_at = now + self.lease_s
            return False
        _check_newer(held, registration)
        _check_place_free(instance, registration)
        _check_agrees(instance, registration)
        expires_at = now + self.lease_s
        self._check_room(held is None, num_bytes - (held.num_bytes if held else 0))
        self._num_bytes += num_bytes - (held.num_bytes if held else 0)
        if held is None:
            self._num_workers += 1
            timer = next(self._timers)
            heapq.heappush(self._deadlines, (expires_at, timer, name, rank.worker_id))
        else:
            timer = held.timer
            if held.registration.key != registration.key:
                self._bury(held.registration.key, now)
            del instance.places[held.registration.rank.coordinates]
        self._instances[name] = instance
        instance.workers[rank.worker_id] = _Entry(registration, expires_at, timer, claim, num_bytes)
        instance.places[rank.coordinates] = rank.worker_id
        self._touch(name, instance)
        return True

    def renew(self, key: WorkerKey, now: float, claim: Claim = NO_CLAIM) -> LeaseStatus:
        """Prolong one lease, of whoever registered it."""
        self.expire(now)
        entry = self._entry(key.instance, key.worker_id)
        if entry is None or entry.registration.rank.incarnation < key.incarnation:
            return LeaseStatus.UNKNOWN
        if entry.registration.rank.incarnation > key.incarnation:
            return LeaseStatus.REPLACED
        if not _owns(claim, entry):
            return LeaseStatus.NOT_OWNER
        entry.expires_at = now + self.lease_s
        return LeaseStatus.RENEWED

    def withdraw(self, key: WorkerKey, now: float, claim: Claim = NO_CLAIM) -> bool:
        """Drop exactly this registration, for good; whether it was there. Raises `NotOwner`."""
        self.expire(now)
        entry = self._entry(key.instance, key.worker_id)
        if entry is None or entry.registration.rank.incarnation != key.incarnation:
            return False
        if not _owns(claim, entry):
            raise NotOwner(
                f"worker {key.worker_id!r} of instance {key.instance!r} is another process's to withdraw: the owner "
                "key is not the one that it registered with"
            )
        self._drop(key.instance, key.worker_id)
        self._bury(key, now)
        return True

    def expire(self, now: float) -> int:
        """Drop every registration whose lease has run out; how many."""
        dropped = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, timer, name, worker_id = heapq.heappop(self._deadlines)
            entry = self._entry(name, worker_id)
            if entry is None or entry.timer != timer:
                continue  # withdrawn since
            if entry.expires_at > now:
                heapq.heappush(self._deadlines, (entry.expires_at, timer, name, worker_id))
                continue
            self._drop(name, worker_id)
            self._expired.append(entry.registration.key)
            dropped += 1
        while self._gone and (oldest := next(iter(self._gone.items())))[1] <= now:
            del self._gone[oldest[0]]
        return dropped

    def resolve(self, name: str, now: float) -> PrefillServerInfo:
        """The instance, when it is whole. Raises `UnknownInstance`, or `NotReady` with what is missing."""
        instance = self._live(name, now)
        if instance.answer is None:
            instance.answer = _judge(name, instance)
        if isinstance(instance.answer, str):
            raise NotReady(instance.answer)
        return instance.answer

    def side(self, name: str, now: float) -> Side:
        """What the instance says of itself, ready or not. Raises `UnknownInstance`."""
        instance = self._live(name, now)
        one = instance.any_registration()
        if instance.fingerprint is None:
            instance.fingerprint = fingerprint(one.layout)
        return Side(one.protocol, instance.fingerprint)

    def endpoints(self, name: str, now: float) -> tuple[Endpoint, ...]:
        """The control endpoints of every live worker, in order of rank. Raises `UnknownInstance`."""
        workers = self._live(name, now).workers.values()
        ranks = sorted((one.registration.rank for one in workers), key=lambda one: one.coordinates)
        return tuple(one.endpoint for one in ranks)

    def has_control_keys(self, name: str, now: float) -> bool:
        """Whether a live worker demands CURVE on its control socket. Raises `UnknownInstance`."""
        workers = self._live(name, now).workers.values()
        return any(one.registration.rank.control_keys is not None for one in workers)

    def version(self, name: str, now: float) -> int:
        """Grows with every change of the instance; 0 while nobody is registered."""
        self.expire(now)
        instance = self._instances.get(name)
        return instance.version if instance else 0

    def take_changes(self) -> set[str]:
        """Names of the instances that changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def take_expired(self) -> list[WorkerKey]:
        """Whose lease has run out since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def rank(self, name: str, worker_id: str, now: float) -> RankInfo | None:
        """What a live worker of that name registered, or None."""
        self.expire(now)
        entry = self._entry(name, worker_id)
        return entry.registration.rank if entry else None

    def readiness(self, now: float) -> dict[str, str]:
        """Every instance by its name, and what keeps it from being whole ("": nothing)."""
        self.expire(now)
        told = {}
        for name, instance in self._instances.items():
            if instance.answer is None:
                instance.answer = _judge(name, instance)
            told[name] = instance.answer if isinstance(instance.answer, str) else ""
        return told

    def look(self, now: float, name: str = "") -> DirectoryView:
        """Everything that is registered, or one instance. Raises `UnknownInstance` for one that is not there."""
        not_ready = self.readiness(now)
        if name:
            self._live(name, now)
        views = []
        for each, instance in self._instances.items():
            if name in ("", each):
                one = instance.any_registration()
                entries = sorted(instance.workers.values(), key=lambda entry: entry.registration.rank.coordinates)
                workers = tuple(WorkerView.of(entry.registration, entry.expires_at - now) for entry in entries)
                facts = (one.protocol, one.layout, one.sizes, one.kinds, workers)
                views.append(InstanceView(each, instance.version, not_ready[each], *facts))
        return DirectoryView(tuple(views), self.lease_s)

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def _live(self, name: str, now: float) -> _Instance:
        self.expire(now)
        instance = self._instances.get(name)
        if instance is None:
            raise UnknownInstance(f"nobody has registered instance {name!r}")
        return instance

    def _entry(self, name: str, worker_id: str) -> _Entry | None:
        instance = self._instances.get(name)
        return instance.workers.get(worker_id) if instance else None

    def _drop(self, name: str, worker_id: str) -> None:
        instance = self._instances[name]
        entry = instance.workers.pop(worker_id)
        del instance.places[entry.registration.rank.coordinates]
        self._num_workers -= 1
        self._num_bytes -= entry.num_bytes
        self._touch(name, instance)
        if not instance.workers:
            del self._instances[name]

    def _bury(self, key: WorkerKey, now: float) -> None:
        """Keep a life from coming back, as a repeated or late registration would."""
        if len(self._gone) >= self._max_workers:
            del self._gone[next(iter(self._gone))]
        self._gone[key] = now + GONE_TTL_S

    def _touch(self, name: str, instance: _Instance) -> None:
        instance.version = next(self._versions)
        instance.answer = instance.fingerprint = None
        self._changed.add(name)

    def _check_room(self, is_new: bool, num_bytes: int) -> None:
        if is_new and self._num_workers >= self._max_workers:
            raise InvalidInput(
                f"{self._num_workers} workers are registered, which is all this service keeps "
                "(PDLINK_MAX_REGISTRATIONS)"
            )
        if num_bytes > 0 and self._num_bytes + num_bytes > self._max_bytes:
            raise InvalidInput(
                f"the registrations of {self._num_workers} workers take {self._num_bytes} bytes, and {num_bytes} more "
                f"would exceed the {self._max_bytes} that this service keeps; run another one for further instances"
            )


def _judge(name: str, instance: _Instance) -> PrefillServerInfo | str:
    one = instance.any_registration()
    ranks = [entry.registration.rank for entry in instance.workers.values()]
    plan = LayerPlan(one.sizes, one.kinds, {rank.coordinates: rank.owned for rank in ranks})
    faults = plan_faults(one.layout, plan)
    if faults:
        more = f"; and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
        names = {str(place): worker for place, worker in instance.places.items()}
        shown = "; ".join(_with_workers(text, names) for text in faults[:_SHOWN_FAULTS])
        return f"instance {name!r} is not ready: {shown}{more}"
    layouts = {entry.registration.rank.coordinates.tp: entry.registration.layout for entry in instance.workers.values()}
    by_tp = tuple(layouts[tp] for tp in range(one.sizes.tp)) if len(set(layouts.values())) > 1 else ()
    print_of = fingerprint(layouts[0])
    facts = (name, one.protocol, layouts[0], print_of, one.sizes, one.kinds, tuple(ranks), instance.version, by_tp)
    return PrefillServerInfo(*facts)


def _with_workers(text: str, names: Mapping[str, str]) -> str:
    """Add the worker's name after each rank that `text` mentions."""
    return _RANK.sub(lambda m: f"{m[0]} ({names[m[0]]})" if m[0] in names else m[0], text)


def _owns(claim: Claim, entry: _Entry) -> bool:
    return hmac.compare_digest(claim.owner, entry.claim.owner)


def _check_not_gone(until: float, new: Registration, now: float) -> None:
    if until > now:
        raise StaleIncarnation(
            f"worker {new.rank.worker_id!r} of instance {new.instance!r} registers as incarnation "
            f"{new.rank.incarnation}, which has withdrawn or was replaced; a new process needs a newer incarnation"
        )


def _check_claim(held: _Entry, new: Registration, claim: Claim) -> None:
    worker = f"worker {new.rank.worker_id!r} of instance {new.instance!r}"
    before, after = held.registration.rank.incarnation, new.rank.incarnation
    if before == after and not _owns(claim, held):
        raise NotOwner(
            f"{worker} incarnation {after} is registered by another process: the owner key is not the same; give each "
            "worker a name and rank of its own"
        )
    if before <= after and claim.identity != held.claim.identity and held.claim.identity:
        raise NotOwner(
            f"{worker} is registered with another certificate; restart it with a certificate of the same subject and "
            "names, or wait for the old worker's lease to run out"
        )


def _check_newer(held: _Entry | None, new: Registration) -> None:
    if held is not None and held.registration.rank.incarnation > new.rank.incarnation:
        raise StaleIncarnation(
            f"worker {new.rank.worker_id!r} of instance {new.instance!r} registers as incarnation "
            f"{new.rank.incarnation}, but incarnation {held.registration.rank.incarnation} has replaced it; a new "
            "process needs a newer incarnation"
        )


def _check_place_free(instance: _Instance, new: Registration) -> None:
    holder = instance.places.get(new.rank.coordinates)
    if holder is None or holder == new.rank.worker_id:
        return
    place = str(new.rank.coordinates)
    fix = "give each worker a rank of its own, or wait for the old worker's lease to run out"
    raise RegistrationConflict(
        [Mismatch(f"worker of rank {place}", holder, new.rank.worker_id, fix)],
        holder,
        f"worker {new.rank.worker_id!r} registers rank {place} of instance {new.instance!r}, which live worker "
        f"{holder!r} holds; {fix}",
    )


def _check_agrees(instance: _Instance, new: Registration) -> None:
    """All live workers say alike what belongs to the instance; one that is alone may change its mind. Ranks of the same
    tp coordinate have the same pages too, heads and all."""
    mine, tp = new.rank.worker_id, new.rank.coordinates.tp
    others = (one.registration for worker_id, one in instance.workers.items() if worker_id != mine)
    first = next(others, None)
    is_alike = first is None or first.rank.coordinates.tp == tp
    for held in (first, None if is_alike else next((one for one in others if one.rank.coordinates.tp == tp), None)):
        found = differences(held, new) if held else ()
        if held and found:
            first_of, more = found[0], f" (+{len(found) - 1} more)" if len(found) > 1 else ""
            fix = f"; {first_of.fix}" if first_of.fix else ""
            raise RegistrationConflict(
                found,
                held.rank.worker_id,
                f"worker {new.rank.worker_id!r} registers {first_of.field} {first_of.decode} with instance "
                f"{new.instance!r}, where live worker {held.rank.worker_id!r} registered {first_of.prefill}{fix}{more}",
            )
