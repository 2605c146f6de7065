"""Owns what a demo run is asked to do, checked, and how it travels to the processes of the run. It starts nothing."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes
from pdlink_engines.reference.models import model_shape

PREFILL_INSTANCE = "demo-prefill"
DECODE_INSTANCE = "demo-decode"
MAX_PROMPT_BYTES = 1 << 20


class Damage(StrEnum):
    """What `--inject` breaks on purpose."""

    NONE = "none"
    FLIP = "flip"
    SKIP_OWNER = "skip-owner"
    STALE_SCRATCH = "stale-scratch"
    SWAP_LAYERS = "swap-layers"


class DemoSpec(BaseModel):
    """One run; `check_spec` says whether it can be.

    `run_dir` is where its processes leave arrays for each other. `bootstrap` is the address of the bootstrap service:
    to bind, for the demo and that service; where it is, for everyone else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    cp: int
    prompts: tuple[str, ...]
    new_tokens: int
    page_size: int
    chunk_tokens: int
    pool_pages: int
    backend: str
    inject: Damage = Damage.NONE
    run_dir: Path
    bootstrap: str = "127.0.0.1:0"

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(cp=self.cp)

    def layout(self) -> CacheLayout:
        return model_shape(self.model).layout(self.page_size)

    def plan(self) -> LayerPlan:
        return LayerPlan.balanced(self.layout(), self.sizes)

    def request_ids(self) -> tuple[str, ...]:
        return tuple(f"request-{number}" for number in range(len(self.prompts)))


def check_spec(spec: DemoSpec) -> DemoSpec:
    """Return `spec`, or raise `InvalidInput` naming the option, its value and what is possible."""
    for option, value in (
        ("--new-tokens", spec.new_tokens),
        ("--page-size", spec.page_size),
        ("--chunk", spec.chunk_tokens),
        ("--pool-pages", spec.pool_pages),
        ("--cp", spec.cp),
    ):
        if value < 1:
            raise InvalidInput(f"{option} {value} must be at least 1")
    layout = spec.layout()
    if spec.cp > layout.num_layers:
        raise InvalidInput(
            f"--cp {spec.cp} is more than the {layout.num_layers} layers of {spec.model!r}; every rank owns "
            f"at least one, so give at most {layout.num_layers}"
        )
    if spec.inject is Damage.SWAP_LAYERS and not _some_rank_has_two_layers(spec):
        raise InvalidInput(f"--inject {spec.inject} needs a rank with two layers, so give --cp below {spec.cp}")
    if not spec.prompts or not all(spec.prompts):
        raise InvalidInput("a prompt is empty; give some text")
    if spec.inject in (Damage.SKIP_OWNER, Damage.STALE_SCRATCH) and spec.cp < 2:
        raise InvalidInput(f"--inject {spec.inject} needs layers of another rank, so give --cp 2 or more")
    return spec


def _some_rank_has_two_layers(spec: DemoSpec) -> bool:
    return any(len(layers) > 1 for owned in spec.plan().owned.values() for layers in owned.values())


def read_prompts(prompts: list[str], path: Path | None) -> tuple[str, ...]:
    """Prompts of the command line, then that of the file. Raises `InvalidInput` for a file that cannot be read."""
    found = list(prompts)
    if path is not None:
        try:
            if path.stat().st_size > MAX_PROMPT_BYTES:
                raise InvalidInput(f"prompt file {path} has over {MAX_PROMPT_BYTES} bytes")
            found.append(path.read_text(encoding="utf-8").strip())
        except OSError as error:
            raise InvalidInput(f"prompt file {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"prompt file {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    return tuple(found)
