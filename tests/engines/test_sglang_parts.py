"""The parts of the sglang plug-in that need no sglang: metadata rows, publishing threads, what is known of servers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest

from pdlink.address import Address
from pdlink.backends.ipc import IpcBackend
from pdlink.config import load_settings
from pdlink.errors import ConfigError, InvalidInput, LayoutError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.transfer.failure import Failure, FailureReason
from pdlink_engines.sglang import hooks
from pdlink_engines.sglang.aux_rows import AuxBuffer, AuxRows
from pdlink_engines.sglang.components import DsaModel, HeadsModel
from pdlink_engines.sglang.draining import Draining
from pdlink_engines.sglang.http_answers import HttpAnswers, PrefillFacts
from pdlink_engines.sglang.layer_ids import LayerIds, layer_ids_of
from pdlink_engines.sglang.offers import offered
from pdlink_engines.sglang.options import check_release, check_settings
from pdlink_engines.sglang.prefill_servers import HTTP_THREADS, MAX_DOUBTFUL, REFUSAL_TTL_S, PrefillServers
from pdlink_engines.sglang.publisher import NUM_THREADS, Publisher, PublishJob
from pdlink_engines.sglang.recompute import request_recompute
from pdlink_engines.sglang.version import check_version
from tests.sglang.nursery import REPO
from tests.sglang.servers import ON_CPU

WAIT_S = 60.0

# --- metadata rows ------------------------------------------------------------------------------------


def rows(*widths: int, num_rows: int = 4) -> tuple[list[np.ndarray], AuxRows]:
    arrays = [np.zeros((num_rows, width), dtype=np.uint8) for width in widths]
    buffers = [AuxBuffer(one.ctypes.data, one.shape[1], num_rows) for one in arrays]
    return arrays, AuxRows(buffers, 1 << 10)


def test_a_row_of_every_buffer_goes_over_and_no_other() -> None:
    ours, sent = rows(64, 128)
    theirs, received = rows(64, 128)
    for number, array in enumerate(ours):
        array[:] = np.arange(array.size, dtype=np.uint8).reshape(array.shape) + number
    received.write(3, sent.read(1))
    for mine, got in zip(ours, theirs, strict=True):
        assert (got[3] == mine[1]).all()
        assert not got[:3].any()


def test_metadata_of_another_length_is_refused_and_nothing_written() -> None:
    arrays, received = rows(64, 128)
    with pytest.raises(InvalidInput, match="191 bytes of metadata, a row here has 192"):
        received.write(0, bytes([1]) * 191)
    assert not any(array.any() for array in arrays)


def test_a_row_that_is_not_there_is_refused() -> None:
    _, one = rows(64)
    for index in (-1, 4):
        with pytest.raises(InvalidInput, match="outside the 4 rows"):
            one.read(index)


def test_metadata_over_the_limit_is_refused_and_the_widest_buffer_named() -> None:
    with pytest.raises(LayoutError, match=r"1088 bytes, over the limit of 1024.*aux_data_ptrs\[1\] alone"):
        rows(64, 1024)


# --- publishing ---------------------------------------------------------------------------------------


@dataclass
class Event:
    happened: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        self.asked.set()
        return self.happened


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(event_timeout_s=WAIT_S)
    yield made
    made.close()
    made.close()


def no_failure(failure: Failure) -> None:
    raise AssertionError(failure)


def test_a_job_waits_for_its_event_and_the_next_one_of_its_room_for_it(publisher: Publisher) -> None:
    event, done, order = Event(), threading.Event(), []
    waiting = publisher.order()
    publisher.submit(waiting, PublishJob(event, lambda: order.append("first"), no_failure))
    publisher.submit(waiting, PublishJob(None, lambda: (order.append("second"), done.set()), no_failure))
    assert event.asked.wait(WAIT_S)
    # On every thread, that of the waiting one too, others go on.
    for other in [publisher.order() for _ in range(NUM_THREADS)]:
        published = threading.Event()
        publisher.submit(other, PublishJob(None, published.set, no_failure))
        assert published.wait(WAIT_S)
    assert order == []
    event.happened = True
    assert done.wait(WAIT_S)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("raised", "reason"), [(InvalidInput("no such page"), FailureReason.PLAN), (KeyError("x"), FailureReason.INTERNAL)]
)
def test_a_job_that_fails_says_so_and_the_next_one_runs(
    publisher: Publisher, raised: Exception, reason: FailureReason
) -> None:
    def fail() -> None:
        raise raised

    failed: Future[Failure] = Future()
    done = threading.Event()
    order = publisher.order()
    publisher.submit(order, PublishJob(None, fail, failed.set_result))
    publisher.submit(order, PublishJob(None, done.set, no_failure))
    assert failed.result(WAIT_S).reason is reason
    assert done.wait(WAIT_S)


def test_an_event_that_never_happens_fails_the_request_in_time() -> None:
    publisher = Publisher(event_timeout_s=0.05)
    failed: Future[Failure] = Future()
    publisher.submit(publisher.order(), PublishJob(Event(), lambda: None, failed.set_result))
    assert "PDLINK_TRANSFER_TIMEOUT_S" in failed.result(WAIT_S).text
    publisher.close()


def test_requests_take_the_threads_in_turn(publisher: Publisher) -> None:
    names = []
    for order in [publisher.order() for _ in range(NUM_THREADS)]:
        named: Future[str] = Future()
        job = PublishJob(None, lambda named=named: named.set_result(threading.current_thread().name), no_failure)
        publisher.submit(order, job)
        names.append(named.result(WAIT_S))
    assert len(set(names)) == NUM_THREADS


def test_an_event_that_cannot_be_asked_fails_its_request_and_no_other(publisher: Publisher) -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("device lost")

    failed: Future[Failure] = Future()
    done = threading.Event()
    order = publisher.order()
    publisher.submit(order, PublishJob(Broken(), lambda: None, failed.set_result))
    publisher.submit(order, PublishJob(None, done.set, no_failure))
    assert "device lost" in failed.result(WAIT_S).text
    assert done.wait(WAIT_S)


# --- receivers of which something may still land ------------------------------------------------------------


@dataclass(eq=False)
class Drain:
    is_quiet: bool = False


def test_a_room_that_is_used_again_is_quiet_only_once_all_its_receivers_are() -> None:
    draining, older, newer = Draining(), Drain(), Drain()
    draining.hold(7, older)
    draining.hold(7, newer)
    assert draining.is_quiet(8)
    newer.is_quiet = True
    draining.let_go(7, newer)
    assert not draining.is_quiet(7)
    draining.let_go(7, older)
    assert not draining.is_quiet(7)  # the engine is through with it, and something may still land
    older.is_quiet = True
    assert draining.is_quiet(7)


def test_receivers_that_are_quiet_are_forgotten() -> None:
    draining, first = Draining(), Drain()
    draining.hold(1, first)
    first.is_quiet = True
    draining.hold(2, Drain())
    first.is_quiet = False
    assert draining.is_quiet(1)


# --- transports that reach the pool ---------------------------------------------------------------------------


def test_transports_that_cannot_reach_a_private_pool_are_not_named_and_the_setting_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    private = np.zeros(4096, dtype=np.uint8)
    backend = IpcBackend()
    try:
        backend.register(Region("kv", 0, private.ctypes.data, 4096, 4096, 1))
        assert offered({"ipc": backend}) == []
    finally:
        backend.close()
    assert "PDLINK_BACKENDS=ipc,nixl" in caplog.text


# --- what decode knows of prefill servers ---------------------------------------------------------------


class Threads:
    """An executor whose work is done when told."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def submit(self, call: Any, *arguments: Any) -> None:
        self.waiting.append(lambda: call(*arguments))

    def run(self) -> int:
        jobs, self.waiting = self.waiting, []
        for job in jobs:
            job()
        return len(jobs)


@pytest.fixture
def http() -> Iterator[HttpAnswers]:
    made = HttpAnswers(PrefillFacts(2, True, 30_000), lambda: None)
    yield made
    made.close()


def test_a_server_is_asked_once_and_away_from_the_caller(http: HttpAnswers) -> None:
    threads = Threads()
    servers = PrefillServers(threads, WAIT_S)
    address = str(http.address)
    assert not servers.look(address)
    assert not servers.look(address)
    assert servers.known == {}
    assert threads.run() == 1
    assert servers.look(address)
    assert servers.known[address] == PrefillFacts(2, True, 30_000)
    assert servers.refusal(address) is None
    servers.forget(address)
    assert not servers.look(address)


def test_a_server_that_is_not_there_is_asked_again_and_the_reason_said_once(caplog: pytest.LogCaptureFixture) -> None:
    threads = Threads()
    servers = PrefillServers(threads, WAIT_S)
    address = str(Address("127.0.0.1", 1))
    assert servers.trouble(address) is None
    for _ in range(3):
        assert not servers.look(address)
        assert threads.run() == 1
    assert servers.refusal(address) is None
    words = "prefill server 127.0.0.1:1 does not answer: .*refused; check bootstrap_host and bootstrap_port"
    assert re.match(words, str(servers.trouble(address)))
    assert [record.getMessage() for record in caplog.records] == [servers.trouble(address)]


def test_a_server_that_is_not_ready_says_what_is_missing_until_it_is() -> None:
    reasons: list[str | None] = ["1 of 2 prefill ranks have registered with pdlink"]
    answers = HttpAnswers(PrefillFacts(1, True), lambda: reasons[0])
    try:
        threads = Threads()
        servers = PrefillServers(threads, WAIT_S)
        address = str(answers.address)
        assert not servers.look(address)
        threads.run()
        assert "is not ready" in str(servers.trouble(address))
        assert "1 of 2" in str(servers.trouble(address))
        reasons[0] = None
        assert not servers.look(address)
        threads.run()
        assert servers.look(address)
        assert servers.trouble(address) is None
    finally:
        answers.close()


def test_servers_that_are_gone_leave_threads_to_the_others(http: HttpAnswers) -> None:
    threads = Threads()
    servers = PrefillServers(threads, WAIT_S)
    gone = [str(Address("127.0.0.1", port)) for port in range(1, MAX_DOUBTFUL + 3)]
    for address in gone:
        servers.look(address)
    threads.run()
    for address in gone:
        servers.look(address)
    assert len(threads.waiting) == MAX_DOUBTFUL < HTTP_THREADS
    assert not servers.look(str(http.address))
    assert len(threads.waiting) == MAX_DOUBTFUL + 1
    threads.run()
    assert servers.look(str(http.address))
    # Those that were left out have their turn.
    assert not servers.look(gone[-1])
    assert threads.run() == 1


def test_a_server_without_pdlink_is_refused_by_name_until_another_may_be_there(http: HttpAnswers) -> None:
    now, threads = [0.0], Threads()
    servers = PrefillServers(threads, WAIT_S, lambda: now[0])
    address = f"{http.address}/elsewhere"
    assert not servers.look(address)
    threads.run()
    assert servers.look(address)
    assert "does not run pdlink (it answered 404" in str(servers.refusal(address))
    now[0] = REFUSAL_TTL_S + 1
    assert not servers.look(address)
    assert servers.refusal(address) is None


def test_many_threads_may_look_at_once(http: HttpAnswers) -> None:
    with ThreadPoolExecutor(8) as threads:
        servers = PrefillServers(threads, WAIT_S)
        for looks in [threads.submit(servers.look, str(http.address)) for _ in range(32)]:
            looks.result(WAIT_S)
    assert servers.look(str(http.address))


# --- a retracted request is computed again ----------------------------------------------------------------


@dataclass
class Retracted:
    bootstrap_addr: str
    reasons: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        self.reasons.append(reason)


class Generate(BaseHTTPRequestHandler):
    """sglang's `/generate`; refuses requests of no tokens."""

    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, payload))
        self.send_response(200 if payload["input_ids"] else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def generate() -> Iterator[int]:
    Generate.asked.clear()
    server = HTTPServer(("127.0.0.1", 0), Generate)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join(WAIT_S)
    server.server_close()


def test_a_retracted_request_goes_to_generate_of_its_prefill_server(generate: int) -> None:
    receiver = Retracted("127.0.0.1:8998")
    known = {"127.0.0.1:8998": PrefillFacts(1, True, generate)}
    request_recompute(receiver, known, {"rid": "a", "input_ids": [1, 2]}, WAIT_S)
    assert Generate.asked == [("/generate", {"rid": "a", "input_ids": [1, 2]})]
    assert receiver.reasons == []


def test_a_request_that_cannot_be_computed_again_fails_with_the_reason(generate: int) -> None:
    receiver = Retracted("127.0.0.1:8998")
    request_recompute(receiver, {}, {"rid": "a"}, WAIT_S)
    known = {"127.0.0.1:8998": PrefillFacts(1, True, generate)}
    request_recompute(receiver, known, {"rid": "a", "input_ids": []}, WAIT_S)
    first, second = receiver.reasons
    assert "did not say where its /generate is" in first
    assert f"http://127.0.0.1:{generate}/generate did not recompute request a" in second
    assert "400" in second


# --- pools and versions -----------------------------------------------------------------------------------


class DType:
    itemsize = 2

    def __str__(self) -> str:
        return "torch.bfloat16"


class MLATokenToKVPool:
    """What is read of sglang's pool of that name."""

    start_layer, layer_num, device = 0, 3, "cuda"
    kv_cache_dim, dtype, store_dtype = 576, DType(), DType()
    kv_scale_buffer = None


class MHATokenToKVPool:
    start_layer, layer_num, device = 0, 2, "cpu"
    head_num, head_dim, v_head_dim, kv_cache_layout = 4, 16, 8, "nhd"
    dtype, store_dtype, k_scale_buffer = DType(), DType(), None


def test_ids_of_an_mla_pool_are_its_layers_and_its_draft_follows() -> None:
    ids = layer_ids_of(MLATokenToKVPool(), MLATokenToKVPool(), 3)
    assert isinstance(ids, LayerIds)
    assert ids == [0, 1, 2, 3, 4, 5]
    draft = {"num_draft_layers": 3, "draft_latent_bytes_per_token": 1152, "draft_dtype": "bfloat16"}
    assert ids.facts.model == DsaModel(3, (), 1152, **draft)
    assert ids.facts.memory is MemoryKind.CUDA


def test_ids_of_a_pool_of_heads_are_those_of_k_then_of_v() -> None:
    ids = layer_ids_of(MHATokenToKVPool(), None, 0)
    assert ids == [0, 1, 0, 1]
    assert ids.facts.model == HeadsModel(2, 4, 32, 16)
    assert (ids.facts.memory, ids.facts.is_split) == (MemoryKind.HOST, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_layout": "hnd"}, "kv_cache_layout 'hnd'"),
        ({"k_scale_buffer": object()}, "k_scale_buffer"),
        ({"start_layer": 2}, "pipeline stages"),
    ],
)
def test_a_pool_that_cannot_be_described_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    pool = MHATokenToKVPool()
    for name, value in change.items():
        setattr(pool, name, value)
    with pytest.raises(LayoutError, match=words):
        layer_ids_of(pool, None, 0)


def test_a_strange_pool_and_a_draft_of_heads_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="KV pool DType cannot be described"):
        layer_ids_of(DType(), None, 0)
    with pytest.raises(LayoutError, match="draft pool MHATokenToKVPool"):
        layer_ids_of(MHATokenToKVPool(), MHATokenToKVPool(), 4)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_the_version_that_the_plug_in_was_made_for_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.24", "0.5.2", "0.5.230", "0.5.23rc1", "0.6.0"])
def test_another_version_is_refused_with_both(version: str) -> None:
    with pytest.raises(InvalidInput, match=f"sglang {version} is installed.*0.5.23"):
        check_version(version)


@pytest.mark.parametrize(("drain_s", "release_s"), [(20, 23), (27, 30), (86_400, 30)])
def test_pages_that_sglang_would_free_while_pdlink_may_write_them_are_refused(drain_s: float, release_s: float) -> None:
    settings = load_settings({}, drain_timeout_s=drain_s, abort_ack_timeout_s=1)
    release = f"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT={release_s}"
    with pytest.raises(ConfigError, match=f"{release} is too short for PDLINK_DRAIN_TIMEOUT_S={drain_s}:"):
        check_release(settings, True, release_s)


def test_pages_are_held_long_enough_by_default_and_where_sglang_waits_longer() -> None:
    check_release(load_settings({}), True, 30.0)
    check_release(load_settings({}, drain_timeout_s=86_400), True, 86_404.0)
    with pytest.raises(ConfigError, match="KV_RELEASE is off"):
        check_release(load_settings({}), False, 30.0)


def test_the_readme_runs_servers_on_cpu_as_the_tests_do() -> None:
    text = (REPO / "engines" / "sglang" / "README.md").read_text(encoding="utf-8")
    told = re.search(r'^ON_CPU="([^"]*)"$', text, re.MULTILINE)
    assert told
    assert told[1].split() == ON_CPU.split()


def test_the_name_to_serve_under_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.backend_name() == "pdlink"
    monkeypatch.setenv(hooks.SETTING, "nixl")
    assert hooks.backend_name() == "nixl"
    monkeypatch.setenv(hooks.SETTING, "mori")
    with pytest.raises(ConfigError, match="mori"):
        hooks.backend_name()


def test_credentials_that_cannot_be_used_are_refused_with_the_other_settings() -> None:
    with pytest.raises(ConfigError, match=r"PDLINK_TLS_CA='/nowhere\.pem' cannot be read"):
        check_settings(load_settings({}, tls_ca="/nowhere.pem"))
    assert check_settings(load_settings({}, token="0123456789abcdef")).token is not None
