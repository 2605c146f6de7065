"""Owns `pdlink plan`: its options, and the layer plan and KV memory per rank of a layout, as a table or as JSON.

What is planned is in `plan_subject`; the pairing with a decode instance is shown by `plan_pair`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdlink.cli.faults import Fault, Faults
from pdlink.cli.plan_subject import DEFAULT_MODEL, Figures, Subject
from pdlink.errors import InvalidInput, LayoutError

if TYPE_CHECKING:
    from rich.console import Console

    from pdlink.layout.components import CacheLayout
    from pdlink.layout.decode_plan import DecodeSizes
    from pdlink.layout.footprint import Footprint, RankFootprint
    from pdlink.layout.layer_plan import LayerPlan
    from pdlink.layout.parallel import ParallelSizes

DEFAULT_CP = 4
MAX_RANKS = 4096
MAX_LAYERS = 4096
MAX_TOKENS = 1 << 40


class Indexers(StrEnum):
    """On which layers indexer keys are counted, as an option."""

    EVERY = "every"
    OWN = "own"


class Kind(StrEnum):
    """How layers are placed, as an option."""

    SPLIT = "split"
    REPLICATED = "replicated"


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help=f"A named model (default {DEFAULT_MODEL}); an unknown name lists them.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, max=MAX_LAYERS, help="Describe a layout: its layers.")] = None,
    latent_bytes: Annotated[int, typer.Option(min=0, help="Described: MLA latent bytes a token and layer.")] = 0,
    index_bytes: Annotated[int, typer.Option(min=0, help="Described: indexer bytes a token and layer.")] = 0,
    kv_heads: Annotated[int, typer.Option(min=0, help="Described: KV heads of the model (GQA, MHA).")] = 0,
    head_dim: Annotated[int, typer.Option(min=0, help="Described: values of a head.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="KV dtype; the default is the model's.")] = None,
    indexers: Annotated[
        Indexers, typer.Option(help="Indexer keys: on every layer, or on the model's own alone.")
    ] = Indexers.EVERY,
    page_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a page.")] = 64,
    prefill: Annotated[
        str | None, typer.Option(help="Prefill's sizes in one word, like pp2cp4tp1 (dp, pp, cp, tp); or these:")
    ] = None,
    cp: Annotated[
        int | None, typer.Option(min=1, max=MAX_RANKS, help=f"Context-parallel ranks (default {DEFAULT_CP}).")
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, max=MAX_RANKS, help="Pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, max=MAX_RANKS, help="Tensor-parallel ranks.")] = None,
    decode: Annotated[
        str | None, typer.Option(help="Show who pulls what: decode's sizes, like tp8 (dp, pp, tp, dcp).")
    ] = None,
    decode_page_size: Annotated[
        int | None, typer.Option(min=1, max=1 << 16, help="Tokens of a page on decode (default: as on prefill).")
    ] = None,
    decode_dtype: Annotated[str | None, typer.Option(help="KV dtype on decode (default: as on prefill).")] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens that a pool holds, or of the request that decode pulls.")
    ] = 8192,
    reserved_pages: Annotated[int, typer.Option(min=0, help="Padding pages of a pool (sglang: page 0).")] = 1,
    scratch_slots: Annotated[int, typer.Option(min=2, max=64, help="Scratch buffers of a component.")] = 2,
    kind: Annotated[Kind, typer.Option("--plan", help="How layers are placed.")] = Kind.SPLIT,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show which rank owns which layers and the KV memory per rank; with --decode, who pulls what from whom."""
    from pdlink.cli.output import console, print_json
    from pdlink.layout.footprint import measure
    from pdlink.layout.layer_plan import LayerPlan, PlanKind

    faults = Faults(context)
    sizes = faults.attempt(lambda: _prefill_sizes(prefill, pp, cp, tp), "prefill", "pp", "cp", "tp")
    wanted = (model, layers or 0, latent_bytes, index_bytes, kv_heads, head_dim, dtype, page_size)
    figures = Figures(*wanted, own_indexers=indexers is Indexers.OWN)
    found = figures.faults(sizes.tp if sizes else 1)
    faults.add(found)
    if decode is not None:
        from pdlink.cli.plan_pair import decode_sizes, show_pair

        taken = faults.attempt(lambda: decode_sizes(decode))
        theirs = replace(figures, page_size=decode_page_size or page_size, dtype=decode_dtype or dtype)
        faults.add(_only_of_decode(theirs, taken, found, "--decode-dtype" if decode_dtype else "--dtype"))
        faults.end()
        assert sizes is not None, "what cannot be read was raised"
        assert taken is not None, "what cannot be read was raised"
        subject, prefills = figures.subject(sizes.tp), figures.layouts(sizes.tp)
        show_pair(subject, prefills, sizes, PlanKind(kind.value), taken, theirs, tokens, as_json=json)
        return
    if decode_page_size or decode_dtype:
        faults.add([("--decode-page-size and --decode-dtype go with --decode", ())])
    faults.end()
    assert sizes is not None, "what cannot be read was raised"
    subject = figures.subject(sizes.tp)
    placed = PlanKind(kind.value)
    results = []
    for layout in filter(None, (subject.layout, subject.own_layout)):
        layer_plan = LayerPlan.balanced(layout, sizes, placed)
        layer_plan.check(layout)
        layouts = figures.layouts(sizes.tp) if layout is subject.layout else [layout]
        footprint = measure(layouts, layer_plan, tokens, reserved_pages=reserved_pages, scratch_slots=scratch_slots)
        results.append((layout, layer_plan, footprint))
    if json:
        value = _as_json(subject, sizes, *results[0]) | {"plan": kind.value, "page_size": page_size}
        value |= {"indexers": indexers.value if subject.shares_indexers else None}
        own = _as_json(subject, sizes, *results[1]) if len(results) > 1 else None
        print_json(value | {"own_layout": own})
        return
    out = console()
    _show_head(out, subject, sizes, kind, results[0][0], results[0][2])
    if subject.shares_indexers:
        out.print(subject.counted)
    for (layout, layer_plan, footprint), lead in zip(results, ("", f"{subject.title}'s own layout: "), strict=False):
        _show(out, kind, layout, layer_plan, footprint, lead)
    if subject.shares_indexers:
        out.print(f"\nwhich layers run an indexer: {subject.source}")


def _only_of_decode(theirs: Figures, taken: DecodeSizes | None, found: Sequence[Fault], option: str) -> list[Fault]:
    """What is wrong with decode's figures, beside what was found wrong with prefill's."""
    from pdlink.cli.plan_pair import short

    known = [text for text, _ in found]
    side = f"decode {short(taken)}: " if taken else "decode: "
    faults = theirs.faults(taken.tp if taken else 1, option)
    return [(f"{side}{text}", parameters) for text, parameters in faults if text not in known]


def _prefill_sizes(text: str | None, pp: int | None, cp: int | None, tp: int | None) -> ParallelSizes:
    from pdlink.layout.parallel import ParallelSizes, read_sizes

    if text is None:
        sizes = ParallelSizes(pp=pp or 1, cp=cp or DEFAULT_CP, tp=tp or 1)
    elif pp or cp or tp:
        raise InvalidInput(f"--prefill {text} has all sizes; leave out --pp, --cp and --tp, or --prefill")
    else:
        try:
            sizes = ParallelSizes(**read_sizes(text))
        except LayoutError as error:
            raise InvalidInput(f"--prefill {error}") from error
    if sizes.num_ranks > MAX_RANKS:
        named = f"--prefill {text}" if text else f"pp {sizes.pp} x cp {sizes.cp} x tp {sizes.tp}"
        raise InvalidInput(f"{named} is {sizes.num_ranks} ranks; plan at most {MAX_RANKS}")
    return sizes


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
    from pdlink.cli.plan_reasons import partial_components, uneven_heads, uneven_layers
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
    plan_sizes = layer_plan.sizes
    if plan_sizes.tp > 1:
        kept = {rank.owned_bytes for rank in footprint.ranks if rank.rank.cp == rank.rank.pp == rank.rank.dp == 0}
        more = "; the first of them, shown here, have a head more than the others" if len(kept) > 1 else ""
        out.print(f"each row stands for {plan_sizes.tp} tp ranks, which own the same layers{more}")
    notes = [] if lead else uneven_layers(layout, plan_sizes.pp, plan_sizes.cp if kind is Kind.SPLIT else 1)
    for note in [*notes, *partial_components(layout), *uneven_heads(layout, plan_sizes.tp)]:
        out.print(f"note: {note}")
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
