"""What a whole rig answers, moves and counts, and what its containers are."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pdlink_engines.reference.serve.ask import events
from tests.rig.rig import NAME, NET, Rig, get, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.timeout(1800)]

OWNERS = [f"prefill/dp0.pp0.cp{rank}.tp0" for rank in range(4)]
RANKS = [f"prefill-{rank}" for rank in range(4)]
READS = ("pdlink_layer_reads_total", "pdlink_layer_fetch_seconds_count")
"""What each rank counts of its pool: reads of layers, and those of other ranks' layers."""


def test_answers_equal_those_of_one_process_and_every_owner_was_pulled_from(
    rig: Rig, expected: dict[str, list[int]]
) -> None:
    for prompt, tokens in expected.items():
        found = rig.complete(prompt, len(tokens))
        assert found["pdlink"]["tokens"] == tokens, prompt
        assert found["pdlink"]["backends"] == ["nixl"]
        assert sorted(found["pdlink"]["pulled_bytes"]) == OWNERS
        # Pages of 16 tokens, 30 layers, k and v, 3 heads of 64 float32: nothing missing, nothing twice.
        pages = -(-found["usage"]["prompt_tokens"] // 16)
        assert sum(found["pdlink"]["pulled_bytes"].values()) == pages * 16 * 30 * 2 * 3 * 64 * 4


def test_a_stream_has_the_same_tokens_as_an_answer_at_once(rig: Rig, expected: dict[str, list[int]]) -> None:
    prompt, tokens = next(iter(expected.items()))
    *_, last = events(rig.front, {"prompt": prompt, "max_tokens": len(tokens), "stream": True})
    assert last["pdlink"]["tokens"] == tokens


def test_prometheus_counts_what_the_front_counts(rig: Rig, expected: dict[str, list[int]]) -> None:
    pairs = {
        "pdlink_front_receives_total": 'sum(pdlink_transfers_total{job="decode",state="done"})',
        "sum(pdlink_front_received_bytes_total)": 'sum(pdlink_transfer_bytes_total{job="decode"})',
        'pdlink_front_tries_total{outcome="ok"} * 4': 'sum(pdlink_requests_total{job="prefill",state="released"})',
    }
    # The last requests of other tests are in every count before it is taken.
    wait_until(
        lambda: (
            rig.query("pdlink_front_receives_total") == _shown(rig, "pdlink_front_receives_total")
            and all(rig.query(front) == rig.query(theirs) for front, theirs in pairs.items())
        ),
        "Prometheus has what the front shows, and all three sides agree",
    )
    before = {one: rig.query(one) for pair in pairs.items() for one in pair}
    done = [rig.complete(prompt, len(tokens)) for prompt, tokens in expected.items()]
    moved = sum(sum(one["pdlink"]["pulled_bytes"].values()) for one in done)
    grown = {"pdlink_front_receives_total": len(done), "sum(pdlink_front_received_bytes_total)": moved}

    def gain(expression: str) -> float:
        return rig.query(expression) - before[expression]

    for front, want in grown.items():
        wait_until(lambda front=front, want=want: gain(front) == want, f"Prometheus has {front} grown by {want}")
    for front, theirs in pairs.items():
        wait_until(
            lambda front=front, theirs=theirs: gain(front) == gain(theirs) > 0,
            f"{front} and {theirs} grow alike; they are {gain(front)} and {gain(theirs)}",
        )
    wait_until(lambda: rig.query('min(up{job!="prometheus"})') == 1, "Prometheus reaches every target")


def _shown(rig: Rig, name: str) -> float:
    """The value of a metric without labels as the front itself shows it."""
    status, text = get(f"{rig.front}/metrics")
    assert status == 200, text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_prometheus_has_the_reads_of_every_prefill_rank(rig: Rig, expected: dict[str, list[int]]) -> None:
    reads, brought = (f'{name}{{job="prefill-rank"}}' for name in READS)
    ranks = {one: f'{reads.removesuffix("}")},instance="{one}:8100"}}' for one in RANKS}
    before = {one: rig.query(expression) for one, expression in ranks.items()}
    prompt, tokens = next(iter(expected.items()))
    rig.complete(prompt, len(tokens))
    for one, expression in ranks.items():
        wait_until(lambda e=expression, b=before[one]: rig.query(e) > b, f"{one} has read layers")
    assert rig.query(f"sum({brought})") > 0


def test_the_directory_lists_four_owners_at_addresses_of_the_sidecar(rig: Rig) -> None:
    shown = json.loads(rig.execute("bootstrap-1", "pdlink", "inspect", f"{NET}.11:7400", "--json"))
    text = json.dumps(shown)
    assert all(owner in text for owner in OWNERS)
    assert f"{NET}.20" in text


def test_containers_run_as_a_user_without_capabilities_and_say_that_they_are_well(rig: Rig) -> None:
    for service in ("bootstrap-0", "prefill-sidecar", "prefill-2", "decode", "front"):
        assert rig.execute(service, "id", "-u").strip() == "10001"
        assert rig.inspect(service, "{{.HostConfig.CapDrop}}") == "[ALL]"
        wait_until(
            lambda s=service: rig.inspect(s, "{{.State.Health.Status}}") == "healthy",
            f"{service} says that it is well",
        )


@pytest.fixture
def lone_rank(rig: Rig) -> Iterator[str]:
    """A small prefill rank with its link in its own process, on a host of its own; the name of its instance."""
    name, address = f"{NAME}-lone", f"{NET}.90"
    run = ["run", "-d", "--rm", "--name", name, "--network", f"{NAME}_rig", "--ip", address]
    run += ["-e", "UCX_TLS=tcp,cuda_copy", "-e", "PDLINK_BACKENDS=mooncake,ipc", "-e", f"PDLINK_BIND_HOST={address}"]
    serve = ["python", "-m", "pdlink_engines.reference.serve", "prefill", "--rank=0", "--cp=1", "--instance=lone"]
    serve += ["--model=glm-dsa-tiny", f"--http={address}:8100", f"--leader={address}:8200", "--pool-pages=16"]
    rig.docker(*run, rig.inspect("decode", "{{.Config.Image}}"), *serve, "--bootstrap=bootstrap-0:7400")
    try:
        wait_until(
            lambda: "lone/" in rig.execute("bootstrap-0", "pdlink", "inspect", f"{NET}.10:7400", "--json"),
            "the lone rank is registered",
        )
        yield "lone"
    finally:
        rig.docker("kill", name)


def test_ipc_is_refused_between_hosts_and_says_so_where_mooncake_reads(rig: Rig, lone_rank: str) -> None:
    command = f"pdlink ping {NET}.10:7400 --instance {lone_rank} --count 2 --json"
    fine = rig.execute("decode", "sh", "-c", f"PDLINK_BACKENDS=mooncake {command}")
    assert [(one["path"], one["ok"]) for one in json.loads(fine)["paths"]] == [("control", True), ("mooncake", True)]
    refused = rig.execute("decode", "sh", "-c", f"PDLINK_BACKENDS=ipc {command} 2>&1 || true")
    assert "runs on another host or with another /dev/shm" in refused
