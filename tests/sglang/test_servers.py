"""Real servers: a prefill and a decode server with pdlink say what one server alone says."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.sglang.collector import Collector, collecting
from tests.sglang.rig import free_port
from tests.sglang.servers import HOST, MODEL, Server, readme_commands, with_values

NUM_REQUESTS = 50
NUM_TOKENS = 5
VOCABULARY = 512
# The tiny model takes seconds; loading sglang seven times does not.
pytestmark = pytest.mark.timeout(480)


@dataclass(frozen=True)
class Cluster:
    alone: Server
    prefill: Server
    decode: Server
    bootstrap_port: int
    collector: Collector
    """Of the spans of `prefill` and `decode`; `alone` traces nothing."""

    def generate(
        self, tokens: list[int], num_tokens: int, room: int, trace_parent: str = ""
    ) -> tuple[list[int], list[int]]:
        """What prefill and decode answer, asked at the same time, as a router does."""
        where: dict[str, Any] = {"bootstrap_host": HOST, "bootstrap_port": self.bootstrap_port, "bootstrap_room": room}
        where["trace_parent"] = trace_parent
        with ThreadPoolExecutor(1) as other:
            first = other.submit(self.prefill.generate, tokens, num_tokens, **where)
            return self.decode.generate(tokens, num_tokens, **where), first.result()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """By the commands of the README, with the tiny model and on CPU. They start side by side, which loads them once."""
    folder = tmp_path_factory.mktemp("servers")
    bootstrap_port = free_port()
    # Prefill offers both, with a pool that sglang made in shared memory; decode takes what it has.
    environ = {"prefill": {"PDLINK_BACKENDS": "ipc,nixl"}, "decode": {"PDLINK_BACKENDS": "nixl"}}
    servers: dict[str, Server] = {}
    with contextlib.ExitStack() as end:
        end.callback(processes.sweep)  # killed schedulers leave their staging memory to the next process that looks
        collector = end.enter_context(collecting())
        for role, words in readme_commands().items():
            port = free_port()
            values = {"--port": str(port), "--disaggregation-bootstrap-port": str(bootstrap_port)}
            command = with_values(words, {"--model-path": str(MODEL), **values}) + collector.arguments
            if role == "decode":
                # Retracted requests would be kept in pinned memory, which needs CUDA; and prefixes are kept here.
                command += ["--disaggregation-decode-retraction-backup", "none"]
                command += ["--disaggregation-decode-enable-radix-cache"]
            known = {**environ[role], **collector.environ, "PDLINK_TRACING": "1"}
            servers[role] = Server(role, command, port, folder / f"{role}.log", known)
            end.callback(servers[role].close)
        port = free_port()
        alone = ["-m", "sglang.launch_server", "--model-path", str(MODEL), "--port", str(port)]
        servers["alone"] = Server("alone", alone, port, folder / "alone.log", {})
        end.callback(servers["alone"].close)
        for server in servers.values():
            server.wait_ready()
        yield Cluster(**servers, bootstrap_port=bootstrap_port, collector=collector)


def prompts() -> list[list[int]]:
    """Lengths below a page, of many pages and of several chunks; half of them share a beginning."""
    source = random.Random(3)
    common = [source.randrange(3, VOCABULARY) for _ in range(80)]
    made = []
    for number in range(NUM_REQUESTS):
        own = [source.randrange(3, VOCABULARY) for _ in range(source.randrange(1, 150))]
        made.append(common + own if number % 2 else own)
    return made


def test_the_pair_says_what_one_server_says_with_fifty_requests_at_once(cluster: Cluster) -> None:
    asked = prompts()
    with ThreadPoolExecutor(8) as clients:
        expected = list(clients.map(lambda tokens: cluster.alone.generate(tokens, NUM_TOKENS), asked))
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        calls = [clients.submit(cluster.generate, tokens, NUM_TOKENS, 1000 + room) for room, tokens in enumerate(asked)]
        answers = [call.result() for call in calls]
    assert [decode for decode, _ in answers] == expected
    assert [prefill for _, prefill in answers] == [tokens[:1] for tokens in expected]
    # The model does say different things.
    assert len({tuple(tokens) for tokens in expected}) > NUM_REQUESTS // 5
    assert "over ipc, nixl" in cluster.prefill.log.read_text()
    assert "does not offer" not in cluster.prefill.log.read_text()
    log = cluster.decode.log.read_text()
    assert "over nixl" in log
    assert log.count(" done: ") >= NUM_REQUESTS


def test_a_prefix_that_decode_keeps_does_not_change_what_it_says(cluster: Cluster) -> None:
    tokens = [5 + index % 300 for index in range(120)]
    expected = cluster.alone.generate(tokens, 6)
    assert cluster.generate(tokens, 6, 5001) == (expected, expected[:1])
    # Again, now with most of it on decode already, and longer.
    longer = tokens + [9, 8, 7]
    again = cluster.alone.generate(longer, 6)
    assert cluster.generate(longer, 6, 5002) == (again, again[:1])
    first, second = (moved_bytes(cluster.decode.log, room) for room in (5001, 5002))
    assert 0 < second < first / 2


def test_a_prompt_that_the_prefill_server_refuses_fails_on_both(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match="answered"):
        cluster.generate([1] * 1030, 4, 6001)
    assert cluster.generate([4, 5, 6], 4, 6002)[0] == cluster.alone.generate([4, 5, 6], 4)


def test_spans_of_pdlink_belong_to_the_trace_that_the_request_came_with(cluster: Cluster) -> None:
    """The router's trace, of which sglang makes a span for the request on decode, below which pdlink's are."""
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    cluster.generate([7] * 40, 4, 7001, f"00-{trace}-{span}-01")
    spans = cluster.collector.wait_for(trace, "pdlink.receive", "pdlink.publish", "decode Req", "pull")
    (request,) = [one for one in spans if one.name.startswith("decode Req")]
    assert request.parent_id == span
    for name in ("pdlink.receive", "pdlink.publish"):
        (made,) = [one for one in spans if one.name == name]
        assert made.parent_id == request.span_id, name


def test_a_server_whose_plug_in_cannot_serve_ends_with_the_reason(tmp_path: Path) -> None:
    words = with_values(readme_commands()["prefill"], {"--model-path": str(MODEL), "--port": str(free_port())})
    server = Server("broken", words, 0, tmp_path / "broken.log", {"PDLINK_SGLANG_BACKEND_NAME": "mori"})
    try:
        assert server.wait_ended(120) == 1
        assert "error: pdlink cannot serve this sglang: PDLINK_SGLANG_BACKEND_NAME='mori'" in server.tail(1)
    finally:
        server.close()


def moved_bytes(log: Path, room: int) -> int:
    (line,) = [line for line in log.read_text().splitlines() if f"transfer {room} done: " in line]
    return int(line.partition(" done: ")[2].split()[0])
