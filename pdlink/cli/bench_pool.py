"""Owns `pdlink bench read` and `pdlink bench loop`: layers of other ranks, read alone and between matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdlink.cli.pool_case import PoolCase

RANK = "pdlink.cli.pool_rank"
ROUNDS_PER_WAIT = 4.0
"""A round may be waited for as long as so many of its exchanges."""
COLUMNS = ("reader", "ranks", "layers", "pool tokens", "live tokens", "chunk", "ms", "ratio", "quartiles", "MB a layer")


class ReaderName(StrEnum):
    """`none` is no split, `whole-pool` the baseline that moves whole layers, `sglang` its own class, `copy` one plain
    copy of as many bytes. The others are pdlink's."""

    NONE = "none"
    WHOLE_POOL = "whole-pool"
    BROADCAST = "broadcast"
    PEER = "peer"
    COPY = "copy"
    SGLANG = "sglang"


Readers = Annotated[list[ReaderName] | None, typer.Option("--reader", help="Who reads; repeat (default: each).")]
Ranks = Annotated[int, typer.Option(min=2, max=64, help="Ranks that split the layers, a process each.")]
Live = Annotated[list[int] | None, typer.Option(min=1, help="Tokens of the prefix that is read; repeat for a sweep.")]
Pool = Annotated[int, typer.Option(min=64, help="Tokens that the pool has room for.")]
Layers = Annotated[int, typer.Option(min=1, max=1024, help="Layers of 656 + 132 B a token.")]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="Rounds; readers take turns in each.")]
Device = Annotated[str, typer.Option(help="Where the pool lies: cpu, or cuda with a GPU for each rank.")]
Ahead = Annotated[bool, typer.Option("--ahead", help="Fetch the next layers while one is used.")]
Blocks = Annotated[int, typer.Option(min=0, help="GPU: multiprocessors that a gather may take; 0: all.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Plot = Annotated[Path | None, typer.Option(help="Write a picture (.png) there.")]


def bench_read(
    reader: Readers = None,
    ranks: Ranks = 2,
    live_tokens: Live = None,
    pool_tokens: Pool = 65536,
    layers: Layers = 2,
    rounds: Rounds = 9,
    device: Device = "cpu",
    copy_blocks: Blocks = 0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Time one read of a layer (latent and indexer) that another rank owns; ratios are to whole-pool."""
    from pdlink.cli.pool_case import PoolCase

    readers = _names(reader, ("whole-pool", "broadcast", "peer", *(("copy",) if device == "cuda" else ())))
    _bench(
        [
            PoolCase(False, readers, ranks, layers, live, pool_tokens, 0, 0, rounds, device, copy_blocks=copy_blocks)
            for live in live_tokens or [1024, 8192]
        ],
        json,
        plot,
        "read of one layer",
    )


def bench_loop(
    reader: Readers = None,
    ranks: Ranks = 2,
    live_tokens: Live = None,
    pool_tokens: Pool = 16384,
    chunk_tokens: Annotated[int, typer.Option(min=0, help="Tokens that a forward computes and writes.")] = 512,
    layers: Layers = 8,
    products: Annotated[int, typer.Option(min=0, help="Matrix products of a layer (chunk x width x width).")] = 12,
    width: Annotated[int, typer.Option(min=0, help="Their width; 0: 512, and on GPUs 6144 in bf16.")] = 0,
    rounds: Rounds = 9,
    ahead: Ahead = False,
    device: Device = "cpu",
    copy_blocks: Blocks = 0,
    kill_rank: Annotated[
        int | None,
        typer.Option(min=0, help="Time nothing: kill this rank in a forward, and see how soon the others know it."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="With --kill-rank: how long a reader waits for another rank.")
    ] = 15.0,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Time a forward over all layers, reads and computation; ratios are to no split at all."""
    from pdlink.cli.pool_case import PoolCase

    names = _names(reader, (*(("none",) if kill_rank is None else ()), "whole-pool", "broadcast", "peer"))
    rest = pool_tokens, chunk_tokens, products, rounds, device, ahead, copy_blocks, width
    wait_s = 0.0 if kill_rank is None else timeout_s
    cases = [PoolCase(True, names, ranks, layers, live, *rest, wait_s) for live in live_tokens or [4096]]
    if kill_rank is None:
        _bench(cases, json, plot, f"forward over {layers} layers")
    else:
        _kill(cases, kill_rank, json, plot)


def _kill(cases: Sequence[PoolCase], rank: int, json: bool, plot: Path | None) -> None:
    """Raises `WrongRun` when a reader of pdlink left another rank without an error that names the one killed."""
    from pdlink.cli import pool_fault
    from pdlink.cli.output import console, print_json, print_table
    from pdlink.errors import InvalidInput

    if plot is not None:
        raise InvalidInput("--plot draws times, and --kill-rank takes none; leave one of them out")
    _check_gpus(cases)
    rows = [row for case in cases for row in pool_fault.measure(case, rank)]
    if json:
        print_json({"rows": rows})
    else:
        print_table(console(), pool_fault.COLUMNS, [pool_fault.as_text(row) for row in rows])
    pool_fault.check(rows)


def _names(chosen: Sequence[ReaderName] | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.value for one in chosen)) if chosen else usual


def _bench(cases: Sequence[PoolCase], json: bool, plot: Path | None, title: str) -> None:
    from pdlink.cli import pool_plot
    from pdlink.cli.output import console, note, print_json, print_table
    from pdlink.cli.progress import progress
    from pdlink.cli.transfer_plot import check_plot

    if plot is not None:
        check_plot(plot)
    _check_gpus(cases)
    rows: list[dict[str, object]] = []
    with progress(title, sum(case.rounds * len(case.readers) for case in cases)) as bar:
        for case in cases:
            live = f"{case.live_tokens:,} of {case.pool_tokens:,} tokens live"
            note(f"{case.ranks} ranks, {live}: {', '.join(case.readers)}")
            rows += _measure(case, bar.step)
    if plot is not None:
        pool_plot.draw(rows, plot, title)
    if json:
        print_json({"rows": rows})
        return
    print_table(console(), COLUMNS, [_cells(row) for row in rows])
    for picked in dict.fromkeys(str(row["picked"]) for row in rows):
        console().print(f"a pool would pick {picked}")


def _check_gpus(cases: Sequence[PoolCase]) -> None:
    """Raise `BackendUnavailable` before anything starts where ranks would have no GPU of their own."""
    if cases[0].device != "cuda":
        return
    from pdlink.cli.transfer_gpus import find_gpus
    from pdlink.errors import BackendUnavailable

    count = find_gpus().count
    if count < cases[0].ranks:
        raise BackendUnavailable(
            f"--ranks {cases[0].ranks} need as many GPUs, and torch finds {count}; each rank has one of its own"
        )


def _measure(case: PoolCase, step: Callable[[], None] = lambda: None) -> list[dict[str, object]]:
    """Run the ranks of one case and collect what rank 0 says; `step` is called with each read or forward of it."""
    import tempfile
    from contextlib import ExitStack

    from pdlink.cli.pool_case import make_rows
    from pdlink.testing.child import Child

    taken: dict[str, list[float]] = {one: [] for one in case.readers}
    moved: dict[str, int] = {}
    environ = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    with tempfile.TemporaryDirectory(prefix="pdlink-bench-") as folder, ExitStack() as stack:
        ranks = [
            stack.enter_context(Child(f"rank {rank}", RANK, [str(rank), folder, case.to_json()], environ))
            for rank in range(case.ranks)
        ]
        limit_s = ROUNDS_PER_WAIT * case.wait_s
        picked = ranks[0].hear(limit_s)
        while (heard := ranks[0].hear(limit_s)) != "done":
            reader, ms, nbytes = heard
            taken[reader].append(ms)
            moved[reader] = nbytes
            step()
    return make_rows(case, taken, moved, picked)


def _cells(row: dict[str, object]) -> list[str]:
    def ratio(name: str) -> str:
        value = row[name]
        return f"{value:.3f}" if isinstance(value, float) else "-"

    moved = row["bytes_moved"]
    assert isinstance(moved, int)
    return [
        str(row["reader"]),
        str(row["ranks"]),
        str(row["layers"]),
        f"{row['pool_tokens']:,}",
        f"{row['live_tokens']:,}",
        f"{row['chunk_tokens']:,}",
        f"{row['ms']:.3f}",
        ratio("ratio"),
        f"{ratio('ratio_low')}-{ratio('ratio_high')}",
        f"{moved / 1e6:.2f}",
    ]
