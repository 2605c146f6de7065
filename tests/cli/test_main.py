"""The `pdlink` command as a whole: help, exit codes, one line for each error, and what it does not load."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from pdlink import __version__
from pdlink.cli import exits
from pdlink.cli import main as command
from pdlink.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    DeadlineExceeded,
    IncompatibleError,
    IntegrityError,
    LayoutError,
    Mismatch,
    NotReady,
    PlanError,
    StateError,
    TransferFailed,
)
from tests import processes

PDLINK = [sys.executable, "-m", "pdlink"]


def ending_in(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


@pytest.fixture
def run_raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Runs a command line whose command raises the error given."""

    def run(error: BaseException) -> int:
        app = typer.Typer()
        app.callback()(lambda: None)
        app.command("fail")(ending_in(error))
        monkeypatch.setattr(command, "app", app)
        return command.main(["fail"])

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong setting"), 2),
        (LayoutError("wrong layout"), 2),
        (NotReady("a rank is missing"), 2),
        (BackendUnavailable("no shared memory"), 2),
        (DeadlineExceeded("nobody answered"), 2),
        (IncompatibleError([Mismatch("page_size", "64", "16")]), 2),
        (exits.WrongRun("bytes differ"), 1),
        (PlanError("no source"), 1),
        (IntegrityError("digest"), 1),
        (TransferFailed("owner died"), 1),
        (BackendError("wire"), 1),
        (StateError("closed"), 1),
        (OSError(28, "No space left on device"), 2),
    ],
)
def test_an_error_is_one_line_and_its_own_exit_code(
    run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    assert run_raising(error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {error}\n"


def test_an_error_of_several_lines_is_printed_as_one(
    run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(PlanError("first\n  second\n")) == 1
    assert capsys.readouterr().err == "error: first second\n"


def test_ctrl_c_and_sigterm_have_their_own_codes(
    run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(KeyboardInterrupt()) == 130
    assert run_raising(exits.Terminated()) == 143
    assert capsys.readouterr().err == "interrupted\n" * 2


def test_a_bug_shows_where_it_is_and_is_told_from_a_wrong_run(
    run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(ZeroDivisionError("oh")) == exits.BUG == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: a bug in pdlink")


def test_help_fits_a_screen_and_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 80
    for said in (
        "plan",
        "demo",
        "bench",
        "bootstrap",
        "pdlink plan --model glm-5.2 --cp 4 --tokens 8192",
        "Exit codes",
    ):
        assert said in out


def test_without_a_command_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    whole = capsys.readouterr().out
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out == whole
    assert command.main(["bench"]) == 0
    assert "control" in capsys.readouterr().out


def test_every_example_of_the_help_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^  pdlink (.+)$", command.EXAMPLES, flags=re.MULTILINE)
    assert len(examples) > 3
    for example in examples:
        assert command.main([*example.split(), "--help"]) == 0, example


@pytest.mark.parametrize(
    "arguments", [("nope",), ("--nope",), ("bench", "nope"), ("plan", "--nope"), ("plan", "extra")]
)
def test_a_mistyped_command_line_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert command.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert arguments[-1] in err
    assert "--help'" in err


def test_the_version_is_told() -> None:
    done = processes.run([*PDLINK, "--version"], check=True)
    assert done.stdout == f"pdlink {__version__}\n"


def test_a_log_level_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLINK_LOG", "loud")
    assert command.main(["plan"]) == 2
    assert "PDLINK_LOG='loud'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--cp", "600", "--layers", "1000", "--latent-bytes", "8")])
def test_a_reader_that_leaves_early_is_no_error(arguments: tuple[str, ...]) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.started([*PDLINK, *arguments], **pipes) as child:
        child.stdout.close()
        err = child.stderr.read()
        assert (child.wait(processes.PATIENCE_S), err) == (exits.BROKEN_PIPE, b"")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = processes.run([*PDLINK, "plan"], stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("arguments", [["--help"], ["plan"], ["plan", "--json"], ["plan", "--model", "smollm2"]])
def test_planning_and_help_load_nothing_that_runs_a_model_or_a_wire(arguments: list[str]) -> None:
    code = (
        "import sys; from pdlink.cli.main import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'grpc', 'transformers', 'zmq', 'google.protobuf'} & set(sys.modules))); sys.exit(code)"
    )
    done = processes.run([sys.executable, "-c", code, *arguments], check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def every_command() -> list[tuple[str, ...]]:
    """The words of each command that does something itself."""
    found: list[tuple[str, ...]] = []

    def walk(group: object, words: tuple[str, ...]) -> None:
        for name, one in getattr(group, "commands", {}).items():
            walk(one, (*words, name))
        if words and not hasattr(group, "commands"):
            found.append(words)

    walk(typer.main.get_command(command.app), ())
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_the_help_of_a_command_fits_a_screen_and_has_examples_that_can_be_parsed(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 52
    assert max(map(len, lines)) <= 80
    shown = [re.fullmatch(r"    pdlink ([^|]+)(\|.*)?", line) for line in lines[lines.index("  Examples:") + 1 :]]
    assert len(shown) >= 2
    for example in shown:
        assert example, lines
        assert example[1].split()[: len(words)] == list(words)
        assert command.main([*example[1].split(), "--help"]) == 0, example[0]
        capsys.readouterr()
