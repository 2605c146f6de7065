"""Owns the rig that all tests of this folder share: started once, ready before each test, removed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest

from tests import processes
from tests.rig.rig import ADDRESSES, CALL_TIMEOUT_S, Rig

PROMPTS = {
    "What is the capital of France?": 5,
    "Name three colours of the rainbow, and say for each of them what in nature has that colour.": 4,
    "Write one sentence about the sea.": 5,
    "Count from one to ten in words.": 4,
}
"""Each with how many tokens are asked for."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A rig takes minutes and a Docker engine: it runs where it was asked for by its mark."""
    if "rig" in (config.getoption("-m") or ""):
        return
    for item in items:
        if item.get_closest_marker("rig"):
            item.add_marker(pytest.mark.skip(reason="containers: run by `make test-rig`"))


@pytest.fixture(scope="session")
def started_rig() -> Iterator[Rig]:
    rig = Rig(RIG_WEIGHTS=_weights())
    rig.script("down")
    try:
        rig.script("start")
        yield rig
    finally:
        rig.script("down")


def _weights() -> str:
    """Where the converted weights lie that this process compares with: the rig's containers map the same files.

    "" where its image has another version of transformers, and so converts for itself.
    """
    from pdlink_engines.reference.models import prepare_model
    from pdlink_engines.reference.smollm2 import cache_folder, find_weights

    asked = "from importlib.metadata import version; print(version('transformers'), end='')"
    command = ["docker", "run", "--rm", "--network=none", "pdlink:rig", "python", "-c", asked]
    if processes.run(command, timeout_s=CALL_TIMEOUT_S, check=True).stdout != metadata.version("transformers"):
        return ""
    prepare_model("smollm2")
    folder = cache_folder(find_weights())
    # safetensors writes for its own user alone; the containers have another.
    (folder / "model.safetensors").chmod(0o644)
    return str(folder.parent)


@pytest.fixture
def rig(started_rig: Rig, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The rig, ready. After a test that failed, the end of every container's log is printed."""
    started_rig.wait_ready()
    failed_before = request.session.testsfailed
    yield started_rig
    if request.session.testsfailed > failed_before:
        for service in ADDRESSES:
            print(f"--- {service}\n{started_rig.logs(service)}")


@pytest.fixture(scope="session")
def expected() -> dict[str, list[int]]:
    """The tokens that one process with plain transformers answers to each prompt: nothing of pdlink takes part."""
    from pdlink_engines.reference.models import fix_threads, load_model, prepare_model
    from pdlink_engines.reference.plain import generate_plain

    fix_threads()
    prepare_model("smollm2")
    model = load_model("smollm2")
    return {
        prompt: list(generate_plain(model, model.tokenizer.encode(prompt), max_new_tokens=count).tokens)
        for prompt, count in PROMPTS.items()
    }
