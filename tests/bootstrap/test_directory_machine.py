"""The directory against a model that keeps a plain dict and recomputes everything."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdlink.bootstrap.directory import GONE_TTL_S, Claim, Directory, LeaseStatus
from pdlink.bootstrap.messages import PROTOCOL, Registration, WorkerKey
from pdlink.bootstrap.refusals import RegistrationConflict
from pdlink.errors import NotOwner, NotReady, StaleIncarnation
from pdlink.layout import ParallelSizes, PlanKind, RankCoordinates
from tests.bootstrap.values import make_layout, make_rank

LEASE_S = 10.0
SIZES = ParallelSizes(cp=2)
LAYOUTS = [make_layout(2, 64), make_layout(2, 32)]
SHARES = [(0,), (1,), (0, 1), ()]
WORKERS = st.sampled_from(["a", "b", "c"])
INCARNATIONS = st.integers(1, 6)
CLAIMS = st.sampled_from([Claim(), Claim(b"a"), Claim(b"b", "x"), Claim(b"b", "y")])


def build(worker, incarnation, cp, layout, share):
    owned = {one.name: share for one in layout.components}
    kinds = {one.name: PlanKind.SPLIT for one in layout.components}
    rank = make_rank(layout, RankCoordinates(cp=cp), owned, worker, incarnation=incarnation)
    return Registration("p", PROTOCOL, layout, SIZES, kinds, rank)


class DirectoryMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.directory = Directory(LEASE_S)
        self.now = 0.0
        self.held: dict[str, tuple[Registration, float, Claim]] = {}
        self.gone: dict[WorkerKey, float] = {}
        self.seen: Counter[int] = Counter()
        self.version = 0

    def live(self):
        self.held = {name: one for name, one in self.held.items() if one[1] > self.now}
        return self.held

    @rule(
        worker=WORKERS,
        incarnation=INCARNATIONS,
        cp=st.integers(0, 1),
        layout=st.sampled_from(LAYOUTS),
        share=st.sampled_from(SHARES),
        claim=CLAIMS,
    )
    def register(self, worker, incarnation, cp, layout, share, claim):
        new = build(worker, incarnation, cp, layout, share)
        held = self.live()
        others = [one for name, (one, _, _) in held.items() if name != worker]
        before = held[worker][0].rank.incarnation if worker in held else 0
        stale = before > incarnation or self.gone.get(new.key, self.now) > self.now
        theirs = before == incarnation and held[worker][2].owner != claim.owner
        theirs |= 0 < before <= incarnation and held[worker][2].identity not in ("", claim.identity)
        clash = any(one.rank.coordinates.cp == cp or one.layout != layout for one in others)
        if stale or theirs or clash:
            with pytest.raises(StaleIncarnation if stale else NotOwner if theirs else RegistrationConflict):
                self.directory.register(new, self.now, claim)
            return
        changed = self.directory.register(new, self.now, claim)
        assert changed == (worker not in held or held[worker][0] != new)
        if 0 < before < incarnation:
            self.gone[held[worker][0].key] = self.now + GONE_TTL_S
        kept = held[worker][2] if before == incarnation and not changed else claim
        self.held[worker] = (new, self.now + LEASE_S, kept)

    @rule(worker=WORKERS, incarnation=INCARNATIONS, claim=CLAIMS)
    def renew(self, worker, incarnation, claim):
        held = self.live()
        status = self.directory.renew(WorkerKey("p", worker, incarnation), self.now, claim)
        if worker not in held or held[worker][0].rank.incarnation < incarnation:
            assert status is LeaseStatus.UNKNOWN
        elif held[worker][0].rank.incarnation > incarnation:
            assert status is LeaseStatus.REPLACED
        elif held[worker][2].owner != claim.owner:
            assert status is LeaseStatus.NOT_OWNER
        else:
            assert status is LeaseStatus.RENEWED
            self.held[worker] = (held[worker][0], self.now + LEASE_S, held[worker][2])

    @rule(worker=WORKERS, incarnation=INCARNATIONS, claim=CLAIMS)
    def withdraw(self, worker, incarnation, claim):
        held, key = self.live(), WorkerKey("p", worker, incarnation)
        is_there = worker in held and held[worker][0].rank.incarnation == incarnation
        if is_there and held[worker][2].owner != claim.owner:
            with pytest.raises(NotOwner):
                self.directory.withdraw(key, self.now, claim)
            return
        assert self.directory.withdraw(key, self.now, claim) == is_there
        if is_there:
            del self.held[worker]
            self.gone[key] = self.now + GONE_TTL_S

    @rule(seconds=st.sampled_from([0.5, 4.0, 9.5, 10.0, 25.0, GONE_TTL_S]))
    def pass_time(self, seconds):
        self.now += seconds

    @invariant()
    def resolve_agrees_with_the_model(self):
        registrations = [one for one, _, _ in self.live().values()]
        owners = Counter(layer for one in registrations for layer in one.rank.owned["latent"])
        whole = len(registrations) == SIZES.num_ranks and owners == {0: 1, 1: 1}
        if not whole:
            with pytest.raises(NotReady):
                self.directory.resolve("p", self.now)
            return
        info = self.directory.resolve("p", self.now)
        assert sorted(one.worker_id for one in info.ranks) == sorted(self.held)
        assert all(self.held[one.worker_id][0].rank == one for one in info.ranks)
        assert info.version >= self.version
        self.version = info.version

    @invariant()
    def nothing_dead_is_counted(self):
        self.directory.expire(self.now)
        assert self.directory.num_workers == len(self.live())


DirectoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_the_directory_agrees_with_its_model = DirectoryMachine.TestCase
