"""Owns every decision about one receive: frames, pull results and time go in, actions come out. It does no I/O.

The pulls of all owners are merged by coverage of cells, never by counting ranks or messages. The first failure is
latched; nothing is reported before every owner is drained; exactly one final state is reached. Not thread-safe: the
decode worker calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdlink.config import Settings
from pdlink.control.frames import MAX_PUBLICATIONS, Abort, Ready, Release, Subscribed
from pdlink.decode import failures
from pdlink.decode.actions import Action, MergePlan, Pull, Resubscribe, Send, StopPulls
from pdlink.decode.request import ReceiveRequest
from pdlink.errors import IncompatibleError, PlanError
from pdlink.transfer.coverage import Coverage
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestKind, cells_in_order
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import RECEIVER_MOVES, ReceiverState, StateCell

PHASES = ("resolve_s", "wait_s", "pull_s", "confirm_s")
"""Of a receive, in their order."""


@dataclass(slots=True)
class _Claim:
    group: str
    rows: Int64Array
    start: int
    stop: int


@dataclass(slots=True)
class _Owner:
    """One prefill rank as this request sees it."""

    heard: float
    asked: float
    subscribed: bool = False
    begun: bool = False
    """Its engine has opened the request."""
    gap: bool = False
    """A Ready came before one that is missing."""
    next_sequence: int = 0
    pulled: dict[int, int] = field(default_factory=dict)
    pulling: dict[int, _Claim] = field(default_factory=dict)
    last: bool = False
    unchanged: bool = False
    """Its verdict was yes."""
    over: bool = False
    """It refused, failed, gave a verdict or acknowledged the abort: nothing more is asked of it."""


class Merge:
    """One request's decisions. `actions` collects what the worker must do next; `drain()` takes it."""

    def __init__(
        self, request: ReceiveRequest, settings: Settings, now: float, place: Callable[[str], str] = lambda _: ""
    ) -> None:
        """`place` says of a silent owner where it was asked and whether it is still registered."""
        self._place = place
        self.request = request
        self.failure: Failure | None = None
        self.aux: bytes | None = None
        self.num_bytes: dict[str, int] = {}
        self.num_descriptors = 0
        self._settings = settings
        self._state = StateCell(ReceiverState.RESOLVING, RECEIVER_MOVES)
        self._plan: MergePlan | None = None
        self._resolving = True
        """Whether the owners are still to come, which they may after the end."""
        self._coverage = Coverage({}, {})
        self._owners: dict[str, _Owner] = {}
        self._actions: list[Action] = []
        self._tickets = 0
        self._opened = now
        self._asked = now
        """When the owners were first asked for anything."""
        self._since = now
        """When the current state began."""
        self._progress: float | None = None
        """When pages last came; None before the first ones."""
        self._goodbye_until = 0.0
        self._ended = now
        self._entered = {ReceiverState.RESOLVING: now}

    @property
    def state(self) -> ReceiverState:
        return self._state.now

    @property
    def is_settled(self) -> bool:
        """Final, and nothing left to repeat to anyone."""
        return self.state.is_final and not self._resolving and all(owner.over for owner in self._owners.values())

    @property
    def elapsed_s(self) -> float:
        """From open to the end, once the state is final."""
        return self._ended - self._opened

    def ended_ago(self, now: float) -> float:
        """Seconds since the end, once the state is final."""
        return now - self._ended

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each state but draining, once the state is final; 0 where it was not entered. `wait_s` is from the
        subscribe to the first page that an owner published, `pull_s` from there to the last byte."""
        states = (ReceiverState.RESOLVING, ReceiverState.SUBSCRIBED, ReceiverState.PULLING, ReceiverState.CONFIRMING)
        began = [(name, self._entered.get(state)) for name, state in zip(PHASES, states, strict=True)]
        drained = self._entered.get(ReceiverState.DRAINING, self._ended)
        ends = [*(when for _, when in began[1:]), drained]
        told = {}
        for index, (name, when) in enumerate(began):
            end = next((one for one in ends[index:] if one is not None), drained)
            told[name] = end - when if when is not None else 0.0
        return told

    def quarantined_pages(self) -> int:
        """Destination pages that nobody may use before a pull that has gone wrong, or was stopped, is quiet."""
        if self.state is not ReceiverState.DRAINING:
            return 0
        held: dict[str, set[int]] = {}
        for owner in self._owners.values():
            for claim in owner.pulling.values():
                held.setdefault(claim.group, set()).update(range(claim.start, claim.stop))
        return sum(map(len, held.values()))

    def drain(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # --- events -------------------------------------------------------------------------------------

    def on_resolved(self, plan: MergePlan, now: float) -> None:
        """The owners are known. Subscribes to all of them, or succeeds at once when there is nothing to wait for.

        A request that has ended meanwhile tells them so: they may be holding pages for it.
        """
        if not self._resolving:
            return
        self._resolving = False
        self._plan = plan
        self._asked = now
        self._owners = {worker_id: _Owner(now, now) for worker_id in plan.incarnations}
        if self.state is not ReceiverState.RESOLVING:
            self._goodbye_until = now + self._settings.confirm_timeout_s
            self._repeat_abort(now, first=True)
            return
        self._coverage = Coverage(plan.planner.num_rows, self.request.num_pages)
        if self._coverage.is_complete and not self.request.expect_aux:
            self._release(now)
            self._goodbye_until = now + self._settings.confirm_timeout_s
            self._enter(ReceiverState.DONE, now)
            return
        self._enter(ReceiverState.SUBSCRIBED, now)
        for worker_id in self._owners:
            self._actions.append(Resubscribe(worker_id, 0))

    def on_unresolved(self, failure: Failure, now: float) -> None:
        """There are no owners to be had."""
        self._resolving = False
        self.fail(failure, now)

    def on_subscribed(self, worker_id: str, body: Subscribed, now: float) -> None:
        owner = self._hear(worker_id, now)
        if owner is None or self.state.is_final:
            return
        owner.subscribed, owner.begun = True, owner.begun or body.is_open
        self.on_incarnation(worker_id, body.incarnation, now)

    def on_incarnation(self, worker_id: str, incarnation: int, now: float) -> None:
        """Some process carries this worker now. One that was replaced cannot finish what it has not finished yet."""
        owner = self._owners.get(worker_id)
        if owner is None or owner.over or self.state.is_final:
            return
        assert self._plan is not None
        expected = self._plan.incarnations[worker_id]
        if incarnation != expected:
            owner.over = True
            self.fail(failures.replaced(worker_id, expected, incarnation), now)
            self._end_when_drained(now)

    def on_ready(self, worker_id: str, body: Ready, now: float) -> None:
        """Pull what became final. Repeats are ignored; a gap is left for the next subscribe to fill."""
        owner = self._hear(worker_id, now)
        if owner is None or self.state not in (ReceiverState.SUBSCRIBED, ReceiverState.PULLING):
            return
        if body.sequence != owner.next_sequence:
            owner.gap = owner.gap or body.sequence > owner.next_sequence
            return
        if body.sequence >= MAX_PUBLICATIONS:
            text = f"{worker_id} publishes more than {MAX_PUBLICATIONS} times"
            self.fail(Failure(FailureReason.LIMIT, text, worker_id, fix="publish more pages at a time"), now)
            return
        owner.next_sequence += 1
        owner.subscribed, owner.begun, owner.gap = True, True, False
        owner.pulled[body.sequence] = body.generation
        self._progress = now
        if self.state is ReceiverState.SUBSCRIBED:
            self._enter(ReceiverState.PULLING, now)
        try:
            self._claim(worker_id, owner, body)
        except PlanError as error:
            self.fail(Failure(FailureReason.PLAN, str(error), worker_id), now)
            return
        except IncompatibleError as error:
            self.fail(Failure.incompatible(error.mismatches, worker_id), now)
            return
        if body.last:
            self._on_last(worker_id, owner, body, now)
        self._confirm_when_complete(now)

    def on_pulled(self, worker_id: str, ticket: int, failure: Failure | None, now: float) -> None:
        """A pull is over and quiet: its bytes landed, or `failure` says why not."""
        owner = self._owners[worker_id]
        claim = owner.pulling.pop(ticket, None)
        assert claim is not None, f"pull {ticket} from {worker_id} was reported twice"
        if self.state is ReceiverState.DRAINING:
            self._end_when_drained(now)
        elif failure:
            self.fail(failure.at(self.state, worker_id), now)
        else:
            self._progress = now
            self._coverage.land(claim.group, claim.rows, claim.start, claim.stop)
            self._confirm_when_complete(now)

    def on_pull_failing(self, worker_id: str, failure: Failure, now: float) -> None:
        """A pull has gone wrong and is not quiet yet: the others stop, and its end is still to be waited for."""
        self.fail(failure.at(self.state, worker_id), now)

    def on_puller_over(self, worker_id: str, now: float) -> None:
        """Nothing that was pulled from an owner can land any more. What was not reported of it never will be."""
        owner = self._owners.get(worker_id)
        if owner and owner.pulling:
            owner.pulling.clear()
            text = f"pulls from {worker_id} ended and were never reported"
            self.fail(Failure(FailureReason.INTERNAL, text, worker_id, fix=failures.RESTART), now)
            self._end_when_drained(now)

    def pulling(self) -> list[str]:
        """Owners from which bytes may still land."""
        return [worker_id for worker_id, owner in self._owners.items() if owner.pulling]

    def on_verdict(self, worker_id: str, unchanged: bool, cause: Failure | None, now: float) -> None:
        owner = self._hear(worker_id, now)
        if owner is None or self.state in (ReceiverState.SUBSCRIBED, ReceiverState.PULLING):
            return  # nothing has been released yet, so this answers nothing
        if owner.unchanged:
            return  # it has vouched; what it says of a repeat, which may come after it has forgotten, changes nothing
        owner.over = True
        self._end_when_drained(now)
        if self.state is not ReceiverState.CONFIRMING:
            return
        if not unchanged:
            self.fail(cause or Failure(FailureReason.GENERATION, f"{worker_id} took its pages back", worker_id), now)
            return
        owner.unchanged = True
        if all(one.unchanged for one in self._owners.values()):
            self._enter(ReceiverState.DONE, now)

    def on_refused(self, worker_id: str, cause: Failure, now: float) -> None:
        """The owner refused the subscription, or ended the request on its side."""
        owner = self._hear(worker_id, now)
        if owner and not owner.over:
            owner.over = True
            self.fail(cause.at(self.state, worker_id), now)
            self._end_when_drained(now)

    def on_abort_ack(self, worker_id: str, now: float) -> None:
        owner = self._hear(worker_id, now)
        if owner and (self.state is ReceiverState.DRAINING or self.state.is_final):
            owner.over = True
            self._end_when_drained(now)

    def fail(self, failure: Failure, now: float) -> None:
        """Latch the first failure, stop posting, and drain. Later ones, and any after the end, change nothing."""
        if self.state.is_final or self.state is ReceiverState.DRAINING:
            return
        self.failure = failure.at(self.state)
        self._enter(ReceiverState.DRAINING, now)
        if busy := self.pulling():
            self._actions.append(StopPulls(tuple(busy)))
        self._repeat_abort(now, first=True)
        self._end_when_drained(now)

    def excuse(self, seconds: float) -> None:
        """This process stood still for so long: what it did not hear meanwhile was no silence."""
        for owner in self._owners.values():
            owner.heard += seconds

    def tick(self, now: float) -> None:
        """Repeat what is unanswered, and end waits that took too long."""
        if self.state.is_final:
            self._say_goodbye(now)
        elif self.state is ReceiverState.DRAINING:
            self._repeat_abort(now)
            self._end_when_drained(now)
        elif now - self._opened > self._settings.transfer_timeout_s:
            self.fail(self._overdue("the transfer", self._settings.transfer_timeout_s, "TRANSFER"), now)
        elif self.state is ReceiverState.CONFIRMING:
            self._tick_confirming(now)
        elif self.state is not ReceiverState.RESOLVING:
            self._tick_pulling(now)

    # --- inside -------------------------------------------------------------------------------------

    def _hear(self, worker_id: str, now: float) -> _Owner | None:
        owner = self._owners.get(worker_id)
        if owner:
            owner.heard = now
        return owner

    def _enter(self, state: ReceiverState, now: float) -> None:
        self._state.advance(state)
        self._since = self._ended = self._entered[state] = now

    def _claim(self, worker_id: str, owner: _Owner, body: Ready) -> None:
        """Turn the part of a Ready that was asked for into a pull."""
        assert self._plan is not None
        planner = self._plan.planner
        rows = planner.rows(worker_id, body.group, body.layers)
        first = self.request.first_page.get(body.group, 0)
        start = max(body.start_page, first)
        stop = min(body.start_page + len(body.page_ids), first + self.request.num_pages.get(body.group, 0))
        if not len(rows) or start >= stop:
            return
        if body.digests is None and self._settings.verify_digests:
            raise PlanError(
                f"{worker_id} sends no digests and this side verifies them; set PDLINK_VERIFY_DIGESTS alike on both"
            )
        if body.digests and not DigestKind.named(body.digests.kind):
            raise IncompatibleError([failures.unknown_digests(body.digests.kind)], worker_id)
        self._coverage.claim(body.group, rows, start - first, stop - first)
        cut = slice(start - body.start_page, stop - body.start_page)
        target = self.request.targets(body.group, start, stop)
        batch = planner.pull(worker_id, body.group, rows, body.page_ids[cut], target, start)
        self._tickets += 1
        owner.pulling[self._tickets] = _Claim(body.group, rows, start - first, stop - first)
        self.num_bytes[worker_id] = self.num_bytes.get(worker_id, 0) + batch.nbytes
        self.num_descriptors += batch.num_descriptors
        known = planner.groups[body.group].row_set(rows)
        digests = None
        if body.digests is not None:
            order = {cell: row for row, cell in enumerate(cells_in_order(body.layers))}
            digests = body.digests.part([order[cell] for cell in known.cells], cut)
        is_whole = stop - start == len(body.page_ids) and len(rows) == sum(len(ids) for ids in body.layers.values())
        # Staged unasked are pieces of all that was announced. Of a part of it they are of no use, and go back.
        num_pieces = body.staged_pieces if is_whole else 0
        said = (known.cells, body.sequence, body.generation, start, num_pieces, known.landing)
        self._actions.append(Pull(worker_id, self._tickets, batch, body.group, rows, target, digests, *said))

    def _on_last(self, worker_id: str, owner: _Owner, body: Ready, now: float) -> None:
        assert self._plan is not None
        owner.last = True
        planner = self._plan.planner
        for group, plan in planner.groups.items():
            hole = self._coverage.first_unclaimed(group, planner.rows(worker_id, group))
            if hole:
                component, layer = plan.cells[hole[0]]
                page = hole[1] + self.request.first_page[group]
                self.fail(failures.not_published(worker_id, component, layer, page), now)
                return
        if worker_id == self._plan.aux_owner:
            self.aux = body.aux
            if body.aux is None and self.request.expect_aux:
                self.fail(failures.no_aux(worker_id), now)

    def _confirm_when_complete(self, now: float) -> None:
        if self.state is not ReceiverState.PULLING or not self._coverage.is_complete:
            return
        assert self._plan is not None
        if self._owners[self._plan.aux_owner].last:
            self._enter(ReceiverState.CONFIRMING, now)
            self._release(now)

    def _release(self, now: float) -> None:
        for worker_id, owner in self._owners.items():
            owner.asked = now
            self._actions.append(Send(worker_id, Release(self.request.readers, dict(owner.pulled))))

    def _repeat_abort(self, now: float, first: bool = False) -> None:
        assert self.failure is not None
        for worker_id in self._due(now, lambda owner: not owner.over, first):
            self._actions.append(Send(worker_id, Abort(self.failure, self.request.readers)))

    def _end_when_drained(self, now: float) -> None:
        if self.state is not ReceiverState.DRAINING or any(owner.pulling for owner in self._owners.values()):
            return
        waited = now - self._since
        if all(one.over for one in self._owners.values()) or waited >= self._settings.abort_ack_timeout_s:
            assert self.failure is not None
            self._goodbye_until = now + self._settings.confirm_timeout_s
            aborted = self.failure.reason is FailureReason.ABORTED and not self.failure.worker_id
            self._enter(ReceiverState.ABORTED if aborted else ReceiverState.FAILED, now)

    def _say_goodbye(self, now: float) -> None:
        """After the end: repeat the release or abort to owners that have not answered, for a while."""
        if now > self._goodbye_until:
            for owner in self._owners.values():
                owner.over = True
        elif self.failure:
            self._repeat_abort(now)
        else:
            for worker_id in self._due(now, lambda owner: not owner.over):
                self._actions.append(Send(worker_id, Release(self.request.readers, self._owners[worker_id].pulled)))

    def _tick_confirming(self, now: float) -> None:
        if now - self._since > self._settings.confirm_timeout_s:
            silent = next(worker_id for worker_id, owner in self._owners.items() if not owner.unchanged)
            self.fail(self._overdue("the verdict", self._settings.confirm_timeout_s, "CONFIRM", silent), now)
            return
        for worker_id in self._due(now, lambda owner: not owner.unchanged):
            self._actions.append(Send(worker_id, Release(self.request.readers, dict(self._owners[worker_id].pulled))))

    def _tick_pulling(self, now: float) -> None:
        settings = self._settings
        for worker_id, owner in self._owners.items():
            if not owner.subscribed and now - self._asked > settings.subscribe_timeout_s:
                self.fail(
                    self._overdue("the answer to a subscribe", settings.subscribe_timeout_s, "SUBSCRIBE", worker_id),
                    now,
                )
                return
            if now - owner.heard > settings.liveness_timeout_s:
                self.fail(failures.silent(worker_id, settings.liveness_timeout_s, self._place(worker_id)), now)
                return
        if self._progress is None and now - self._asked > settings.first_page_timeout_s:
            begun = {worker_id: owner.begun for worker_id, owner in self._owners.items()}
            self.fail(failures.nothing_published(begun, settings.first_page_timeout_s), now)
            return
        if self._progress is not None and now - self._progress > settings.progress_timeout_s:
            self.fail(self._overdue("the next page", settings.progress_timeout_s, "PROGRESS"), now)
            return
        keepalive_s = min(settings.keepalive_interval_s, settings.liveness_timeout_s / 3)
        for worker_id, owner in self._owners.items():
            answered = owner.subscribed and not owner.gap
            interval = keepalive_s if answered else settings.resend_interval_s
            if now - owner.asked >= interval:
                owner.asked = now
                self._actions.append(Resubscribe(worker_id, owner.next_sequence))

    def _due(self, now: float, wanted: Callable[[_Owner], bool], first: bool = False) -> Iterator[str]:
        """Owners to which the current question is put (again), marking them as asked."""
        for worker_id, owner in self._owners.items():
            if wanted(owner) and (first or now - owner.asked >= self._settings.resend_interval_s):
                owner.asked = now
                yield worker_id

    def _overdue(self, what: str, waited_s: float, setting: str, worker_id: str = "") -> Failure:
        confirming = self.state is ReceiverState.CONFIRMING
        late = {name: one for name, one in self._owners.items() if not (one.unchanged if confirming else one.last)}
        # Those that have published nothing at all come first: there it is stuck.
        silent = set() if confirming else {name for name, one in late.items() if not one.next_sequence}
        names = sorted(late, key=lambda name: name not in silent)
        told = [f"{name} (nothing published)" if name in silent else name for name in names]
        named = f"PDLINK_{setting}_TIMEOUT_S"
        detail = failures.waiting_for(told)
        if worker_id and not self._owners[worker_id].subscribed and (place := self._place(worker_id)):
            detail = f"{detail}; {worker_id} {place}"
        return failures.timed_out(what, waited_s, named, worker_id or (names[0] if names else ""), detail)

    def waits_for(self) -> list[str]:
        """Owners of which something is still to come in this state, for whoever asks why it is not over."""
        if self.state is ReceiverState.DRAINING:
            return [name for name, one in self._owners.items() if one.pulling or not one.over]
        if self.state is ReceiverState.CONFIRMING:
            return [name for name, one in self._owners.items() if not one.unchanged]
        return [name for name, one in self._owners.items() if one.pulling or not one.last]
