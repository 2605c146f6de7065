"""Owns the fixtures of the reference engine's tests: rank processes and models, each made once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdlink_engines.reference.models import ReferenceModel, fix_threads, load_model
from tests.engines.reference.ranks import Ranks

WORLD_SIZE = 4


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(WORLD_SIZE, tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def tiny() -> ReferenceModel:
    fix_threads(1)
    return load_model("glm-dsa-tiny")


@pytest.fixture(scope="session")
def smollm2() -> ReferenceModel:
    fix_threads(1)
    return load_model("smollm2")
