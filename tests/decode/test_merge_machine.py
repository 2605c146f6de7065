"""Any interleaving of frames, repeats, gaps, pull results, verdicts, failures, aborts and time against one merge."""

from __future__ import annotations

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdlink.config import load_settings
from pdlink.control.frames import Abort, Ready, Release, Subscribed
from pdlink.decode.actions import Pull, Resubscribe, Send, StopPulls
from pdlink.decode.merge import Merge
from pdlink.layout.layer_plan import PlanKind
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import ReceiverState
from tests.decode.rig import INCARNATION, Cells, make_layout, make_plan, make_request, ready

SETTINGS = load_settings({})
PATIENT = load_settings(
    {}, confirm_timeout_s=1e4, liveness_timeout_s=1e4, subscribe_timeout_s=1e4, progress_timeout_s=1e4
)
"""For runs without a fault: time that passes is none."""
DRAINING = ReceiverState.DRAINING


def cut(data: st.DataObject, cells: Cells, num_pages: int, source: list[int], is_aux_owner: bool) -> list[Ready]:
    """What one owner publishes: rectangles of pages x layers, in any order, that cover its cells once."""
    bounds = sorted(data.draw(st.sets(st.integers(1, max(1, num_pages - 1)), max_size=2)) if num_pages > 1 else [])
    chunks = list(zip([0, *bounds], [*bounds, num_pages], strict=True))
    halves: list[Cells] = [cells]
    if data.draw(st.booleans()):
        halves = [{name: ids[::2] for name, ids in cells.items()}, {name: ids[1::2] for name, ids in cells.items()}]
    blocks = data.draw(st.permutations([(chunk, half) for chunk in chunks for half in halves]))
    aux = b"tok" if is_aux_owner else None
    return [
        ready(
            number,
            source[start:stop],
            {name: ids for name, ids in layers.items() if ids},
            start_page=start,
            last=number == len(blocks) - 1,
            aux=aux if number == len(blocks) - 1 else None,
        )
        for number, ((start, stop), layers) in enumerate(blocks)
    ]


class MergeMachine(RuleBasedStateMachine):
    """The model counts how often each cell landed, who vouched after the release, and which failure came first."""

    @initialize(
        data=st.data(),
        num_layers=st.integers(1, 5),
        cp=st.integers(1, 4),
        num_pages=st.integers(0, 5),
        first_page=st.integers(0, 2),
        expect_aux=st.booleans(),
        replicated=st.booleans(),
        faulty=st.booleans(),
    )
    def begin(
        self,
        data: st.DataObject,
        num_layers: int,
        cp: int,
        num_pages: int,
        first_page: int,
        expect_aux: bool,
        replicated: bool,
        faulty: bool,
    ) -> None:
        layout = make_layout(num_layers)
        self.plan, owned = make_plan(layout, cp, PlanKind.REPLICATED if replicated else PlanKind.SPLIT)
        self.faulty = faulty
        self.now = 0.0
        if not first_page + num_pages:
            first_page = 1
        destination = data.draw(st.permutations(range(num_pages + 3)))[:num_pages]
        request = make_request(layout, destination, first_page, expect_aux)
        self.merge = Merge(request, SETTINGS if faulty else PATIENT, self.now)
        # Decode holds `first_page` pages already; prefill publishes those too.
        self.frames: dict[str, list[Ready]] = {}
        for worker_id, cells in owned.items():
            source = data.draw(st.permutations(range(first_page + num_pages + 2)))
            is_aux_owner = worker_id == self.plan.aux_owner
            self.frames[worker_id] = cut(data, cells, first_page + num_pages, list(source), is_aux_owner)
        self.landed = {
            name: np.zeros((plan.num_rows, num_pages), dtype=int) for name, plan in self.plan.planner.groups.items()
        }
        self.column = {page: number for number, page in enumerate(destination)}
        self.pulls: dict[tuple[str, int], Pull] = {}
        self.released: set[str] = set()
        self.vouched: set[str] = set()
        self.finals: list[ReceiverState] = []
        self.first_failure: Failure | None = None
        self.drained = False
        self.merge.on_resolved(self.plan, self.now)
        self.look()

    # --- what may happen ----------------------------------------------------------------------------

    @rule(data=st.data())
    def a_frame_arrives(self, data: st.DataObject) -> None:
        """Any of an owner's frames: the next, an old one again, or one after a gap."""
        worker_id = data.draw(st.sampled_from(sorted(self.frames)))
        self.merge.on_ready(worker_id, data.draw(st.sampled_from(self.frames[worker_id])), self.now)
        self.look()

    @rule(data=st.data())
    def frames_arrive_in_order(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.frames)))
        for frame in self.frames[worker_id]:
            self.merge.on_ready(worker_id, frame, self.now)
        self.look()

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def a_pull_lands(self, data: st.DataObject) -> None:
        self.end_pull(data.draw(st.sampled_from(sorted(self.pulls))), None)

    @precondition(lambda self: self.pulls and self.faulty)
    @rule(data=st.data())
    def a_pull_fails(self, data: st.DataObject) -> None:
        self.end_pull(data.draw(st.sampled_from(sorted(self.pulls))), Failure(FailureReason.BACKEND, f"{self.now}"))

    @rule(data=st.data())
    def an_owner_vouches(self, data: st.DataObject) -> None:
        """Also before it was asked, and again after the end."""
        worker_id = data.draw(st.sampled_from(sorted(self.frames)))
        if self.merge.state is ReceiverState.CONFIRMING:
            self.vouched.add(worker_id)
        self.merge.on_verdict(worker_id, True, None, self.now)
        self.look()

    @precondition(lambda self: self.faulty)
    @rule(data=st.data(), with_cause=st.booleans())
    def an_owner_denies(self, data: st.DataObject, with_cause: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.frames)))
        cause = Failure(FailureReason.GENERATION, "taken back", worker_id) if with_cause else None
        self.merge.on_verdict(worker_id, False, cause, self.now)
        self.look()

    @precondition(lambda self: self.faulty)
    @rule(data=st.data())
    def an_owner_refuses(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.frames)))
        self.merge.on_refused(worker_id, Failure(FailureReason.EXPIRED, f"{self.now}"), self.now)
        self.look()

    @rule(data=st.data(), stray=st.booleans())
    def an_owner_answers(self, data: st.DataObject, stray: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.frames)))
        if stray:
            self.merge.on_abort_ack(worker_id, self.now)
        else:
            self.merge.on_subscribed(worker_id, Subscribed(INCARNATION, 0, True), self.now)
        self.look()

    @precondition(lambda self: self.faulty)
    @rule(data=st.data())
    def an_owner_is_replaced(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.frames)))
        self.merge.on_incarnation(worker_id, INCARNATION + 1, self.now)
        self.look()

    @precondition(lambda self: self.faulty)
    @rule()
    def the_engine_aborts(self) -> None:
        self.merge.fail(Failure(FailureReason.ABORTED, f"{self.now}"), self.now)
        self.look()

    @rule(seconds=st.sampled_from([0.05, 0.4, 1.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.merge.tick(self.now)
        self.look()

    @rule()
    def a_stranger_speaks(self) -> None:
        self.merge.on_ready("nobody", ready(0, [1], {"latent": (0,)}), self.now)
        self.merge.on_verdict("nobody", False, None, self.now)
        self.merge.on_refused("nobody", Failure(FailureReason.STALE, "x"), self.now)
        self.merge.on_abort_ack("nobody", self.now)
        self.look()

    # --- what must hold -----------------------------------------------------------------------------

    def end_pull(self, key: tuple[str, int], failure: Failure | None) -> None:
        pull = self.pulls.pop(key)
        if failure is None:
            for page in pull.pages.tolist():
                self.landed[pull.group][pull.rows, self.column[page]] += 1
        self.merge.on_pulled(*key, failure, self.now)
        self.look()

    def look(self) -> None:
        """Take the actions, and note what the model needs of them and of the state."""
        state = self.merge.state
        for action in self.merge.drain():
            if isinstance(action, Pull):
                assert not self.drained, "posted after the failure"
                assert (action.worker_id, action.ticket) not in self.pulls
                self.pulls[action.worker_id, action.ticket] = action
            elif isinstance(action, Send) and isinstance(action.body, Release):
                assert all((matrix == 1).all() for matrix in self.landed.values()), "released before all had landed"
                self.released.add(action.worker_id)
            elif isinstance(action, Send):
                assert isinstance(action.body, Abort)
                assert self.merge.failure == action.body.cause
            elif isinstance(action, StopPulls):
                assert set(action.worker_ids) == {worker_id for worker_id, _ in self.pulls}
            else:
                assert isinstance(action, Resubscribe)
        if state is DRAINING or (state.is_final and state is not ReceiverState.DONE):
            self.drained = True
            self.first_failure = self.first_failure or self.merge.failure
        if state.is_final and (not self.finals or self.finals[-1] is not state):
            self.finals.append(state)

    @invariant()
    def the_end_is_one_and_true(self) -> None:
        assert len(self.finals) <= 1
        assert self.merge.failure == self.first_failure
        state = self.merge.state
        if state.is_final:
            assert not self.pulls, "reported while a pull may still land"
        if state is ReceiverState.DONE:
            assert all((matrix == 1).all() for matrix in self.landed.values())
            assert self.released == set(self.frames)
            if self.merge.request.expect_aux or any(matrix.size for matrix in self.landed.values()):
                assert self.vouched == set(self.frames)
                assert self.merge.aux == b"tok"
        if state in (ReceiverState.FAILED, ReceiverState.ABORTED):
            assert self.merge.failure

    def teardown(self) -> None:
        """Whatever happened, with owners that now do their part, the end comes, and without a fault it is success."""
        if not hasattr(self, "merge"):
            return
        for _ in range(3):
            for worker_id in self.frames:
                for frame in self.frames[worker_id]:
                    self.merge.on_ready(worker_id, frame, self.now)
            self.look()
            for key in sorted(self.pulls):
                self.end_pull(key, None)
        for worker_id in sorted(self.frames):
            self.an_owner_vouches_now(worker_id)
        for _ in range(20):
            self.now += 0.5
            self.merge.tick(self.now)
            self.look()
            self.the_end_is_one_and_true()
        assert self.merge.state.is_final
        assert self.merge.is_settled, "something is still said to an owner long after the end"
        if not self.faulty:
            assert self.merge.state is ReceiverState.DONE, str(self.merge.failure)

    def an_owner_vouches_now(self, worker_id: str) -> None:
        if self.merge.state is ReceiverState.CONFIRMING:
            self.vouched.add(worker_id)
        self.merge.on_verdict(worker_id, True, None, self.now)
        self.look()


TestMergeMachine = MergeMachine.TestCase
TestMergeMachine.settings = hypothesis_settings(max_examples=250, stateful_step_count=30)
