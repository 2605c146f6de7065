"""Owns what `pdlink plan` plans: a named model or described figures, as the cache layout of a rank. It prints none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.errors import InvalidInput

if TYPE_CHECKING:
    from pdlink.layout.components import CacheLayout

DEFAULT_MODEL = "glm-5.2"


@dataclass(frozen=True)
class Subject:
    """A layout, and where the model has one of its own, that too."""

    name: str
    title: str
    layout: CacheLayout
    own_layout: CacheLayout | None = None
    source: str = ""


@dataclass(frozen=True)
class Figures:
    """The options that describe a cache: a model's name, or `layers` and what a token takes in each."""

    model: str | None
    layers: int
    latent_bytes: int
    index_bytes: int
    kv_heads: int
    head_dim: int
    dtype: str | None
    page_size: int

    def layouts(self, tp: int) -> list[CacheLayout]:
        """Of each of `tp` ranks. Raises `InvalidInput`."""
        first = self.subject(tp).layout
        total = max((one.total_heads for one in first.components), default=0)
        counts = [len(heads_of(total, tp, rank, "the model has")) for rank in range(tp)] if total else [0] * tp
        made = {count: self.subject(tp, counts.index(count)).layout for count in set(counts)}
        return [made[count] for count in counts]

    def subject(self, tp: int, rank: int = 0) -> Subject:
        """What rank `rank` of `tp` caches. Where tp does not divide the heads, the first ranks have one more. Raises
        `InvalidInput`."""
        if any((self.layers, self.latent_bytes, self.index_bytes, self.kv_heads, self.head_dim)):
            if self.model:
                text = "names a layout; leave out --layers and the other figures, or --model"
                raise InvalidInput(f"--model {self.model} {text}")
            return self._described(tp, rank)
        return self._named(self.model or DEFAULT_MODEL, tp, rank)

    def _named(self, name: str, tp: int, rank: int) -> Subject:
        from pdlink.layout.models import MODELS, nearest
        from pdlink_engines.reference.models import MODEL_NAMES, model_shape

        if one := MODELS.get(name):
            kind = self.dtype or "bfloat16"
            own = one.own_layout(self.page_size, kind) if one.shares_indexers else None
            return Subject(name, one.title, one.layout(self.page_size, kind), own, one.source)
        if name not in MODEL_NAMES:
            raise InvalidInput(f"unknown model {name!r}{nearest(name, (*MODELS, *MODEL_NAMES))}")
        shape = model_shape(name)
        if self.dtype not in (None, shape.dtype):
            raise InvalidInput(f"--dtype {self.dtype} is not what {name} runs in here; it is {shape.dtype}")
        kept = heads_of(shape.kv_heads, tp, rank, f"{name}: KV heads") if shape.kv_heads else None
        return Subject(name, name, shape.layout(self.page_size, kept))

    def _described(self, tp: int, rank: int) -> Subject:
        from pdlink.layout.models import describe_layout

        if not self.layers:
            raise InvalidInput("a described layout needs --layers")
        if bool(self.latent_bytes) == bool(self.kv_heads):
            raise InvalidInput("a described layout needs either --latent-bytes, or --kv-heads and --head-dim")
        if bool(self.kv_heads) != bool(self.head_dim):
            raise InvalidInput(f"--kv-heads {self.kv_heads} and --head-dim {self.head_dim} go together")
        if self.kv_heads and self.index_bytes:
            raise InvalidInput("--index-bytes goes with --latent-bytes")
        kept = heads_of(self.kv_heads, tp, rank, "--kv-heads") if self.kv_heads else range(0)
        layout = describe_layout(
            self.layers,
            self.page_size,
            latent_bytes=self.latent_bytes,
            index_bytes=self.index_bytes,
            kv_heads=len(kept),
            head_dims=self.head_dim,
            total_heads=self.kv_heads,
            dtype=self.dtype or "bfloat16",
        )
        return Subject("described", "described layout", layout)


def heads_of(num_heads: int, tp: int, rank: int, what: str) -> range:
    """The heads of one rank: a range of its own, or with more ranks than heads one head that neighbours have too.
    Raises `InvalidInput` that begins with `what`."""
    from pdlink.layout.layer_plan import balanced_ranges

    if tp > num_heads and tp % num_heads == 0:
        return range(rank * num_heads // tp, rank * num_heads // tp + 1)
    if tp > num_heads:
        raise InvalidInput(
            f"{what} {num_heads} cannot be spread over tp {tp}; give a tp of at most {num_heads}, or a multiple of "
            f"{num_heads}, where several ranks have the same head"
        )
    return balanced_ranges(num_heads, tp)[rank]
