"""Owns `pdlink plan`: the layer plan and KV memory per rank of a named or described layout, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdlink.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from pdlink.layout.components import CacheLayout
    from pdlink.layout.footprint import Footprint, RankFootprint
    from pdlink.layout.layer_plan import LayerPlan
    from pdlink.layout.parallel import ParallelSizes

DEFAULT_MODEL = "glm-5.2"
MAX_RANKS = 4096
MAX_LAYERS = 4096
MAX_TOKENS = 1 << 40


class Kind(StrEnum):
    """How layers are placed, as an option."""

    SPLIT = "split"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Subject:
    """What is planned: a layout, and where the model has one of its own, that too."""

    name: str
    title: str
    layout: CacheLayout
    own_layout: CacheLayout | None = None
    source: str = ""


def plan(
    model: Annotated[
        str | None, typer.Option(help=f"A named model (default {DEFAULT_MODEL}); an unknown name lists them.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=MAX_LAYERS, help="Describe a layout: its layers.")] = None,
    latent_bytes: Annotated[int, typer.Option(min=0, help="Described: MLA latent bytes a token and layer.")] = 0,
    index_bytes: Annotated[int, typer.Option(min=0, help="Described: indexer bytes a token and layer.")] = 0,
    kv_heads: Annotated[int, typer.Option(min=0, help="Described: KV heads of the model (GQA, MHA).")] = 0,
    head_dim: Annotated[int, typer.Option(min=0, help="Described: values of a head.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="KV dtype; the default is the model's.")] = None,
    page_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a page.")] = 64,
    cp: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Context-parallel ranks.")] = 4,
    pp: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Pipeline stages.")] = 1,
    tp: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Tensor-parallel ranks.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens that a pool holds.")] = 8192,
    reserved_pages: Annotated[int, typer.Option(min=0, help="Padding pages of a pool (sglang: page 0).")] = 1,
    scratch_slots: Annotated[int, typer.Option(min=2, max=64, help="Scratch buffers of a component.")] = 2,
    kind: Annotated[Kind, typer.Option("--plan", help="How layers are placed.")] = Kind.SPLIT,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show which rank owns which layers, and the KV memory per rank."""
    from pdlink.cli.output import console, print_json
    from pdlink.layout.footprint import measure
    from pdlink.layout.layer_plan import LayerPlan, PlanKind
    from pdlink.layout.parallel import ParallelSizes

    sizes = ParallelSizes(pp=pp, cp=cp, tp=tp)
    if sizes.num_ranks > MAX_RANKS:
        raise InvalidInput(f"pp {pp} x cp {cp} x tp {tp} is {sizes.num_ranks} ranks; plan at most {MAX_RANKS}")
    described = layers, latent_bytes, index_bytes, kv_heads, head_dim
    if any(described):
        if model:
            raise InvalidInput(f"--model {model} names a layout; leave out --layers and the other figures, or --model")
        subject = _describe(layers or 0, latent_bytes, index_bytes, kv_heads, head_dim, dtype, page_size, tp)
    else:
        subject = _named(model or DEFAULT_MODEL, dtype, page_size, tp)
    placed = PlanKind(kind.value)
    results = []
    for layout in filter(None, (subject.layout, subject.own_layout)):
        layer_plan = LayerPlan.balanced(layout, sizes, placed)
        layer_plan.check(layout)
        footprint = measure(layout, layer_plan, tokens, reserved_pages=reserved_pages, scratch_slots=scratch_slots)
        results.append((layout, layer_plan, footprint))
    if json:
        value = _as_json(subject, sizes, *results[0]) | {"plan": kind.value, "page_size": page_size}
        own = _as_json(subject, sizes, *results[1]) if len(results) > 1 else None
        print_json(value | {"own_layout": own})
        return
    out = console()
    _show_head(out, subject, sizes, kind, results[0][0], results[0][2])
    for (layout, layer_plan, footprint), lead in zip(results, ("", f"{subject.title}'s own layout: "), strict=False):
        _show(out, kind, layout, layer_plan, footprint, lead)
    if subject.own_layout:
        out.print(f"\nwhich layers run an indexer: {subject.source}")


def _named(name: str, dtype: str | None, page_size: int, tp: int) -> Subject:
    from pdlink.layout.models import MODELS, nearest
    from pdlink_engines.reference.models import MODEL_NAMES, model_shape

    if one := MODELS.get(name):
        kind = dtype or "bfloat16"
        own = one.own_layout(page_size, kind) if one.shares_indexers else None
        return Subject(name, one.title, one.layout(page_size, kind), own, one.source)
    if name not in MODEL_NAMES:
        raise InvalidInput(f"unknown model {name!r}{nearest(name, (*MODELS, *MODEL_NAMES))}")
    shape = model_shape(name)
    if dtype not in (None, shape.dtype):
        raise InvalidInput(f"--dtype {dtype} is not what {name} runs in here; it is {shape.dtype}")
    if tp > 1 and shape.kv_heads:
        raise InvalidInput(
            f"--tp {tp}: {name} runs at tp 1 only here; describe it with --layers, --kv-heads, --head-dim"
        )
    return Subject(name, name, shape.layout(page_size))


def _describe(
    layers: int,
    latent_bytes: int,
    index_bytes: int,
    kv_heads: int,
    head_dim: int,
    dtype: str | None,
    page_size: int,
    tp: int,
) -> Subject:
    from pdlink.layout.models import describe_layout

    if not layers:
        raise InvalidInput("a described layout needs --layers")
    if bool(latent_bytes) == bool(kv_heads):
        raise InvalidInput("a described layout needs either --latent-bytes, or --kv-heads and --head-dim")
    if bool(kv_heads) != bool(head_dim):
        raise InvalidInput(f"--kv-heads {kv_heads} and --head-dim {head_dim} go together")
    if kv_heads and index_bytes:
        raise InvalidInput("--index-bytes goes with --latent-bytes")
    if kv_heads and kv_heads % tp and tp % kv_heads:
        raise InvalidInput(f"--kv-heads {kv_heads} cannot be spread over --tp {tp}; one must divide the other")
    layout = describe_layout(
        layers,
        page_size,
        latent_bytes=latent_bytes,
        index_bytes=index_bytes,
        kv_heads=max(1, kv_heads // tp) if kv_heads else 0,
        head_dims=head_dim,
        dtype=dtype or "bfloat16",
    )
    return Subject("described", "described layout", layout)


def spans(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Increasing layer ids as (first, last) of each unbroken run."""
    runs: list[tuple[int, int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def _as_json(
    subject: Subject, sizes: ParallelSizes, layout: CacheLayout, layer_plan: LayerPlan, footprint: Footprint
) -> dict[str, Any]:
    from pdlink.cli.output import in_gib

    return {
        "model": subject.name,
        "source": subject.source,
        "sizes": {"dp": sizes.dp, "pp": sizes.pp, "cp": sizes.cp, "tp": sizes.tp},
        "num_layers": layout.num_layers,
        "components": [
            {
                "name": one.name,
                "dtype": one.dtype,
                "bytes_per_token": sum(field.token_bytes for field in one.fields),
                "layers": spans(one.layers),
            }
            for one in layout.components
        ],
        "tokens": footprint.num_tokens,
        "num_pages": footprint.num_pages,
        "reserved_pages": footprint.reserved_pages,
        "unsplit_gib": in_gib(footprint.unsplit_bytes),
        "owned_gib": in_gib(footprint.owned_bytes),
        "scratch_gib": in_gib(footprint.scratch_bytes),
        "unsplit_bytes": footprint.unsplit_bytes,
        "owned_bytes": footprint.owned_bytes,
        "scratch_bytes": footprint.scratch_bytes,
        "ranks": [
            {
                "rank": str(one.rank),
                "layers": {name: spans(ids) for name, ids in one.owned.items()},
                "owned_bytes": one.owned_bytes,
                "scratch_bytes": one.scratch_bytes,
                "unsplit_bytes": one.unsplit_bytes,
            }
            for one in footprint.ranks
        ],
    }


def _show_head(
    out: Console, subject: Subject, sizes: ParallelSizes, kind: Kind, layout: CacheLayout, footprint: Footprint
) -> None:
    group = layout.page_groups[0]
    pages = footprint.num_pages[group.name]
    out.print(
        f"{subject.title}, {layout.num_layers} layers, cp {sizes.cp}, pp {sizes.pp}, tp {sizes.tp}, {kind.value}\n"
        f"{footprint.num_tokens:,} tokens in {pages - footprint.reserved_pages:,} pages of {group.page_size}, "
        f"and {footprint.reserved_pages} reserved"
    )


def _show(
    out: Console, kind: Kind, layout: CacheLayout, layer_plan: LayerPlan, footprint: Footprint, lead: str
) -> None:
    from pdlink.cli.output import format_sizes, print_table
    from pdlink.layout.layer_plan import compact_ids

    def per_token(name: str) -> str:
        one = layout.component(name)
        return f"{name} {sum(field.token_bytes for field in one.fields):,} B a token ({one.dtype})"

    out.print()
    out.print(f"{lead}{', '.join(per_token(one.name) for one in layout.components)}")
    for one in layout.components:
        if one.name == "index_k":
            what = "every layer" if len(one.layers) == layout.num_layers else f"layers {compact_ids(one.layers)}"
            out.print(f"indexer keys on {what} ({len(one.layers)} of {layout.num_layers})")
    shown = [one for one in footprint.ranks if one.rank.tp == 0]
    names = [one.name for one in layout.components]
    same = all(len({rank.owned.get(name, ()) for name in names}) == 1 for rank in shown)
    columns = ["layers"] if same else [f"{name} layers" for name in names]
    sizes = format_sizes(
        [size for rank in shown for size in (rank.owned_bytes, rank.unsplit_bytes, rank.scratch_bytes)]
    )
    rows = []
    for number, rank in enumerate(shown):
        held = [rank.owned.get(name, ()) for name in (names[:1] if same else names)]
        cells = [compact_ids(ids) for ids in held]
        rows.append([_name(rank, layer_plan), *cells, *sizes[3 * number : 3 * number + 3]])
    print_table(out, ["rank", *columns, "KV", "unsplit", "scratch"], rows, left=1 + len(columns))
    if layer_plan.sizes.tp > 1:
        out.print(f"each row stands for {layer_plan.sizes.tp} tp ranks, which own the same layers")
    idle = sum(not any(rank.owned.values()) for rank in shown)
    if idle:
        out.print(f"note: {idle} of {len(shown)} ranks own nothing, because there are more ranks than layers to split")
    unsplit, owned, scratch = format_sizes([footprint.unsplit_bytes, footprint.owned_bytes, footprint.scratch_bytes])
    out.print(
        f"{lead}KV memory of the largest rank {unsplit.partition(' ')[0]} -> {owned} (unsplit -> {kind.value}), "
        f"scratch {scratch} apart"
    )


def _name(one: RankFootprint, layer_plan: LayerPlan) -> str:
    return f"cp {one.rank.cp}" if layer_plan.sizes.pp == 1 else f"pp {one.rank.pp} cp {one.rank.cp}"
