"""Owns the `pdlink` command: its sub-commands, what every run of it shares, and how errors leave it.

A sub-command is a module of this package with a typer function. At the top such a module imports nothing heavy (torch,
grpc, numpy, rich): that happens inside the function, so that `pdlink plan` pays only for itself. Register it below.
Errors are raised as `PdlinkError`, never printed: `main` is the one place that prints them and picks the exit code.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from pdlink import __version__
from pdlink.cli import (
    bench_control,
    bench_digest,
    bench_plan,
    bench_pool,
    bench_sidecar,
    bench_transfer,
    bootstrap,
    config,
    demo,
    doctor,
    examples,
    exits,
    inspect_directory,
    ping,
    plan,
    sidecar,
)
from pdlink.cli.faults import EveryOption
from pdlink.cli.interrupts import orderly_end
from pdlink.limits import raise_soft_limit
from pdlink.observability.logs import set_up

log = logging.getLogger("pdlink.cli")
LEVELS = ("debug", "info", "warning", "error", "critical")

EXAMPLES = """\b
Examples:
  pdlink plan --model glm-5.2 --cp 4 --tokens 8192
  pdlink plan --prefill pp2cp4tp1 --decode tp8
  pdlink bootstrap --bind 127.0.0.1:7400
  pdlink sidecar --socket /run/user/1000/pdlink.sock
  pdlink inspect 127.0.0.1:7400 --watch
  pdlink doctor
  pdlink bench plan --json
  pdlink bench control --cp 4
  pdlink bench transfer --backend nixl --plot rates.png"""

app = typer.Typer(
    name="pdlink",
    help="Layer-split prefill and its link to decode: plan it, run it, measure it.",
    epilog=f"{EXAMPLES}\n\n{exits.SUMMARY}",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(name="bench", help="Measure a part on this machine.", rich_markup_mode=None)
app.command(epilog=examples.DEMO)(demo.demo)
app.command(cls=EveryOption, epilog=examples.PLAN)(plan.plan)
app.command(epilog=examples.BOOTSTRAP)(bootstrap.bootstrap)
app.command(epilog=examples.SIDECAR)(sidecar.sidecar)
app.command("inspect", epilog=inspect_directory.EXAMPLES)(inspect_directory.inspect)
app.command("ping", epilog=ping.EXAMPLES)(ping.ping)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
bench.command("plan", epilog=examples.BENCH_PLAN)(bench_plan.bench_plan)
bench.command("control", epilog=examples.BENCH_CONTROL)(bench_control.bench_control)
bench.command("sidecar", epilog=examples.BENCH_SIDECAR)(bench_sidecar.bench_sidecar)
bench.command("transfer", epilog=examples.BENCH_TRANSFER)(bench_transfer.bench_transfer)
bench.command("digest", epilog=examples.BENCH_DIGEST)(bench_digest.bench_digest)
bench.command("read", epilog=examples.BENCH_READ)(bench_pool.bench_read)
bench.command("loop", epilog=examples.BENCH_LOOP)(bench_pool.bench_loop)
app.add_typer(bench, name="bench")
app.add_typer(config.config, name="config")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdlink {__version__}")
        raise typer.Exit


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """The console script. Its process is ours, so it may have as many peers as the system lets it open files for."""
    raise_soft_limit()
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Whatever goes wrong is one line on standard error."""
    _replace_closed_streams()
    try:
        with orderly_end():
            try:
                _set_up_logging(arguments)
                _invoke(arguments)
            finally:
                sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - the process boundary: nothing above can report it
        return _report(error, arguments)
    return exits.OK


def _replace_closed_streams() -> None:
    """A command started with a closed output (`>&-`) runs all the same; what it prints goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as we do


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    """Say what went wrong, in one line unless it is a bug of ours, and pick the exit code."""
    code = exits.exit_code(error)
    log.debug("the command failed", exc_info=error)
    if code == exits.BROKEN_PIPE:
        # Whoever read our output has left. What is still buffered must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif code == exits.BUG:
        traceback.print_exception(error)
        print("error: a bug in pdlink, please report it with the lines above", file=sys.stderr)
    else:
        print(f"error: {exits.one_line(error, arguments)}", file=sys.stderr)
    return code


def _invoke(arguments: Sequence[str]) -> None:
    """Parse and run. Not `app()`: that prints errors and picks exit codes in its own way."""
    command = get_command(app)
    try:
        with command.make_context("pdlink", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        if end.exit_code:
            raise RuntimeError(f"a command ended with code {end.exit_code} instead of an error") from end


def _set_up_logging(arguments: Sequence[str]) -> None:
    """Log to standard error as `PDLINK_LOG` and `PDLINK_LOG_FORMAT` say; commands that read settings do so again.

    Raises `ConfigError` for values that are neither.
    """
    # grpc's core prints what it also raises; an error is one line here.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    level, style = os.environ.get("PDLINK_LOG", "warning"), os.environ.get("PDLINK_LOG_FORMAT", "text")
    if level.lower() in LEVELS and style in ("text", "json"):
        set_up(level, "json" if style == "json" else "text")
        return
    set_up("warning", "text")
    if not any(one.partition("=")[0] in ("--set", "--config") for one in arguments):
        from pdlink.config import load_settings

        load_settings()  # raises, with whatever else is wrong; a command with these options does so itself
