"""Owns what `pdlink plan` plans: a named model or described figures, as the cache layout of a rank. It prints none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdlink.errors import InvalidInput

if TYPE_CHECKING:
    from pdlink.cli.faults import Fault
    from pdlink.layout.components import CacheLayout

DEFAULT_MODEL = "glm-5.2"
DESCRIBED = ("layers", "latent_bytes", "index_bytes", "kv_heads", "head_dim")
"""Options of a layout without a name."""


@dataclass(frozen=True)
class Subject:
    """The layout that is counted, and where the model has another one of its own, that too.

    `shares_indexers`: only some layers of the model run an indexer, so that there are two ways to count its keys.
    """

    name: str
    title: str
    layout: CacheLayout
    own_layout: CacheLayout | None = None
    source: str = ""
    shares_indexers: bool = False

    @property
    def counted(self) -> str:
        """Which layers' indexer keys are counted, where there is a choice, and how to get the other count."""
        count = self.layout.num_layers
        if self.own_layout:
            num_own = len(self.own_layout.component("index_k").layers)
            return (
                f"counted here: indexer keys on all {count} layers, as an engine keeps them that allocates each layer "
                f"alike; --indexers own counts those of the {num_own} layers alone that run an indexer"
            )
        num_own = len(self.layout.component("index_k").layers)
        return (
            f"counted here: indexer keys on the {num_own} of {count} layers alone that run an indexer ({self.title}'s "
            "own layout); --indexers every counts them on all layers"
        )


@dataclass(frozen=True)
class Figures:
    """The options that describe a cache: a model's name, or `layers` and what a token takes in each. `own_indexers`:
    keys are counted on those layers only that run an indexer."""

    model: str | None
    layers: int
    latent_bytes: int
    index_bytes: int
    kv_heads: int
    head_dim: int
    dtype: str | None
    page_size: int
    own_indexers: bool = False

    @property
    def _is_described(self) -> bool:
        return any((self.layers, self.latent_bytes, self.index_bytes, self.kv_heads, self.head_dim))

    def faults(self, tp: int, dtype_option: str = "--dtype") -> list[Fault]:
        """What is wrong with them for `tp` tensor-parallel ranks; figures without a fault make a subject."""
        if not self._is_described:
            return self._faults_of_name(self.model or DEFAULT_MODEL, tp, dtype_option)
        if self.model:
            text = f"--model {self.model} names a layout; leave out --layers and the other figures, or --model"
            return [(text, ("model", *DESCRIBED)), *self._faults_of_name(self.model, 1, dtype_option)]
        return self._faults_of_description(tp, dtype_option)

    def _faults_of_name(self, name: str, tp: int, dtype_option: str) -> list[Fault]:
        from pdlink.layout.models import DTYPE_BYTES, LATENT_BYTES, MODELS, nearest
        from pdlink_engines.reference.models import MODEL_NAMES, model_shape

        dtypes, fix = list(DTYPE_BYTES), ""
        found: list[Fault] = []
        if name in MODELS:
            dtypes = list(LATENT_BYTES)
            fix = f"is not one that {name} caches; give {', '.join(dtypes)}"
        elif name in MODEL_NAMES:
            shape = model_shape(name)
            dtypes = [shape.dtype]
            fix = f"is not what {name} runs in here; it is {shape.dtype}"
            found += _spread(shape.kv_heads, tp, f"{name}: KV heads")
        else:
            found.append((f"unknown model {name!r}{nearest(name, (*MODELS, *MODEL_NAMES))}", ("model",)))
        if self.dtype and self.dtype not in dtypes:
            fix = fix or f"is unknown{nearest(self.dtype, dtypes)}"
            found.append((f"{dtype_option} {self.dtype!r} {fix}", ("model", "dtype", "decode_dtype", *DESCRIBED)))
        return found

    def _faults_of_description(self, tp: int, dtype_option: str) -> list[Fault]:
        from pdlink.layout.models import DTYPE_BYTES, nearest

        found: list[Fault] = []
        if not self.layers:
            found.append(("a described layout needs --layers", ("layers",)))
        if bool(self.latent_bytes) == bool(self.kv_heads):
            text = "a described layout needs either --latent-bytes, or --kv-heads and --head-dim"
            found.append((text, ("latent_bytes", "kv_heads")))
        if bool(self.kv_heads) != bool(self.head_dim):
            text = f"--kv-heads {self.kv_heads} and --head-dim {self.head_dim} go together"
            found.append((text, ("kv_heads", "head_dim")))
        if self.kv_heads and self.index_bytes:
            found.append(("--index-bytes goes with --latent-bytes", ("kv_heads", "index_bytes")))
        elif 0 < self.index_bytes < 5:
            text = f"--index-bytes {self.index_bytes} must hold a key and its scale of 4 bytes; give 5 or more"
            found.append((text, ("index_bytes",)))
        if self.dtype and self.dtype not in DTYPE_BYTES:
            text = f"{dtype_option} {self.dtype!r} is unknown{nearest(self.dtype, DTYPE_BYTES)}"
            found.append((text, ("dtype", "decode_dtype")))
        return found + _spread(self.kv_heads, tp, "--kv-heads")

    def layouts(self, tp: int) -> list[CacheLayout]:
        """Of each of `tp` ranks. Raises `InvalidInput`."""
        first = self.subject(tp).layout
        total = max((one.total_heads for one in first.components), default=0)
        counts = [len(heads_of(total, tp, rank, "the model has")) for rank in range(tp)] if total else [0] * tp
        made = {count: self.subject(tp, counts.index(count)).layout for count in set(counts)}
        return [made[count] for count in counts]

    def subject(self, tp: int, rank: int = 0) -> Subject:
        """What rank `rank` of `tp` caches. Where tp does not divide the heads, the first ranks have one more. The
        figures have no `faults`. Raises `InvalidInput`."""
        if self._is_described:
            return self._described(tp, rank)
        return self._named(self.model or DEFAULT_MODEL, tp, rank)

    def _named(self, name: str, tp: int, rank: int) -> Subject:
        from pdlink.layout.models import MODELS
        from pdlink_engines.reference.models import model_shape

        if one := MODELS.get(name):
            kind = self.dtype or "bfloat16"
            every, own = one.layout(self.page_size, kind), one.own_layout(self.page_size, kind)
            if self.own_indexers or not one.shares_indexers:
                return Subject(name, one.title, own, None, one.source, one.shares_indexers)
            return Subject(name, one.title, every, own, one.source, one.shares_indexers)
        shape = model_shape(name)
        kept = heads_of(shape.kv_heads, tp, rank, f"{name}: KV heads") if shape.kv_heads else None
        return Subject(name, name, shape.layout(self.page_size, kept))

    def _described(self, tp: int, rank: int) -> Subject:
        from pdlink.layout.models import describe_layout

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


def _spread(num_heads: int, tp: int, what: str) -> list[Fault]:
    """Why the heads cannot be spread over `tp` ranks, if that is so."""
    try:
        if num_heads:
            heads_of(num_heads, tp, 0, what)
    except InvalidInput as error:
        return [(str(error), ("kv_heads", *DESCRIBED))]
    return []


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
