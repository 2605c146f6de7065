"""`pdlink inspect`: what it shows is what is registered, whole or not, and it shows no secret."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlink.address import Address
from pdlink.bootstrap.access import Access
from pdlink.bootstrap.inspection import InstanceView, WorkerView
from pdlink.bootstrap.inspection_wire import look, pack_directory, unpack_directory
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.messages import PROTOCOL
from pdlink.bootstrap.server import BootstrapServer
from pdlink.cli import main as command
from pdlink.cli.inspect_directory import MISSING, TWICE, ownership
from pdlink.config import Settings, load_settings
from pdlink.errors import FrameError, UnknownInstance
from pdlink.layout import LayerPlan, ParallelSizes, PlanKind
from pdlink.v1 import inspect_pb2 as pb
from tests.bootstrap.values import make_instance, make_layout
from tests.processes import PATIENCE_S, started

LOOPBACK = Address("127.0.0.1", 0)
TOKEN = "s3cret-t0ken-of-this-test"


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def serve(stack: contextlib.ExitStack, num_registered: int, **settings: object) -> BootstrapServer:
    """A bootstrap with some of the ranks of one instance of two."""
    chosen = load_settings({}, **settings)
    server = stack.enter_context(BootstrapServer.start(LOOPBACK, chosen))
    for one in make_instance()[:num_registered]:
        keeper = RegistrationKeeper(one, [server.address], chosen).start()
        stack.callback(keeper.close)
        keeper.wait_registered(PATIENCE_S)
    return server


def inspected(capsys: pytest.CaptureFixture[str], server: BootstrapServer, *options: str) -> Any:
    assert command.main(["inspect", str(server.address), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_says_who_is_registered_and_who_owns_what(
    stack: contextlib.ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_instance()
    said = inspected(capsys, serve(stack, 2))
    (instance,) = said["instances"]
    assert (instance["name"], instance["ready"], instance["not_ready"]) == (first.instance, True, "")
    assert instance["protocol"] == str(PROTOCOL)
    assert instance["num_ranks"] == 2
    assert [one["worker_id"] for one in instance["workers"]] == [first.rank.worker_id, second.rank.worker_id]
    assert [one["incarnation"] for one in instance["workers"]] == [first.rank.incarnation, second.rank.incarnation]
    for one in instance["workers"]:
        assert 0 < one["lease_left_s"] <= said["lease_s"]
        assert one["transports"] == list(first.rank.transports)
    owners = instance["components"]["latent"]["owners"]
    for one in (first, second):
        for layer in one.rank.owned["latent"]:
            assert owners[str(layer)] == [one.rank.worker_id]
    assert all(one["without_owner"] == [] for one in instance["components"].values())


def test_an_instance_that_is_not_whole_is_shown_with_what_it_lacks(
    stack: contextlib.ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    _, second = make_instance()
    server = serve(stack, 1)
    (instance,) = inspected(capsys, server)["instances"]
    assert not instance["ready"]
    assert instance["not_ready"].startswith(f"instance {second.instance!r} is not ready")
    assert instance["components"]["latent"]["without_owner"] == list(second.rank.owned["latent"])
    assert command.main(["inspect", str(server.address)]) == 0
    out = capsys.readouterr().out
    assert "NOT READY, 1 of 2 ranks" in out
    assert MISSING in out.splitlines()[-2]


def test_an_empty_bootstrap_and_an_unknown_instance(
    stack: contextlib.ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(stack, 0)
    assert inspected(capsys, server)["instances"] == []
    assert command.main(["inspect", str(server.address), "--instance", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
    with pytest.raises(UnknownInstance):
        look(server.address, Access(Settings()), PATIENCE_S, "nobody")


def test_the_token_is_asked_for_and_shown_nowhere(
    stack: contextlib.ExitStack, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    server = serve(stack, 2, token_file=str(file), control_curve="on")
    assert command.main(["inspect", str(server.address)]) != 0
    assert "token" in capsys.readouterr().err
    with_token = ("--set", f"token_file={file}")
    said = json.dumps(inspected(capsys, server, *with_token))
    assert command.main(["inspect", str(server.address), *with_token]) == 0
    shown = capsys.readouterr().out
    view = look(server.address, Access(load_settings({}, token_file=str(file))), PATIENCE_S)
    packed = pack_directory(view)
    for text in (said.encode(), shown.encode(), packed):
        assert TOKEN.encode() not in text
        assert b"hello" not in text  # what a transport needs is nobody else's business


@pytest.mark.slow
def test_it_goes_on_until_it_is_told_to_stop(stack: contextlib.ExitStack) -> None:
    server = serve(stack, 1)
    run = [sys.executable, "-m", "pdlink", "inspect", str(server.address), "--watch", "--interval", "0.1", "--json"]
    with started(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        for _ in range(3):
            assert len(json.loads(child.stdout.readline())["instances"]) == 1
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_S)
        assert (child.returncode, err) == (130, "interrupted\n")


def view_of(kind: PlanKind, owned: list[dict[str, tuple[int, ...]]], num_layers: int) -> InstanceView:
    layout, sizes = make_layout(num_layers), ParallelSizes(cp=len(owned))
    workers = tuple(
        WorkerView(f"w{number}", 1, rank, owned[number], Address("10.0.0.1", 1), ("ipc",), 0, 0, False, 1.0)
        for number, rank in enumerate(sizes.ranks())
    )
    kinds = dict.fromkeys(("latent", "index_k"), kind)
    return InstanceView("i", 1, "", PROTOCOL, layout, sizes, kinds, workers)


def test_the_map_has_a_mark_for_each_layer_and_rank() -> None:
    rows = ownership(view_of(PlanKind.SPLIT, [{"latent": (0, 1, 2)}, {"latent": (2, 4)}], 6), "latent")
    assert [row.split()[-1] for row in rows[1:3]] == ["###...", "..#.#."]
    assert rows[3].strip() == f"{TWICE}{MISSING} {MISSING}"
    assert rows[3].index(TWICE) == rows[1].index("###") + 2


def test_of_replicas_several_owners_are_no_fault() -> None:
    every = {"latent": tuple(range(4))}
    assert len(ownership(view_of(PlanKind.REPLICATED, [every, every], 4), "latent")) == 3


def test_more_layers_than_places_share_them() -> None:
    layout, sizes = make_layout(100), ParallelSizes(cp=3)
    plan = LayerPlan.balanced(layout, sizes)
    rows = ownership(view_of(PlanKind.SPLIT, [plan.owned[rank] for rank in sizes.ranks()], 100), "latent")
    marks = [row.split()[-1] for row in rows[1:]]
    assert [len(one) for one in marks] == [50, 50, 50]
    assert "+" in "".join(marks)


@pytest.mark.parametrize(
    "damage",
    [
        lambda one: one.instances[0].workers[0].ClearField("worker_id"),
        lambda one: one.instances[0].ClearField("layout"),
        lambda one: one.instances[0].workers[0].transports.extend("x" * 40),
    ],
)
def test_an_answer_that_cannot_be_is_refused(stack: contextlib.ExitStack, damage: Any) -> None:
    view = look(serve(stack, 1).address, Access(Settings()), PATIENCE_S)
    message = pb.LookResponse.FromString(pack_directory(view))
    assert unpack_directory(message) == view
    damage(message)
    with pytest.raises(FrameError):
        unpack_directory(message)
