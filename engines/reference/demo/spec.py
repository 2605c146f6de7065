"""Owns what a demo run is asked to do, checked, and how it travels to the processes of the run. It starts nothing."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import LayerPlan, balanced_ranges
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink_engines.reference.models import model_heads, model_shape
from pdlink_engines.reference.shapes import head_range

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
    pp: int = 1
    cp: int
    decode_tp: int = 1
    prompts: tuple[str, ...]
    new_tokens: int
    page_size: int
    chunk_tokens: int
    pool_pages: int
    backend: str
    inject: Damage = Damage.NONE
    run_dir: Path
    bootstrap: str = "127.0.0.1:0"
    sidecar: bool = False

    def socket(self, side: str) -> Path:
        """Where the sidecar of "prefill" or "decode" listens, with `sidecar`."""
        return self.run_dir / f"{side}.sock"

    @property
    def sizes(self) -> ParallelSizes:
        """Of prefill."""
        return ParallelSizes(pp=self.pp, cp=self.cp)

    def prefill_ranks(self) -> tuple[RankCoordinates, ...]:
        """Stage by stage, the order of all lists of prefill ranks."""
        return tuple(self.sizes.ranks())

    def stage(self, pp: int) -> range:
        """The layers of one pipeline stage."""
        return balanced_ranges(self.layout().num_layers, self.pp)[pp]

    def layout(self) -> CacheLayout:
        """Of prefill, with all heads."""
        return model_shape(self.model).layout(self.page_size)

    def kept_heads(self, tp: int) -> range | None:
        """The KV heads of one decode rank, None where the cache has none."""
        shape = model_shape(self.model)
        return head_range(shape.kv_heads, self.decode_tp, tp) if shape.kv_heads else None

    def decode_layout(self, tp: int) -> CacheLayout:
        """Of one decode rank."""
        return model_shape(self.model).layout(self.page_size, self.kept_heads(tp))

    def plan(self) -> LayerPlan:
        return LayerPlan.balanced(self.layout(), self.sizes)

    def received_dir(self, tp: int) -> Path:
        """Where a decode rank leaves its pages: in a folder of its own where there are several."""
        return self.run_dir / "received" / (f"tp{tp}" if self.decode_tp > 1 else "")

    def request_ids(self) -> tuple[str, ...]:
        return tuple(f"request-{number}" for number in range(len(self.prompts)))


def check_spec(spec: DemoSpec) -> DemoSpec:
    """Return `spec`, or raise `InvalidInput` naming the option, its value and what is possible."""
    for option, value in (
        ("--new-tokens", spec.new_tokens),
        ("--page-size", spec.page_size),
        ("--chunk", spec.chunk_tokens),
        ("--pool-pages", spec.pool_pages),
        ("--pp", spec.pp),
        ("--cp", spec.cp),
        ("--decode-tp", spec.decode_tp),
    ):
        if value < 1:
            raise InvalidInput(f"{option} {value} must be at least 1")
    num_layers = spec.layout().num_layers
    if spec.pp > num_layers:
        raise InvalidInput(f"--pp {spec.pp} is more than the {num_layers} layers of {spec.model!r}; give fewer stages")
    most = len(spec.stage(0))
    if spec.cp > most:
        stage = f"{most} layers of a stage" if spec.pp > 1 else f"{most} layers"
        raise InvalidInput(f"--cp {spec.cp} is more than the {stage} of {spec.model!r}; give at most {most}")
    num_heads = model_heads(spec.model)
    if spec.decode_tp > num_heads:
        raise InvalidInput(
            f"--decode-tp {spec.decode_tp} is more than the {num_heads} heads of {spec.model!r} that can be split; "
            f"give at most {num_heads}"
        )
    if spec.inject is Damage.SWAP_LAYERS and not _some_rank_has_two_layers(spec):
        raise InvalidInput(f"--inject {spec.inject} needs a rank with two layers, so give --cp below {spec.cp}")
    if spec.sidecar and spec.inject in (Damage.SKIP_OWNER, Damage.SWAP_LAYERS):
        raise InvalidInput(
            f"--inject {spec.inject} damages the transport inside of decode, so run it without --sidecar"
        )
    if not spec.prompts or not all(spec.prompts):
        raise InvalidInput("a prompt is empty; give some text")
    needed = spec.sizes.num_ranks if spec.inject is Damage.SKIP_OWNER else spec.cp
    if spec.inject in (Damage.SKIP_OWNER, Damage.STALE_SCRATCH) and needed < 2:
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
