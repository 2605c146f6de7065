"""Owns a process that has sglang imported and forks the processes of a test, each of which would need long for that.

It runs none of sglang's code, starts no thread, and makes no socket but its own; what it forks starts like a process
that has just made those imports. Plug-ins are not loaded in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import processes

REPO = Path(__file__).resolve().parents[2]
MAX_ORDER_BYTES = 1 << 16
END_TIMEOUT_S = 20.0


@dataclass
class Forked:
    """A process that the nursery forked. It is no child of this one, so that it is waited for by its pidfd."""

    pid: int
    pidfd: int

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def kill(self) -> None:
        if not self.wait(0):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.wait(END_TIMEOUT_S)


class Nursery:
    """The test's end of it. `close` twice is fine."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end = contextlib.ExitStack()
        self._end.enter_context(
            processes.started(
                [sys.executable, "-W", "ignore", "-m", "tests.sglang.nursery", str(theirs.fileno())],
                cwd=REPO,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        )
        theirs.close()

    def fork(
        self, module: str, arguments: list[str], environ: Mapping[str, str], stdin: int, stdout: int, stderr: int
    ) -> Forked:
        """Run `module` as `python -m` does, with these additions to the environment and these descriptors."""
        order = json.dumps({"module": module, "arguments": arguments, "environ": dict(environ)}).encode()
        socket.send_fds(self._socket, [order], [stdin, stdout, stderr])
        pid = int(self._socket.recv(64) or b"0")
        if not pid:
            raise AssertionError("the nursery has ended")
        return Forked(pid, os.pidfd_open(pid))

    def close(self) -> None:
        self._socket.close()
        self._end.close()


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    import sglang.srt.disaggregation.decode
    import sglang.srt.disaggregation.prefill
    import sglang.srt.managers.disagg_service
    import sglang.srt.mem_cache.dsa_cache_layer_split
    import sglang.srt.server_args  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 3)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            become(json.loads(order), descriptors)
        for one in descriptors:
            os.close(one)
        orders.send(str(pid).encode())


def become(order: dict[str, object], descriptors: list[int]) -> None:
    """In the fork: be that module, and end as a process of its own would, whatever it raises."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for target, one in enumerate(descriptors):
        os.dup2(one, target)
        os.close(one)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.update(order["environ"])  # type: ignore[call-overload]
    sys.argv = [str(order["module"]), *order["arguments"]]  # type: ignore[misc]
    runpy.run_module(str(order["module"]), run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
