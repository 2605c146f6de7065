"""Owns graphs of the device of pretence: what torch computes and what is launched while one captures is done at each
replay, and not before. The rules are CUDA's: no look at values, and lanes that were forked are joined in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.memory.thread_device import ThreadDevice

Step = Callable[[], None]


class ThreadGraph:
    """A graph of `device`, with the face of what tests use of CUDA's. One thread captures and replays."""

    def __init__(self, device: ThreadDevice) -> None:
        self._device = device
        self.steps: list[Step] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._device.capture_into(self.steps)
        try:
            with _Tape(self.steps):
                yield
        finally:
            is_joined = self._device.end_capture()
        assert is_joined, "a capture ended before work that it had forked"

    def replay(self) -> None:
        for step in self.steps:
            step()


class _Tape(TorchDispatchMode):
    """Writes down what torch is asked for. Values in memory of the device stay as they were."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self._steps = steps
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for torch's compiler, which would load all of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert threading.get_ident() == self._thread
        if func._schema.is_mutable:
            self._steps.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        made = func(*args, **kwargs)
        if isinstance(made, (bool, int, float)):
            raise AssertionError(f"the host looks at a value while a graph is captured: {func}")
        if any(one.alias_info is not None for one in func._schema.returns):
            return made

        def again() -> None:
            for old, new in zip(_tensors(made), _tensors(func(*args, **kwargs)), strict=True):
                old.copy_(new)

        self._steps.append(again)
        return made


def _tensors(made: Any) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else list(made)
