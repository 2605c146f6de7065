"""Owns the hosts of a fault test: network namespaces joined by a bridge, whose links are cut and slowed, or loopback.

A namespace lives as long as the process that holds it, which ends when this process does. It starts nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests import processes

START_TIMEOUT_S = 60.0
CUT = 50
"""Priority of the rules that drop what a host hears; below that of local delivery."""
TOOLS = ("unshare", "nsenter", "ip", "tc")


@dataclass(frozen=True, slots=True)
class Host:
    """Where processes run. `holder` is the process that keeps its namespace, 0 for this machine's own."""

    name: str
    address: str
    holder: int = 0


@dataclass
class Hosts:
    """The hosts by name. On loopback nothing can be cut."""

    hosts: dict[str, Host]
    switch: int = 0
    _cuts: set[tuple[str, str]] = field(default_factory=set)

    @property
    def can_cut(self) -> bool:
        return self.switch != 0

    @property
    def device(self) -> str:
        """What the network device of each host is called."""
        return "eth0" if self.can_cut else "lo"

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, listener: str, speaker: str) -> None:
        """From now on `listener` hears nothing of `speaker`; what it says itself still arrives."""
        if (listener, speaker) in self._cuts:
            return
        self._cuts.add((listener, speaker))
        _inside(self[listener].holder, f"ip rule add pref {CUT} from {self[speaker].address} blackhole")

    def slow(self, name: str, mbit: int) -> None:
        """What comes to and from that host passes a link of `mbit` Mbit/s."""
        shape = f"root tbf rate {mbit}mbit burst 32kb latency 40ms"
        _inside(self[name].holder, f"tc qdisc replace dev eth0 {shape}")
        _inside(self.switch, f"tc qdisc replace dev to_{name} {shape}")

    def waiting(self) -> list[str]:
        """Connections between hosts that have sent something again and still wait for an answer; none on loopback,
        where other processes have theirs too. After a cut they may do so for as long as it took, and longer."""
        return [f"{host.name}: {one}" for host in self.hosts.values() if host.holder for one in _resending(host.holder)]

    def heal(self) -> None:
        """Undo every cut and every slow link."""
        for listener, speaker in self._cuts:
            _inside(self[listener].holder, f"ip rule del pref {CUT} from {self[speaker].address}")
        self._cuts.clear()
        for host in self.hosts.values() if self.can_cut else ():
            _inside(host.holder, "tc qdisc del dev eth0 root 2>/dev/null || true")
            _inside(self.switch, f"tc qdisc del dev to_{host.name} root 2>/dev/null || true")


def _resending(holder: int) -> list[str]:
    """Of the table of TCP in the namespace of a process: whose timer has gone off without an answer since."""
    found = []
    for line in Path(f"/proc/{holder}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, remote, state, _, _, resent, _, probed, *_ = line.split()
        if int(resent, 16) or int(probed):
            found.append(f"{local} to {remote}, state {state}, {int(resent, 16)} times again")
    return found


def loopback(names: Sequence[str]) -> Hosts:
    """All on this machine."""
    return Hosts({name: Host(name, "127.0.0.1") for name in names})


def namespaces(stack: contextlib.ExitStack, names: Sequence[str]) -> Hosts:
    """One network namespace each, all on one bridge, which has a namespace of its own. They end with `stack`."""
    switch = _hold(stack)
    _inside(switch, "ip link add br0 type bridge && ip link set br0 up")
    hosts = {}
    for number, name in enumerate(names, start=1):
        host = hosts[name] = Host(name, f"10.77.0.{number}", _hold(stack))
        _inside(
            switch,
            f"ip link add to_{name} type veth peer name eth0 netns {host.holder} && "
            f"ip link set to_{name} master br0 && ip link set to_{name} up",
        )
        _inside(
            host.holder,
            f"ip addr add {host.address}/24 dev eth0 && ip link set lo up && ip link set eth0 up && "
            # Local delivery comes after our cuts; its rule can't be moved, only made anew.
            "ip rule add pref 100 lookup local && ip rule del pref 0",
        )
    return Hosts(hosts, switch)


@cache
def namespaces_missing() -> str:
    """Why network namespaces can't be had here; empty if they can."""
    if missing := [name for name in TOOLS if not shutil.which(name)]:
        return f"network namespaces need {', '.join(missing)} (Debian packages iproute2 and util-linux)"
    try:
        with contextlib.ExitStack() as stack:
            hosts = namespaces(stack, ["a", "b"])
            hosts.slow("a", 100)
            hosts.cut("a", "b")
            hosts.heal()
    except (subprocess.SubprocessError, OSError, AssertionError) as error:
        said = getattr(error, "stderr", None) or error
        return f"network namespaces can't be had here: {said}"
    return ""


def _hold(stack: contextlib.ExitStack) -> int:
    """A process in a new network namespace, which ends when its input does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    process = stack.enter_context(processes.started(["unshare", "--net", "cat"], **pipes))
    own, give_up = os.readlink("/proc/self/ns/net"), time.monotonic() + START_TIMEOUT_S
    while os.readlink(f"/proc/{process.pid}/ns/net") == own:
        assert process.poll() is None, "unshare --net does not work here"
        assert time.monotonic() < give_up, "unshare --net does not come to an end"
        time.sleep(0.005)
    return process.pid


def _inside(holder: int, script: str) -> None:
    command = ["nsenter", "--target", str(holder), "--net", "sh", "-c", script]
    processes.run(command, check=True)
