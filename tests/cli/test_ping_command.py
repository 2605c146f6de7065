"""`pdlink ping`: it measures what works, names what does not, and reads pages without writing any."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest

from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.cli import main as command
from pdlink.cli.ping_rank import Path
from tests.backends.needs import nixl_missing
from tests.bootstrap.values import make_instance
from tests.link.rig import Site, make_layout
from tests.processes import PATIENCE_S
from tests.sidecar.rig import Rig, folder_for_sockets

needs_nixl = pytest.mark.skipif(bool(nixl_missing()), reason=nixl_missing())
IPC = ("--set", "backends=ipc", "--json")


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(stack, backends="ipc")


def pinged(capsys: pytest.CaptureFixture[str], site: Site, *options: str, code: int = 0) -> tuple[Any, str]:
    assert command.main(["ping", str(site.bootstrap.address), *IPC, *options]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.backend("ipc")
def test_every_rank_answers_on_its_control_path_and_over_the_transport(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = site.prefill(make_layout(4), 2)
    for owner in owners:
        owner.open("t", {"kv": list(range(16))})
    said, _ = pinged(capsys, site, "--count", "3", "--timeout", str(PATIENCE_S))
    names = [owner.worker.rank.worker_id for owner in owners]
    assert [(one["worker_id"], one["path"]) for one in said["paths"]] == [
        (name, path) for name in names for path in ("control", "ipc")
    ]
    for one in said["paths"]:
        assert one["ok"], one
        assert 0 < one["p50_s"] <= one["p99_s"] <= one["max_s"]
    assert said["paths"][1]["num_bytes"] > 0
    assert [owner.pool.find_wrong("t", {"kv": list(range(16))}) for owner in owners] == [None, None]


@pytest.mark.backend("ipc")
def test_one_rank_may_be_named_and_one_that_owns_nothing_is_not_read(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = site.prefill(make_layout(1), 2)
    idle = owners[1].worker.rank.worker_id
    said, _ = pinged(capsys, site, "--worker", idle, "--count", "1", "--timeout", str(PATIENCE_S))
    control, data = said["paths"]
    assert (control["worker_id"], control["ok"]) == (idle, True)
    assert (data["ok"], data["error"]) == (False, "")
    assert "owns nothing" in data["skipped"]
    assert command.main(["ping", str(site.bootstrap.address), "--worker", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


@pytest.mark.slow
@needs_nixl
@pytest.mark.backend("nixl-tcp")
def test_of_a_rank_in_a_sidecar_that_is_read_whose_transport_may_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    with folder_for_sockets() as folder, contextlib.ExitStack() as stack:
        rig = Rig(stack, FilePath(folder), "ipc,nixl")
        rig.prefill(rig.connect(rig.sidecar("pre.sock")))
        options = ("--set", "backends=ipc,nixl", "--count", "3", "--timeout", str(PATIENCE_S), "--json")
        assert command.main(["ping", str(rig.bootstrap.address), *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(one["path"], one["ok"]) for one in said["paths"]] == [("control", True), ("ipc", True), ("nixl", True)]
    assert said["paths"][1]["num_bytes"] == said["paths"][2]["num_bytes"] > 0


def test_a_rank_that_does_not_answer_is_named_and_ends_in_code_1(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as stack:
        for one in make_instance():
            keeper = RegistrationKeeper(one, [site.bootstrap.address], site.settings).start()
            stack.callback(keeper.close)
            keeper.wait_registered(PATIENCE_S)
        said, err = pinged(capsys, site, "--count", "1", "--timeout", "0.2", code=1)
    control = [one for one in said["paths"] if one["path"] == "control"]
    assert all("no answer at 127.0.0.1:90" in one["error"] for one in control)
    assert "paths do not work" in err
    assert all(one["error"] or one["skipped"] for one in said["paths"])


def test_without_an_instance_there_is_nobody_to_ping(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ping", str(site.bootstrap.address)]) == 2
    assert "lists 0 prefill instances" in capsys.readouterr().err


def test_quantiles_are_of_the_nearest_rank() -> None:
    path = Path("w", "control", tuple(float(one) for one in range(100, 0, -1)))
    assert [path.quantile(share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
