"""The demo with the link of each side in a sidecar: the same proofs as in process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlink.errors import InvalidInput
from pdlink_engines.reference.demo.spec import Damage, DemoSpec, check_spec
from tests.backends.needs import needs_mooncake, nixl_missing
from tests.demo.command import run_command

GLM, SMOLLM = "glm-dsa-tiny", "smollm2"
SPLIT = ("--pp", "2", "--cp", "2", "--decode-tp", "2")
SMALL = ("--cp", "2")
NEEDS_NIXL = pytest.mark.skipif(bool(nixl_missing()), reason=nixl_missing())
BACKENDS = {"ipc": (), "nixl": (NEEDS_NIXL,), "mooncake": (needs_mooncake,)}
# Each model and each transport; the others are thorough.
IN_CI = {(GLM, "nixl"), (SMOLLM, "ipc"), (SMOLLM, "mooncake")}
RUNS = [
    pytest.param(model, sizes, one, marks=[*needs, *([] if (model, one) in IN_CI else [pytest.mark.thorough])])
    for model, sizes in ((GLM, SPLIT), (SMOLLM, SMALL))
    for one, needs in BACKENDS.items()
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize(("model", "sizes", "backend"), RUNS)
def test_bytes_and_tokens_are_equal_when_the_link_is_in_sidecars(
    model: str, sizes: tuple[str, ...], backend: str
) -> None:
    options = ("--model", model, "--backend", backend, "--new-tokens", "8", "--json")
    ended = run_command("demo", "--sidecar", *sizes, *options)
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["bytes_equal"] is True
    assert found["tokens_equal"] is True
    assert found["backend"] == backend


@pytest.mark.parametrize("damage", [Damage.SKIP_OWNER, Damage.SWAP_LAYERS])
def test_damage_to_a_transport_that_is_in_another_process_is_refused(damage: Damage, tmp_path: Path) -> None:
    sizes = {"cp": 2, "new_tokens": 1, "page_size": 16, "chunk_tokens": 32, "pool_pages": 8}
    rest = {"prompts": ("a",), "backend": "ipc", "run_dir": tmp_path}
    spec = DemoSpec(model=GLM, inject=damage, sidecar=True, **sizes, **rest)
    with pytest.raises(InvalidInput, match=f"--inject {damage} .* without --sidecar"):
        check_spec(spec)
    check_spec(spec.model_copy(update={"sidecar": False}))
