"""Owns the rig as tests see it: its containers by service name, what breaks and heals them, and the front they serve.

It judges nothing. All of it goes through `docker/rig` and the Docker client, as a person's would.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import processes

REPO = Path(__file__).resolve().parents[2]
NAME = "pdlink-rig-test"
NET = "172.30.92"
PORT, PROMETHEUS_PORT = 18000, 19090
PATIENCE_S = 240.0
"""How long a test waits for what must come: no figure of pdlink's, and far above what a slow and busy machine takes."""
START_TIMEOUT_S = 800.0
"""The first start converts the weights, on a machine that may have other work."""
CALL_TIMEOUT_S = 900.0
GROUP_TIMEOUT_S = 8.0
"""How long a prefill rank waits for another in one step: half the default, so that faults show sooner."""
LOOK_S = 0.3
ADDRESSES = {
    "bootstrap-0": 10,
    "bootstrap-1": 11,
    "prefill-sidecar": 20,
    "prefill-0": 30,
    "prefill-1": 31,
    "prefill-2": 32,
    "prefill-3": 33,
    "decode-sidecar": 40,
    "decode": 41,
    "front": 50,
    "prometheus": 60,
}
"""The last byte of each service's address, as compose.yaml gives them."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Rig:
    """One rig, of this test run alone: its name, addresses and ports are not those of `make rig`."""

    front = f"http://127.0.0.1:{PORT}"
    prometheus = f"http://127.0.0.1:{PROMETHEUS_PORT}"

    def __init__(self, **variables: str) -> None:
        self._env = os.environ | {
            "RIG_NAME": NAME,
            "RIG_NET": NET,
            "RIG_PORT": str(PORT),
            "RIG_PROMETHEUS_PORT": str(PROMETHEUS_PORT),
            "RIG_PATIENCE_S": f"{PATIENCE_S:.0f}",
            "RIG_GROUP_TIMEOUT_S": f"{GROUP_TIMEOUT_S:g}",
            "RIG_READY_TIMEOUT_S": f"{START_TIMEOUT_S:.0f}",
            **variables,
        }

    def script(self, *arguments: str, **variables: str) -> str:
        """`docker/rig` with `arguments`; its output. It must succeed."""
        return _run([str(REPO / "docker" / "rig"), *arguments], self._env | variables)

    # --- one container ------------------------------------------------------------------------------

    def docker(self, *arguments: str) -> str:
        return _run(["docker", *arguments], self._env)

    def kill(self, service: str) -> None:
        self.docker("kill", self._container(service))

    def start(self, service: str) -> None:
        self.docker("start", self._container(service))

    def restart(self, service: str) -> None:
        self.docker("restart", self._container(service))

    def pause(self, service: str) -> None:
        """Asked again while runc is `unable to freeze`: under cgroup v1 it may be, while processes begin in there."""
        command = ["docker", "pause", self._container(service)]

        def paused() -> bool:
            done = processes.run(command, env=self._env, timeout_s=CALL_TIMEOUT_S, stderr=subprocess.STDOUT)
            said = str(done.stdout)
            assert done.returncode == 0 or "unable to freeze" in said, said
            return done.returncode == 0

        wait_until(paused, f"{service} is paused")

    def unpause(self, service: str) -> None:
        self.docker("unpause", self._container(service))

    def disconnect(self, service: str) -> None:
        self.docker("network", "disconnect", f"{NAME}_rig", self._container(service))

    def connect(self, service: str) -> None:
        address = f"{NET}.{ADDRESSES[service]}"
        self.docker("network", "connect", "--ip", address, "--alias", service, f"{NAME}_rig", self._container(service))

    def execute(self, service: str, *command: str) -> str:
        return self.docker("exec", self._container(service), *command)

    def logs(self, service: str) -> str:
        command = ["docker", "logs", "--tail=60", self._container(service)]
        done = processes.run(command, timeout_s=CALL_TIMEOUT_S, stderr=subprocess.STDOUT)
        return str(done.stdout)

    def inspect(self, service: str, template: str) -> str:
        return self.docker("inspect", "-f", template, self._container(service)).strip()

    # --- what is served -----------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Until the front says that prefill and decode are."""
        wait_until(lambda: get(f"{self.front}/readyz")[0] == 200, f"the rig is ready; {get(f'{self.front}/readyz')}")

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """One completion. Raises `OSError` where the front does not answer, `AssertionError` where it refuses."""
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
        request = urllib.request.Request(f"{self.front}/v1/completions", data=body)
        try:
            with _OPENER.open(request, timeout=2 * PATIENCE_S) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"the front answered {error.code}: {error.read().decode()}") from None

    def query(self, expression: str) -> float:
        """The one value of a Prometheus expression now; 0 where there is none."""
        where = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        status, text = get(where)
        assert status == 200, text
        found = json.loads(text)["data"]["result"]
        assert len(found) <= 1, f"{expression} has {len(found)} values: {found}"
        return float(found[0]["value"][1]) if found else 0.0

    def _container(self, service: str) -> str:
        return f"{NAME}-{service}"


def get(url: str) -> tuple[int, str]:
    """Status and body; status 0 with the reason where nobody answers."""
    try:
        with _OPENER.open(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Raises `AssertionError` naming `what`, which did not come in time."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, f"within {PATIENCE_S:g} s it did not come that {what}"
        time.sleep(LOOK_S)


def _run(command: list[str], env: dict[str, str]) -> str:
    done = processes.run(command, env=env, timeout_s=CALL_TIMEOUT_S, check=True)
    return str(done.stdout)
