"""Owns what `pdlink plan --decode` shows: who pulls what from whom, how evenly, or why the two do not fit.

The figures are those of `transfer.pair_table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pdlink.cli.plan_reasons import copies, num_copies, partial_components, uneven_heads, uneven_layers
from pdlink.cli.plan_subject import Figures, Subject
from pdlink.errors import IncompatibleError, InvalidInput, LayoutError, Mismatch, PlanError

if TYPE_CHECKING:
    from rich.console import Console

    from pdlink.layout.components import CacheLayout
    from pdlink.layout.decode_plan import DecodeRank, DecodeSizes
    from pdlink.layout.layer_plan import PlanKind
    from pdlink.layout.parallel import ParallelSizes, RankCoordinates
    from pdlink.transfer.pair_table import PairTable, Pull

MAX_PAIRS = 1 << 16
MAX_ROWS = 64
MAX_IDS = 20


def show_pair(
    subject: Subject,
    prefill: Sequence[CacheLayout],
    sizes: ParallelSizes,
    kind: PlanKind,
    taken: DecodeSizes,
    figures: Figures,
    num_tokens: int,
    *,
    as_json: bool,
) -> None:
    """Print the pairing of prefill's `subject`, whose tp ranks have the layouts `prefill`, with a decode instance of
    sizes `taken`, which caches `figures`.

    Raises `InvalidInput` for sizes that cannot be, and `IncompatibleError` or `PlanError` (after the JSON, where that
    is asked for) with why the two sides do not fit.
    """
    from pdlink.cli.output import console, print_json

    if sizes.pp * sizes.cp * sizes.tp * taken.num_readers > MAX_PAIRS:
        raise InvalidInput(f"{sizes} with {taken} makes more than {MAX_PAIRS} pairs of ranks; plan fewer at once")
    head = {
        "model": subject.name,
        "prefill": {axis: getattr(sizes, axis) for axis in ("dp", "pp", "cp", "tp")},
        "decode": {axis: getattr(taken, axis) for axis in ("dp", "pp", "tp", "dcp")},
        "plan": kind.value,
        "page_size": figures.page_size,
        "tokens": num_tokens,
    }
    layouts = figures.layouts(taken.tp)
    try:
        table = _table(prefill, layouts, sizes, kind, taken, num_tokens)
    except (IncompatibleError, PlanError, LayoutError) as error:
        if as_json:
            print_json(head | {"fits": False, "refused": _refusals(error)})
        raise _refused(error, sizes, taken) from error
    if as_json:
        times = num_copies(layouts[0], taken)
        counts = {"pulls_of_each_byte": times, "cache_bytes": table.nbytes // times}
        print_json(head | {"fits": True, "refused": []} | _as_json(table) | counts)
        return
    out = console()
    _show(out, subject, sizes, kind, taken, table)
    for note in _reasons(prefill[0], layouts[0], sizes, kind, taken):
        out.print(f"note: {note}")
    own = figures.subject(taken.tp).own_layout if subject.own_layout else None
    if own is None and subject.shares_indexers:
        out.print(f"note: {subject.counted}")
    if own is not None:
        _show_own(out, subject, _table([subject.own_layout or own], [own] * taken.tp, sizes, kind, taken, num_tokens))


def decode_sizes(text: str) -> DecodeSizes:
    """The sizes that `--decode` names. Raises `InvalidInput`."""
    from pdlink.layout.decode_plan import DecodeSizes
    from pdlink.layout.parallel import read_sizes

    try:
        return DecodeSizes(**read_sizes(text, ("dp", "pp", "tp", "dcp")))
    except LayoutError as error:
        raise InvalidInput(f"--decode {error}") from error


def _table(
    prefill: Sequence[CacheLayout],
    layouts: Sequence[CacheLayout],
    sizes: ParallelSizes,
    kind: PlanKind,
    taken: DecodeSizes,
    num_tokens: int,
) -> PairTable:
    """The pairing of prefill's layouts with decode's, one for each tp rank or one for all."""
    from pdlink.layout.decode_plan import DecodePlan
    from pdlink.layout.fingerprint import compare, fingerprint
    from pdlink.layout.layer_plan import LayerPlan
    from pdlink.transfer.pair_table import tabulate

    layout = prefill[0]
    mismatches = compare(fingerprint(layout), fingerprint(layouts[0]))
    if mismatches:
        raise IncompatibleError(mismatches)
    plan = LayerPlan.balanced(layout, sizes, kind)
    plan.check(layout)
    decode = DecodePlan.balanced(layouts[0], taken)
    return tabulate(prefill, plan, decode, lambda rank: layouts[rank.tp], num_tokens)


def _refusals(error: Exception) -> list[dict[str, str]]:
    if not isinstance(error, IncompatibleError):
        return [{"field": "", "text": str(error)}]
    return [
        {"field": one.field, "prefill": one.prefill, "decode": one.decode, "fix": one.fix, "text": one.text}
        for one in error.mismatches
    ]


def _refused(error: Exception, sizes: ParallelSizes, taken: DecodeSizes) -> InvalidInput:
    """The error that ends the command: every difference once, with both values and what to change."""
    if isinstance(error, IncompatibleError):
        causes = _causes(error.mismatches)
        fixes = dict.fromkeys(one.fix for one in causes if one.fix)
        differences = "; ".join(Mismatch(one.field, one.prefill, one.decode).text for one in causes[:3])
        more = f" (+{len(causes) - 3} more)" if len(causes) > 3 else ""
        text = f"{differences}{more}; {next(iter(fixes), '')}".rstrip("; ")
    else:
        text = str(error)
    return InvalidInput(f"prefill {short(sizes)} and decode {short(taken)} cannot be paired: {text}")


def _causes(mismatches: Sequence[Mismatch]) -> list[Mismatch]:
    """Without what follows from another: pages of other sizes or dtypes have other bytes and fields."""
    names = {one.field for one in mismatches}
    found = []
    for one in mismatches:
        component, _, what = one.field.rpartition(".")
        follows = what in ("page_bytes", "fields") and not names.isdisjoint(
            {f"{component}.page_size", f"{component}.dtype"}
        )
        if not follows:
            found.append(one)
    return found


def _as_json(table: PairTable) -> dict[str, Any]:
    from pdlink.cli.plan import spans

    return {
        "num_pages": dict(table.num_pages),
        "pairs": [
            {
                "prefill": str(one.source),
                "decode": str(one.reader),
                "layers": {name: spans(ids) for name, ids in one.layers.items()},
                "heads": {name: list(ends) for name, ends in one.heads.items()},
                "bytes": one.nbytes,
                "descriptors": one.num_descriptors,
            }
            for one in table.pulls
        ],
        "bytes": table.nbytes,
        "descriptors": table.num_descriptors,
        "bytes_per_prefill_rank": {str(rank): nbytes for rank, nbytes in table.nbytes_of_source.items()},
        "bytes_per_decode_rank": {str(rank): nbytes for rank, nbytes in table.nbytes_of_reader.items()},
        "prefill_imbalance": table.source_imbalance,
        "decode_imbalance": table.reader_imbalance,
    }


def _show(
    out: Console, subject: Subject, sizes: ParallelSizes, kind: PlanKind, taken: DecodeSizes, table: PairTable
) -> None:
    from pdlink.cli.output import print_table

    group = subject.layout.page_groups[0]
    pages = table.num_pages[group.name]
    out.print(
        f"{subject.title}, {subject.layout.num_layers} layers: prefill {short(sizes)} ({kind.value}) -> "
        f"decode {short(taken)}\n"
        f"a request of {table.num_tokens:,} tokens, {pages:,} pages of {group.page_size}\n"
    )
    rows = table.alike()
    by_heads = any(pull.heads for pull, _ in rows)
    shown = rows[:MAX_ROWS]
    texts = _in_mib([one for pull, readers in shown for one in (pull.nbytes, pull.nbytes * len(readers))])
    lines = []
    for number, (pull, readers) in enumerate(shown):
        cells = [_rank(pull.source, sizes), _layers(pull.layers), *([_heads(pull)] if by_heads else [])]
        figures = [texts[2 * number], f"{pull.num_descriptors:,}", texts[2 * number + 1]]
        lines.append([*cells, _readers(readers, taken), *figures])
    columns = ["prefill rank", "layers", *(["heads"] if by_heads else []), "pulled by decode rank"]
    print_table(out, [*columns, "bytes each", "descriptors each", "bytes of all"], lines, left=len(columns))
    if len(rows) > len(shown):
        out.print(f"and {len(rows) - len(shown)} rows more; --json has every pair")
    _show_totals(out, subject, sizes, taken, table)


def _show_totals(out: Console, subject: Subject, sizes: ParallelSizes, taken: DecodeSizes, table: PairTable) -> None:
    given, took = table.nbytes_of_source, table.nbytes_of_reader
    busiest, fullest = max(given, key=lambda rank: given[rank]), max(took, key=lambda rank: took[rank])
    total, gives, takes = _in_mib([table.nbytes, given[busiest], took[fullest]])
    (distinct,) = _in_mib([table.nbytes // num_copies(subject.layout, taken)])
    out.print(f"in all {total} in {table.num_descriptors:,} descriptors (way direct, no two pages neighbours)")
    out.print("that many descriptors at most: the staged way moves a few large ranges instead")
    out.print(copies(subject.layout, taken, distinct))
    out.print(f"prefill {_rank(busiest, sizes)} gives most: {gives}, {table.source_imbalance:.2f} x the mean of all")
    out.print(f"decode {_rank(fullest, taken)} takes most: {takes}, {table.reader_imbalance:.2f} x the mean of all")
    idle = sum(not nbytes for nbytes in given.values())
    if idle:
        out.print(f"note: {idle} of {len(given)} prefill ranks give nothing")
    if taken.dcp > 1:
        count = taken.dcp
        out.print(f"note: dcp {count}: each of {count} neighbouring decode ranks keeps one of every {count} tokens")
    if sizes.dp > 1 or taken.dp > 1:
        out.print("note: a request stays inside one dp group of each side; every two groups look like this")


def _reasons(
    prefill: CacheLayout, decode: CacheLayout, sizes: ParallelSizes, kind: PlanKind, taken: DecodeSizes
) -> list[str]:
    """Why some ranks give or take more than others."""
    from pdlink.layout.layer_plan import PlanKind

    split = kind is PlanKind.SPLIT
    by_heads = any(one.total_heads for one in prefill.components)
    alike = (1 if split else sizes.cp) * (1 if by_heads else sizes.tp)
    given = uneven_layers(prefill, sizes.pp, sizes.cp if split else 1) + uneven_heads(prefill, sizes.tp)
    given += partial_components(prefill)
    shared = [f"{alike} ranks hold the same layers, of which decode pulls some from each"] if alike > 1 else []
    received = uneven_layers(decode, taken.pp, 1) + uneven_heads(decode, taken.tp)
    return [f"prefill: {one}" for one in given + shared] + [f"decode: {one}" for one in received]


def _show_own(out: Console, subject: Subject, table: PairTable) -> None:
    own = subject.own_layout
    assert own is not None
    num_indexed = len(own.component("index_k").layers)
    (total,) = _in_mib([table.nbytes])
    out.print(
        f"note: counted here: indexer keys on all {own.num_layers} layers; on the {num_indexed} alone that run an "
        f"indexer ({subject.title}'s own layout) it is {total} in {table.num_descriptors:,} descriptors: "
        "--indexers own"
    )


def short(sizes: ParallelSizes | DecodeSizes) -> str:
    """As one would write them: axes of size 1 are left out."""
    named = {one.name: getattr(sizes, one.name) for one in fields(sizes)}
    return "".join(f"{axis}{size}" for axis, size in named.items() if size > 1) or "tp1"


def _in_mib(sizes: Sequence[int]) -> list[str]:
    """Bytes as text, in MiB even where there are many: pairs are compared with each other."""
    unit, name = (1 << 20, "MiB") if max(sizes, default=0) >= 1 << 20 else (1 << 10, "KiB")
    return [f"{size / unit:,.1f} {name}" for size in sizes]


def _rank(rank: RankCoordinates | DecodeRank, sizes: ParallelSizes | DecodeSizes) -> str:
    """The coordinates along which there are several ranks."""
    axes = [one.name for one in fields(rank) if one.name != "dp" and getattr(sizes, one.name) > 1] or ["tp"]
    return " ".join(f"{axis} {getattr(rank, axis)}" for axis in axes)


def _layers(layers: Mapping[str, Sequence[int]]) -> str:
    """`0-9` where all components come of the same layers, else each with its own."""
    if len(set(map(tuple, layers.values()))) == 1:
        return _ids(next(iter(layers.values())))
    return "; ".join(f"{name} {_ids(ids)}" for name, ids in layers.items())


def _ids(layers: Sequence[int]) -> str:
    from pdlink.layout.layer_plan import compact_ids

    text = compact_ids(layers)
    return text if len(text) <= MAX_IDS else f"{len(layers)} of {layers[0]}-{layers[-1]}"


def _heads(pull: Pull) -> str:
    ranges = {f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in pull.heads.values()}
    return ", ".join(sorted(ranges)) or "all"


def _readers(readers: Sequence[DecodeRank], taken: DecodeSizes) -> str:
    """`tp 0-7`, with the stage before it where there are several."""
    from pdlink.layout.layer_plan import compact_ids

    parts = []
    for stage, ranks in groupby(readers, key=lambda rank: rank.pp):
        ids = compact_ids([rank.tp for rank in ranks])
        parts.append(f"pp {stage} tp {ids}" if taken.pp > 1 else f"tp {ids}")
    return "; ".join(parts)
