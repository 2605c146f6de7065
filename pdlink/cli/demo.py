"""Owns `pdlink demo`: its options, what it shows and its exit code. The run is in `pdlink_engines.reference.demo`."""

from __future__ import annotations

import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdlink.cli.exits import WrongRun
from pdlink.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from pdlink_engines.reference.demo.result import DemoResult
    from pdlink_engines.reference.demo.spec import DemoSpec

SHARED = "You are a helpful assistant. Answer in one short sentence. "
DEFAULT_PROMPTS = (SHARED + "What is the capital of France?", SHARED + "What does a key-value cache hold?")


MAX_PROMPT_SHOWN = 160


class Inject(StrEnum):
    """Damage to do on purpose, as an option."""

    none = "none"
    flip = "flip"
    skip_owner = "skip-owner"
    stale_scratch = "stale-scratch"
    swap_layers = "swap-layers"


def demo(
    model: Annotated[str, typer.Option(help="smollm2 (real weights) or glm-dsa-tiny (MLA + DSA, seeded).")] = "smollm2",
    pp: Annotated[int, typer.Option(help="Pipeline stages of prefill.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel prefill ranks of a stage, a process each.")] = 3,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel decode ranks, a process each.")] = 1,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with one more prompt.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt, at most.")] = 24,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill chunk.")] = 32,
    pool_pages: Annotated[int, typer.Option(help="Pages of every pool.")] = 64,
    backend: Annotated[
        str | None, typer.Option(help="Transport to pull with, or auto (default: PDLINK_BACKENDS).")
    ] = None,
    bootstrap: Annotated[str, typer.Option(help="Where the bootstrap service listens; port 0 is any.")] = "127.0.0.1:0",
    sidecar: Annotated[
        bool, typer.Option("--sidecar", help="The link of each side in a sidecar, outside of its ranks.")
    ] = False,
    inject: Annotated[Inject, typer.Option(help="Damage the run on purpose; the proof must find it.")] = Inject.none,
    dump: Annotated[Path | None, typer.Option(help="Folder for the received pages and their plan.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Prefill with split layers, pull and merge them, generate, and prove that bytes and tokens are right."""
    from pdlink.address import parse_address
    from pdlink.backends.registry import parse_backends
    from pdlink.cli.output import console, note, print_json
    from pdlink.cli.progress import progress
    from pdlink.config import load_settings

    _need_reference_engine()
    from pdlink_engines.reference.demo.run import run_demo
    from pdlink_engines.reference.demo.spec import Damage, DemoSpec, read_prompts

    backend = load_settings(backends=backend).backends
    parse_backends(backend)
    prompts = read_prompts(list(prompt or ()), prompt_file) or DEFAULT_PROMPTS
    _check_dump(dump)
    with tempfile.TemporaryDirectory(prefix="pdlink-demo-") as folder:
        spec = DemoSpec(
            model=model,
            pp=pp,
            cp=cp,
            decode_tp=decode_tp,
            prompts=prompts,
            new_tokens=new_tokens,
            page_size=page_size,
            chunk_tokens=chunk,
            pool_pages=pool_pages,
            backend=backend,
            inject=Damage(inject.value),
            run_dir=Path(folder),
            bootstrap=str(parse_address(bootstrap)),
            sidecar=sidecar,
        )
        with progress("the demo", draws_itself=True) as bar:

            def tell(text: str) -> None:
                note(text)
                bar.say(text)

            result = run_demo(spec, tell)
        if dump is not None:
            _write_dump(dump, spec, result)
    if json:
        print_json(result.as_json())
    else:
        _show(console(), result)
    if not result.passed:
        raise WrongRun("; ".join(result.failures()))
    if spec.inject is not Damage.NONE:
        raise WrongRun(f"the proof has not found the damage of --inject {spec.inject}")


def _need_reference_engine() -> None:
    from importlib.util import find_spec

    missing = [one for one in ("transformers", "gguf") if find_spec(one) is None]
    if missing:
        raise InvalidInput(f"the demo needs {', '.join(missing)}; pip install 'pdlink[reference]'")


def _check_dump(dump: Path | None) -> None:
    if dump is None:
        return
    try:
        dump.mkdir(parents=True, exist_ok=True)
        if any(dump.iterdir()):
            raise InvalidInput(f"--dump {dump} is not empty; name a new folder")
    except OSError as error:
        raise InvalidInput(f"--dump {dump} cannot be written: {error.strerror}") from error


def _write_dump(dump: Path, spec: DemoSpec, result: DemoResult) -> None:
    """The received and the expected pages as .npy files, and `plan.json`: enough to check them without pdlink."""
    from pdlink_engines.reference.demo.dump import plan_of

    for name in ("received", "expected"):
        shutil.copytree(spec.run_dir / name, dump / name)
    (dump / "plan.json").write_text(plan_of(spec, result), encoding="utf-8")


def _show(out: Console, result: DemoResult) -> None:
    _show_ranks(out, result)
    for one in result.requests:
        _say(out, f"\n{one.request_id}: {_shortened(one.prompt)}", "bold")
        _say(out, f"  {one.text.strip()}", "green")
        _say(
            out,
            f"  {one.num_tokens} prompt tokens ({one.cached_tokens} from an earlier request), "
            f"{sum(one.pulled_bytes):,} bytes, {one.transfer_ms:.1f} ms from the last publish to the end at decode",
        )
    _say(out, "\nproof", "bold")
    for one in result.requests:
        bytes_text = "bytes equal to the unsplit prefill" if one.bytes_equal else one.difference
        _say(out, f"  {one.request_id}: {bytes_text}; against plain transformers: {one.verdict}")


def _show_ranks(out: Console, result: DemoResult) -> None:
    """Who owned what, and who pulled how much of it."""
    from pdlink.cli.output import format_sizes, print_table

    num_ranks = len(result.layers)
    sizes = format_sizes([result.kv_bytes_unsplit, *result.kv_bytes_per_rank, *result.scratch_bytes_per_rank])
    pairs = result.pulled_bytes_per_pair
    pulled = format_sizes([nbytes for reader in pairs for nbytes in reader])
    rows = []
    for rank in range(num_ranks):
        stage, cp = divmod(rank, result.cp)
        name = f"pp {stage} cp {cp}" if result.pp > 1 else f"rank {rank}"
        cells = [name, _layer_text(result.layers[rank]), sizes[1 + rank], sizes[1 + num_ranks + rank]]
        rows.append([*cells, *pulled[rank::num_ranks]])
    rows.append(["unsplit", "all of them, on every rank", sizes[0], "", *[""] * len(pairs)])
    stages = f" in {result.pp} stages" if result.pp > 1 else ""
    readers = f" by {len(pairs)} decode ranks" if len(pairs) > 1 else ""
    _say(
        out,
        f"\n{result.model} over {num_ranks} prefill rank(s){stages}, pulled over {result.backend}{readers}",
        "bold",
    )
    columns = [f"pulled by decode-{tp}" for tp in range(len(pairs))] if len(pairs) > 1 else ["pulled by decode"]
    print_table(out, ["prefill", "layers", "KV memory", "scratch", *columns], rows, left=2)


def _say(out: Console, text: str, style: str = "") -> None:
    """A line as it is: prompts and answers are no markup, and a pipe gets unbroken lines."""
    out.print(text, style=style or None, markup=False, emoji=False, soft_wrap=not out.is_terminal)


def _shortened(text: str) -> str:
    """A prompt on one line, so that a whole file does not fill the screen."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_PROMPT_SHOWN else f"{line[:MAX_PROMPT_SHOWN]}... ({len(text):,} characters)"


def _layer_text(layers: dict[str, list[int]]) -> str:
    from pdlink.layout.layer_plan import compact_ids

    return "; ".join(f"{name} {compact_ids(ids)}" for name, ids in layers.items() if ids) or "none"
