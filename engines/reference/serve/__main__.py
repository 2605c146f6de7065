"""Owns the command line of the servers: `python -m pdlink_engines.reference.serve prefill|decode|front|ask`.

Settings of pdlink itself (transports, addresses, deadlines) come from PDLINK_* variables, as everywhere.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from pdlink.config import load_settings
from pdlink.errors import InvalidInput, PdlinkError
from pdlink.limits import raise_soft_limit
from pdlink.observability.logs import set_up

app = typer.Typer(
    help="The reference engine as servers, for test rigs.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

WARM = (
    *("pdlink.cli.main", "pdlink.cli.bootstrap", "pdlink.cli.inspect_directory", "pdlink.cli.ping_rank"),
    *("pdlink.sidecar.server", "pdlink.sidecar.engine_process", "pdlink.bootstrap.server"),
    *("pdlink.observability.bootstrap_watch", "pdlink.backends.nixl", "pdlink.backends.mooncake"),
    *("pdlink_engines.reference.convert_gguf", "pdlink_engines.reference.plain"),
    *("pdlink_engines.reference.serve.prefill_server", "pdlink_engines.reference.serve.decode_server"),
    "pdlink_engines.reference.serve.front",
)

Model = Annotated[str, typer.Option(help="Reference model to serve.")]
Http = Annotated[str, typer.Option(help="Host and port of requests, health and readiness.")]
Sidecar = Annotated[
    str,
    typer.Option(
        envvar="RIG_SIDECAR", help="Socket of the sidecar that has the link; without it the link is in this process."
    ),
]
PageSize = Annotated[int, typer.Option(help="Tokens of a page.")]
PoolPages = Annotated[int, typer.Option(help="Pages of the pool.")]
MaxRequests = Annotated[int, typer.Option(help="Requests at once; more are refused.")]
Bootstrap = Annotated[list[str], typer.Option(help="Bootstrap of the prefill side; repeatable.")]


@app.command()
def prefill(
    rank: Annotated[int, typer.Option(help="This rank's number, from 0; rank 0 leads and takes requests.")],
    http: Http,
    leader: Annotated[str, typer.Option(help="Where rank 0 listens and the others come to: host and port.")],
    bootstrap: Bootstrap,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks, among which the layers are split.")] = 4,
    model: Model = "smollm2",
    instance: Annotated[str, typer.Option(help="Name of the prefill instance.")] = "prefill",
    sidecar: Sidecar = "",
    page_size: PageSize = 16,
    pool_pages: PoolPages = 256,
    chunk: Annotated[int, typer.Option(help="Tokens that are computed at once.")] = 64,
    max_requests: MaxRequests = 64,
    group_timeout: Annotated[float, typer.Option(help="Seconds that a rank waits for another in one step.")] = 15.0,
) -> None:
    """Serve one context-parallel prefill rank."""
    from pdlink_engines.reference.models import fix_threads, load_model
    from pdlink_engines.reference.serve.options import PrefillOptions
    from pdlink_engines.reference.serve.prefill_server import serve_prefill

    options = PrefillOptions(
        model=model,
        instance=instance,
        http=http,
        sidecar=Path(sidecar) if sidecar else None,
        page_size=page_size,
        pool_pages=pool_pages,
        max_requests=max_requests,
        rank=rank,
        cp=cp,
        leader=leader,
        bootstraps=tuple(bootstrap),
        chunk_tokens=chunk,
        group_timeout_s=group_timeout,
    )
    fix_threads()
    _leave(serve_prefill(options, load_model(model)))


@app.command()
def decode(
    http: Http,
    model: Model = "smollm2",
    instance: Annotated[str, typer.Option(help="Name of the decode instance.")] = "decode",
    sidecar: Sidecar = "",
    page_size: PageSize = 16,
    pool_pages: PoolPages = 256,
    max_requests: MaxRequests = 64,
) -> None:
    """Serve decode: pull from whoever owns what, and generate."""
    from pdlink_engines.reference.models import fix_threads, load_model
    from pdlink_engines.reference.serve.decode_server import serve_decode
    from pdlink_engines.reference.serve.options import EngineOptions

    options = EngineOptions(
        model=model,
        instance=instance,
        http=http,
        sidecar=Path(sidecar) if sidecar else None,
        page_size=page_size,
        pool_pages=pool_pages,
        max_requests=max_requests,
    )
    fix_threads()
    _leave(serve_decode(options, load_model(model)))


@app.command()
def front(
    http: Http,
    prefill_url: Annotated[list[str], typer.Option(help="URL of a prefill leader; repeatable.")],
    decode_url: Annotated[list[str], typer.Option(help="URL of a decode server; repeatable.")],
    bootstrap: Bootstrap,
    model: Model = "smollm2",
    instance: Annotated[str, typer.Option(help="Name of the prefill instance.")] = "prefill",
    patience: Annotated[float, typer.Option(help="Seconds for a request with all its tries.")] = 90.0,
    silence: Annotated[float, typer.Option(help="Seconds that a server may say nothing.")] = 45.0,
) -> None:
    """Serve OpenAI's /v1/completions, and send each request to prefill and decode."""
    from pdlink_engines.reference.serve.front import FrontOptions, serve_front

    options = FrontOptions(
        http=http,
        model=model,
        instance=instance,
        bootstraps=tuple(bootstrap),
        prefills=tuple(one.rstrip("/") for one in prefill_url),
        decodes=tuple(one.rstrip("/") for one in decode_url),
        patience_s=patience,
        silence_s=silence,
    )
    _leave(serve_front(options))


@app.command()
def ask(
    front_url: Annotated[str, typer.Option("--front", help="URL of the front.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, three of our own.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 24,
) -> None:
    """Send prompts to a front, and print answers and the bytes that moved for each."""
    from pdlink_engines.reference.serve.ask import PROMPTS, ask

    ask(front_url.rstrip("/"), tuple(prompt or PROMPTS), max_tokens)


@app.command()
def warm() -> None:
    """Import what the servers import, and leave. An image is built with the bytecode that this makes."""
    import transformers

    for name in WARM:
        importlib.import_module(name)
    print(
        f"imported {', '.join(WARM)}, {transformers.LlamaForCausalLM.__name__}, {transformers.AutoTokenizer.__name__}"
    )


def _leave(code: int) -> None:
    if code:
        raise typer.Exit(code)


def main() -> int:
    """Run one command; the exit code."""
    raise_soft_limit()
    try:
        settings = load_settings()
        set_up(settings.log, settings.log_format)
        app(standalone_mode=False)
    except typer.Exit as end:
        return end.exit_code
    except ValidationError as error:
        first = error.errors()[0]
        where = f"--{'.'.join(map(str, first['loc'])).replace('_', '-')}: " if first["loc"] else ""
        print(f"error: {where}{first['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return 2
    except PdlinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInput) else 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.exit(code)
