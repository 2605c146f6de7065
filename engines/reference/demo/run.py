"""Owns the course of a demo run: start the processes, follow their reports, prove the outcome, end everything.

It prints nothing: `on_progress` gets one line at each step.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Collection
from typing import Any

from pdlink import errors
from pdlink.errors import BackendUnavailable, DeadlineExceeded, InvalidInput, NotReady, PdlinkError
from pdlink_engines.reference.demo.arrays import Received, find_difference
from pdlink_engines.reference.demo.process import DemoProcess, ProcessDied, Report
from pdlink_engines.reference.demo.result import DemoResult, RequestResult
from pdlink_engines.reference.demo.spec import DemoSpec, check_spec
from pdlink_engines.reference.models import prepare_model

STEP_TIMEOUT_S = 600.0
"""Longest silence of all processes together; models on small machines are slow, so it is generous."""
PACKAGE = "pdlink_engines.reference.demo"
OnProgress = Callable[[str], None]


def run_demo(spec: DemoSpec, on_progress: OnProgress) -> DemoResult:
    """Run `spec` in processes of its own, the bootstrap service included, and return what was found.

    `spec.bootstrap` is the address to bind, port 0 for any.

    Raises `InvalidInput` for a spec that cannot run and `ProcessDied` when a process fails. Whatever happens, no
    process and no shared memory is left behind.
    """
    spec = check_spec(spec)
    prepare_model(spec.model)
    run = _Run(spec, on_progress)
    try:
        return run.go()
    finally:
        run.stop()


class _Run:
    def __init__(self, spec: DemoSpec, on_progress: OnProgress) -> None:
        self._spec = spec
        self._on_progress = on_progress
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._bootstrap = DemoProcess("bootstrap", f"{PACKAGE}.bootstrap", [], self._reports)
        self._prefill = [
            DemoProcess(f"prefill-{rank}", f"{PACKAGE}.prefill_rank", [str(rank)], self._reports)
            for rank in range(spec.sizes.num_ranks)
        ]
        self._decode = [
            DemoProcess(
                f"decode-{tp}" if spec.decode_tp > 1 else "decode", f"{PACKAGE}.decode_rank", [str(tp)], self._reports
            )
            for tp in range(spec.decode_tp)
        ]
        self._ranks = (*self._prefill, *self._decode)
        self._sidecars = [
            DemoProcess(f"sidecar-{side}", f"{PACKAGE}.sidecar", [side], self._reports)
            for side in (("prefill", "decode") if spec.sidecar else ())
        ]
        self._result = DemoResult(spec.model, spec.cp, spec.pp, spec.decode_tp)
        self._result.requests = [
            RequestResult(one, text) for one, text in zip(spec.request_ids(), spec.prompts, strict=True)
        ]
        self._requests = {one.request_id: one for one in self._result.requests}
        self._address = ""
        self._seen: dict[str, int] = {}
        self._per_rank: dict[int, dict[str, Any]] = {}
        self._tokens: dict[tuple[int, str], list[int]] = {}

    def go(self) -> DemoResult:
        self._bootstrap.start(self._spec)
        self._until({"serving": 1})
        spec = self._spec.model_copy(update={"bootstrap": self._address})
        self._on_progress(f"bootstrap serves at {self._address}")
        for process in self._sidecars:
            process.start(spec)
        self._until({"beside": len(self._sidecars)})
        for process in self._ranks:
            process.start(spec)
        num_prefill, num_decode = len(self._prefill), len(self._decode)
        decode = f"{num_decode} decode ranks" if num_decode > 1 else "decode"
        self._on_progress(f"prefill ranks: {num_prefill}; they and {decode} load {spec.model}")
        self._until({"ready": num_prefill + num_decode})
        self._take_layers()
        self._say("go", self._ranks)
        count = len(spec.prompts)
        self._until({"received": count * num_decode, "generated": count * num_decode, "prefilled": count * num_prefill})
        one_stage = "in one stage, " if spec.pp > 1 else ""
        self._on_progress(f"the same prefill again, {one_stage}with every layer on every rank")
        self._say("compare", self._decode)
        self._until({"unsplit": spec.cp, "compared": count})
        self._say("end", (self._bootstrap, *self._sidecars))
        self._until({"exit": len(self._ranks) + len(self._sidecars) + 1})
        self._prove_bytes()
        self._prove_tokens()
        return self._result

    def stop(self) -> None:
        for process in (*self._ranks, *self._sidecars, self._bootstrap):
            process.stop()

    def _until(self, wanted: dict[str, int]) -> None:
        """Take reports until each wanted event has come that often in all."""
        while any(self._seen.get(event, 0) < count for event, count in wanted.items()):
            try:
                process, report = self._reports.get(timeout=STEP_TIMEOUT_S)
            except queue.Empty:
                waiting = ", ".join(event for event, count in wanted.items() if self._seen.get(event, 0) < count)
                raise DeadlineExceeded(f"no process reported for {STEP_TIMEOUT_S:g} s; waiting for {waiting}") from None
            self._take(process, report)

    def _take(self, process: DemoProcess, report: dict[str, Any]) -> None:
        event = str(report["event"])
        self._seen[event] = self._seen.get(event, 0) + 1
        if event == "error":
            raise _same_error(process.name, str(report["kind"]), str(report["text"]))
        if event == "exit" and report["code"] != 0:
            raise ProcessDied(f"{process.name} {_how_it_ended(int(report['code']))}{process.log_tail()}")
        handler = getattr(self, f"_on_{event}", None)
        if handler:
            handler(process, report)

    # --- reports ------------------------------------------------------------------------------------

    def _on_serving(self, process: DemoProcess, report: dict[str, Any]) -> None:
        self._address = str(report["address"])

    def _on_ready(self, process: DemoProcess, report: dict[str, Any]) -> None:
        if process in self._prefill:
            self._per_rank[self._prefill.index(process)] = report
            self._on_progress(f"{report['worker_id']} is registered")

    def _on_prefilled(self, process: DemoProcess, report: dict[str, Any]) -> None:
        request = self._requests[report["request"]]
        request.num_tokens, request.cached_tokens = report["num_tokens"], report["cached_tokens"]
        request.published_at = max(request.published_at, report["published_at"])

    def _on_received(self, process: DemoProcess, report: dict[str, Any]) -> None:
        request = self._requests[report["request"]]
        tp = self._decode.index(process)
        request.pulled[tp], request.pages[tp] = report["pulled_bytes"], report["pages"]
        request.done_at = max(request.done_at, report["done_at"])
        request.num_descriptors += report["num_descriptors"]
        self._result.backend = ", ".join(report["backends"])
        self._on_progress(f"{request.request_id}: {process.name} pulled {sum(report['pulled_bytes']):,} bytes")

    def _on_generated(self, process: DemoProcess, report: dict[str, Any]) -> None:
        request = self._requests[report["request"]]
        self._tokens[self._decode.index(process), request.request_id] = report["tokens"]
        if process is self._decode[0]:
            request.tokens, request.text = report["tokens"], report["text"]
            self._on_progress(f"{request.request_id}: decode generated {len(request.tokens)} token(s)")

    def _on_unsplit(self, process: DemoProcess, report: dict[str, Any]) -> None:
        self._result.kv_bytes_unsplit = report["owned_bytes"]

    def _on_compared(self, process: DemoProcess, report: dict[str, Any]) -> None:
        request = self._requests[report["request"]]
        request.proof_passed, request.tokens_equal = report["passed"], report["tokens_equal"]
        request.logit_difference, request.verdict = report["logit_difference"], report["verdict"]
        request.tie = report["tie"]

    # --- inside -------------------------------------------------------------------------------------

    def _take_layers(self) -> None:
        ranks = [self._per_rank[rank] for rank in range(len(self._prefill))]
        self._result.layers = [one["layers"] for one in ranks]
        self._result.kv_bytes_per_rank = [one["owned_bytes"] for one in ranks]
        self._result.scratch_bytes_per_rank = [one["scratch_bytes"] for one in ranks]

    def _prove_bytes(self) -> None:
        spec, layout = self._spec, self._spec.layout()
        for request in self._result.requests:
            found = None
            for tp, process in enumerate(self._decode):
                reader = process.name if len(self._decode) > 1 else ""
                received = Received(spec.received_dir(tp), spec.decode_layout(tp), spec.kept_heads(tp), reader)
                found = found or find_difference(layout, request.request_id, spec.run_dir / "expected", received)
            request.bytes_equal, request.difference = found is None, str(found or "")

    def _prove_tokens(self) -> None:
        """The comparison with plain transformers is of the first decode rank: the others must have said the same."""
        for (tp, request_id), tokens in sorted(self._tokens.items()):
            request = self._requests[request_id]
            if tokens != request.tokens:
                request.proof_passed = request.tokens_equal = False
                request.verdict = f"{self._decode[tp].name} generated other tokens than {self._decode[0].name}"

    def _say(self, command: str, processes: Collection[DemoProcess]) -> None:
        for process in processes:
            process.say(command)


def _same_error(process: str, kind: str, text: str) -> PdlinkError:
    """What a child refused, as the error that it was there: its class decides the exit code."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, InvalidInput | BackendUnavailable | NotReady):
        return found(text)
    return ProcessDied(f"{process}: {text}")


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
