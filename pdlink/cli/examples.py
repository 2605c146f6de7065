"""Owns the examples below the help of commands that have none of their own. A test parses every one of them."""

from __future__ import annotations


def _shown(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  pdlink {line}" for line in lines)


DEMO = _shown("demo", "demo --model smollm2 --backend nixl", "demo --json")
PLAN = _shown("plan --model glm-5.2 --cp 4 --tokens 8192", "plan --prefill pp2cp4tp1 --decode tp8 --json")
BOOTSTRAP = _shown("bootstrap --bind 127.0.0.1:7400", "bootstrap --config pdlink.yaml --http-bind 127.0.0.1:9400")
SIDECAR = _shown(
    "sidecar --socket /run/user/1000/pdlink.sock",
    "sidecar --config pdlink.yaml --backends ipc,nixl",
    "sidecar --config pdlink.yaml --http-bind 127.0.0.1:9401",
)
BENCH_PLAN = _shown("bench plan", "bench plan --json")
BENCH_CONTROL = _shown("bench control", "bench control --cp 4 --json")
BENCH_SIDECAR = _shown("bench sidecar", "bench sidecar --device cuda --json")
BENCH_TRANSFER = _shown("bench transfer --backend ipc", "bench transfer --backend nixl --plot rates.png")
BENCH_DIGEST = _shown("bench digest", "bench digest --json")
BENCH_READ = _shown("bench read", "bench read --json")
BENCH_LOOP = _shown("bench loop", "bench loop --json")
