"""Owns the marker `gpu`: which tests need CUDA devices, and why they are skipped where there are too few.

A skip that this plugin decides is the one kind that CI allows; the summary counts them in one line.
"""

from __future__ import annotations

import pytest

SKIPPED = "skipped_for_gpus"


def missing(num_gpus: int) -> str:
    """What this machine lacks for a test on `num_gpus` devices; empty if nothing. Loads torch."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if (found := torch.cuda.device_count()) < num_gpus:
        return f"torch {torch.__version__} finds {found} CUDA devices"
    return ""


def num_gpus(item: pytest.Item) -> int:
    """How many devices a test asks for: `gpu` is one, `gpu(2)` two; the most where several marks apply. 0: no mark."""
    return max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips before any fixture is set up. Last, so that nothing is looked for when no such test is left to run."""
    for item in items:
        wanted = num_gpus(item)
        if wanted and (lack := missing(wanted)):
            reason = f"needs {wanted} GPU{'s' if wanted > 1 else ''}, and {lack}"
            item.add_marker(pytest.mark.skip(reason=reason))
            item.user_properties.append((SKIPPED, reason))


def is_allowed(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Whether a skipped report is one of ours. Properties travel with reports of other workers."""
    return any(name == SKIPPED for name, _ in getattr(report, "user_properties", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    num_skipped = sum(map(is_allowed, terminalreporter.stats.get("skipped", ())))
    if num_skipped:
        terminalreporter.line(f"{num_skipped} tests that need a GPU were skipped", yellow=True)
