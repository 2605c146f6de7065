"""Owns the requests of `pdlink bench digest`: two processes for each setting of digests, and the order in which these
take turns. It sums nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from pdlink.cli.exits import WrongRun
from pdlink.cli.transfer_bytes import Shape
from pdlink.cli.transfer_talk import ask
from pdlink.testing.child import Child

ASK_TIMEOUT_S = 180.0
WARM_UP = 1
OFF = "off"
"""The setting without digests; the others are names of kinds."""


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one request: until its owner has told of its pages, digests included, and from there until decode has
    them, compared."""

    publish_s: float
    request_s: float


class Pair:
    """A prefill rank and a decode rank, over ipc and without staging."""

    def __init__(self, setting: str, shape: Shape, devices: tuple[int, int]) -> None:
        """`devices` of both, -1 for host memory. Raises `Unavailable` where that is not to be had."""
        self.setting = setting
        kind = {} if setting == OFF else {"verify_digests": True, "digest_kind": setting}
        settings: dict[str, object] = {"backends": "ipc", "way": "direct", **kind}
        size = [shape.page_bytes, shape.num_pages, shape.num_layers, shape.scattered]
        with ExitStack() as starting:
            self._owner = starting.enter_context(Child("the owner", "pdlink.cli.transfer_owner", []))
            self._reader = starting.enter_context(Child("the reader", "pdlink.cli.transfer_reader", []))
            rest = {"shape": size, "settings": settings}
            told = ask(self._owner, ASK_TIMEOUT_S, "open", **rest, device=devices[0])
            ask(self._reader, ASK_TIMEOUT_S, "open", **rest, device=devices[1], bootstrap=told["bootstrap"])
            self._stack = starting.pop_all()

    def request(self, number: int) -> Took:
        """One request, right after one like it that is not measured. Raises `WrongRun` when other bytes came."""
        ask(self._reader, ASK_TIMEOUT_S, "wipe")
        published = ask(self._owner, ASK_TIMEOUT_S, "publish", number=number, damage=False)
        told = ask(self._reader, ASK_TIMEOUT_S, "pull", number=number)
        if told["wrong"]:
            raise WrongRun(f"pdlink said success, and brought other bytes than its owner holds: {told['wrong']}")
        return Took(published["publish_s"], told["request_s"])

    def close(self) -> None:
        self._stack.close()


class DigestRig:
    """A pair for each setting. Use it with `with`; everything ends with it."""

    def __init__(self, settings: Sequence[str], shape: Shape, devices: tuple[int, int]) -> None:
        with ExitStack() as starting:
            self._pairs = []
            for setting in settings:
                self._pairs.append(Pair(setting, shape, devices))
                starting.callback(self._pairs[-1].close)
            self._stack = starting.pop_all()

    def measure(self, rounds: int, step: Callable[[], None] = lambda: None) -> Mapping[str, Sequence[Took]]:
        """So many requests of each setting, all of them once a round, another one first each time; `step` is called
        after each, those of the round that warms up as well."""
        taken: dict[str, list[Took]] = {one.setting: [] for one in self._pairs}
        for number in range(-WARM_UP, rounds):
            first = number % len(self._pairs)
            for pair in self._pairs[first:] + self._pairs[:first]:
                took = pair.request(number + WARM_UP + 1)
                if number >= 0:
                    taken[pair.setting].append(took)
                step()
        return taken

    def __enter__(self) -> DigestRig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
