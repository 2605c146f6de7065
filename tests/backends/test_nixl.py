"""What the nixl backend decides by itself, and how a process that has loaded nixl ends."""

import json
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.backends import nixl_endpoint, nixl_engine, nixl_pieces
from pdlink.backends.nixl_endpoint import RegionTable, pack, unpack
from pdlink.backends.nixl_engine import translate
from pdlink.backends.nixl_pieces import Indexed, PieceCutter
from pdlink.errors import BackendError, BackendUnavailable, PeerGone, RegionError
from pdlink.layout import MemoryKind, Region
from pdlink.transfer.descriptors import GroupMove, LayerTable, PageRuns, PullBatch, pair_pages
from tests import processes
from tests.transfer.values import Pair, make_layout


def region(base=4096, pages=8, nbytes=64, gap=0, layer=0, **more):
    return Region("latent", layer, base, nbytes + gap, nbytes, pages, **more)


# --- endpoints ------------------------------------------------------------------------------------


def test_an_endpoint_carries_metadata_and_regions():
    table = RegionTable.of([region(1 << 40, 5, gap=8), region(4096, 3)])
    metadata, found = unpack(pack(b"\x00meta\xff", table), "w0")
    assert metadata == b"\x00meta\xff"
    assert found.base.tolist() == [4096, 1 << 40]
    assert found.spans.tolist() == table.spans.tolist()
    assert found.first.tolist() == [0, 3]
    assert found.kinds == (MemoryKind.HOST,)
    assert found.cuda_device is None


def test_an_endpoint_of_a_rank_without_regions_is_as_good():
    metadata, found = unpack(pack(b"m", RegionTable.of([])), "w0")
    assert metadata == b"m"
    assert found.spans.shape == (0, 2)


MIXED = [
    region(4096, 3),
    region(1 << 30, 4, memory=MemoryKind.CUDA, device=1),
    region(1 << 31, 5),
    region(1 << 32, 6, memory=MemoryKind.CUDA, device=2),
]


def test_memory_of_several_kinds_has_one_prepared_list_for_each():
    _, found = unpack(pack(b"m", RegionTable.of(MIXED)), "w0")
    assert set(found.kinds) == set(MemoryKind)
    assert found.first.tolist() == [0, 0, 3, 4]  # counted within the list of its kind
    assert [row[2:] for row in found.strided_rows(MemoryKind.HOST).tolist()] == [[0, 64, 3], [0, 64, 5]]
    assert [row[2:] for row in found.strided_rows(MemoryKind.CUDA).tolist()] == [[1, 64, 4], [2, 64, 6]]
    assert found.cuda_device == 1


def test_an_endpoint_with_memory_of_an_unknown_kind_is_refused():
    table = RegionTable.of(MIXED)
    for kind in (-1, 2):
        with pytest.raises(BackendUnavailable, match="unknown kind"):
            unpack(pack(b"m", replace(table, kind=table.kind * 0 + kind)), "w0")


def test_more_regions_than_an_endpoint_holds_are_refused():
    noise = np.random.default_rng(1)
    bases = np.cumsum(noise.integers(1 << 30, 1 << 45, 9000)).tolist()
    with pytest.raises(RegionError, match="larger regions"):
        pack(noise.bytes(1000), RegionTable.of(region(base) for base in bases))


GOOD = pack(b"metadata", RegionTable.of([region()]))


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"pdlink-nixl/1\n" + GOOD[14:],
        GOOD[:-3],
        nixl_endpoint.MAGIC + nixl_endpoint.zlib.compress(b"\xff" * 20),
        nixl_endpoint.MAGIC + nixl_endpoint.zlib.compress(bytes(8 << 20)),
        GOOD + bytes(64 << 10),
    ],
)
def test_an_endpoint_that_cannot_be_read_is_refused(blob):
    with pytest.raises(BackendUnavailable, match="w7 offers a nixl endpoint that cannot be read"):
        unpack(blob, "w7")


@given(st.binary(max_size=200))
def test_no_endpoint_raises_anything_else(noise):
    for blob in (noise, nixl_endpoint.MAGIC + noise, nixl_endpoint.MAGIC + nixl_endpoint.zlib.compress(noise)):
        with pytest.raises(BackendUnavailable):
            unpack(blob, "w0")


# --- pieces ---------------------------------------------------------------------------------------


def addresses(table, index):
    """(address, nbytes) of entries of a prepared list, as nixl counts them: region by region, page by page."""
    rows = []
    for base, nbytes, _, stride, count in table.strided_rows(MemoryKind.HOST).tolist():
        rows += [(base + page * stride, nbytes) for page in range(count)]
    return [rows[one] for one in index]


@given(
    pages=st.lists(st.integers(0, 63), unique=True, min_size=1, max_size=64),
    gap=st.sampled_from([0, 16]),
    most=st.integers(1, 40),
    sliced=st.booleans(),
)
def test_pieces_are_bounded_and_move_what_the_batch_moves(pages, gap, most, sliced):
    pair = Pair.of(make_layout(4), gap=gap)
    (batch, _) = pair.pull_all({"kv": pages}, {"kv": pages[::-1]})
    if sliced:
        (move,) = batch.moves
        layers = replace(move.layers, page_bytes=move.layers.page_bytes - 4)
        batch = PullBatch(batch.worker_id, (replace(move, layers=layers),))
    own, theirs = RegionTable.of(pair.destination), RegionTable.of(pair.sources[0].regions)
    if not sliced:  # nixl merges by itself: a piece lists single pages
        (move,) = batch.moves
        wanted = rows_of(PullBatch(batch.worker_id, (replace(move, runs=move.runs.split()),)))
    else:
        wanted = rows_of(batch)
    moved = []
    before = nixl_pieces.MAX_DESCRIPTORS
    nixl_pieces.MAX_DESCRIPTORS = most
    try:
        for piece in PieceCutter(theirs, batch.worker_id).pieces(batch, own):
            assert len(piece.own) == len(piece.theirs) <= most
            assert isinstance(piece, Indexed) is not sliced
            if isinstance(piece, Indexed):
                ends = zip(addresses(theirs, piece.theirs), addresses(own, piece.own), strict=True)
                moved += [(one[0], other[0], one[1]) for one, other in ends]
            else:
                moved += zip(
                    piece.theirs[:, 0].tolist(), piece.own[:, 0].tolist(), piece.own[:, 1].tolist(), strict=True
                )
    finally:
        nixl_pieces.MAX_DESCRIPTORS = before
    assert sorted(moved) == sorted(wanted)


def rows_of(batch):
    """(source, destination, nbytes) of everything that the batch moves."""
    rows = []
    for plain in batch.expand():
        rows += zip(plain.source.tolist(), plain.destination.tolist(), plain.nbytes.tolist(), strict=True)
    return rows


@pytest.mark.parametrize(("step", "largest"), [(2, nixl_pieces.MAX_DEVICE_DESCRIPTORS), (1, 2 * 4096)])
def test_scattered_pages_between_devices_are_posted_as_the_driver_queues_them(step, largest):
    own, theirs = (
        RegionTable.of([region(1 << (30 + layer), 8192, memory=MemoryKind.CUDA, device=one) for layer in (0, 1)])
        for one in (0, 1)
    )
    at = np.arange(0, 4096 * step, step, dtype=np.int64)
    base, size = own.base, np.full(2, 64)
    table = LayerTable(np.arange(2), base, size, base, size, size)
    batch = PullBatch("w", (GroupMove("kv", pair_pages(at, at), table),))
    lengths = [len(one.own) for one in PieceCutter(theirs, "w").pieces(batch, own)]
    assert sum(lengths) == 2 * 4096
    assert max(lengths) == largest


def test_layers_that_come_again_are_looked_up_anew_once_own_memory_has_changed():
    theirs = RegionTable.of([region(1 << 20, 8)])
    few, more = (RegionTable.of(map(region, bases, [8] * len(bases))) for bases in ([1 << 30], [1 << 29, 1 << 30]))
    columns = ([0], [1 << 20], [64], [1 << 30], [64], [64])
    move = GroupMove("kv", PageRuns(*map(np.array, ([2], [3], [1]))), LayerTable(*map(np.array, columns)))
    cutter = PieceCutter(theirs, "w")
    for own, first in ((few, 0), (few, 0), (more, 8), (few, 0)):
        (piece,) = cutter.pieces(PullBatch("w", (move,)), own)
        assert (piece.own.tolist(), piece.theirs.tolist()) == ([first + 3], [2])
    with pytest.raises(RegionError, match="no registered region"):
        cutter.pieces(PullBatch("w", (move,)), RegionTable.of([region(1 << 29, 8)]))


@pytest.mark.parametrize("short", [0, 4], ids=["whole pages", "parts of pages"])
def test_every_piece_stays_within_one_kind_of_memory_on_either_side(short):
    own = RegionTable.of([*MIXED[:2], region(1 << 33, 8, memory=MemoryKind.CUDA, device=1)])
    theirs = RegionTable.of(MIXED)
    to = [4096, 1 << 30, 1 << 33]
    at = [1 << 32, 1 << 30, 1 << 31]
    table = LayerTable(*(np.array(one) for one in ([0, 1, 2], at, [64] * 3, to, [64] * 3, [64 - short] * 3)))
    runs = PageRuns(np.array([0]), np.array([1]), np.array([2]))
    if short:
        runs = runs.split()
    found = list(PieceCutter(theirs, "w0").pieces(PullBatch("w0", (GroupMove("kv", runs, table),)), own))
    kinds = [(one.own_memory.value, one.their_memory.value) for one in found]
    assert sorted(kinds) == [("cuda", "cuda"), ("cuda", "host"), ("host", "cuda")]
    by_kinds = dict(zip(kinds, found, strict=True))
    if not short:
        assert by_kinds["host", "cuda"].own.tolist() == [1, 2]
        assert by_kinds["host", "cuda"].theirs.tolist() == [4, 5]  # after the four pages of device 1
        assert by_kinds["cuda", "host"].own.tolist() == [5, 6]
        assert by_kinds["cuda", "host"].theirs.tolist() == [3, 4]
    else:
        assert by_kinds["host", "cuda"].own.tolist() == [[4096 + 64, 60, 0], [4096 + 128, 60, 0]]
        assert by_kinds["host", "cuda"].theirs.tolist() == [[1 << 32, 60, 2], [(1 << 32) + 64, 60, 2]]
        assert by_kinds["cuda", "cuda"].own[:, 2].tolist() == [1, 1]


# --- the library ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nixlRemoteDisconnectError", PeerGone),
        ("nixlNotFoundError", RegionError),
        ("nixlInvalidParamError", RegionError),
        ("nixlBackendError", BackendError),
        ("nixlMismatchError", BackendError),
    ],
)
def test_an_error_of_nixl_becomes_one_of_ours_with_its_name_and_text(name, kind):
    error = translate(type(name, (Exception,), {})("NIXL_ERR_SOMETHING"), "read pages", "w3")
    assert type(error) is kind
    assert f"{name} (NIXL_ERR_SOMETHING)" in str(error)
    assert "read pages" in str(error)


def test_an_error_of_anybody_else_stays_what_it_is():
    error = ValueError("a bug")
    assert translate(error, "read pages") is error


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl_engine, "PACKAGES", ("a_nixl_that_nobody_has",))
    with pytest.raises(BackendUnavailable, match=r"pip install 'pdlink\[nixl-cu12\]'"):
        nixl_engine.library.__wrapped__()


def run(code, **env):
    command = [sys.executable, "-c", code]
    return processes.run(command, env={**nixl_engine.os.environ, **env})


OPEN = "from pdlink.backends.registry import open_backends\nbackend = open_backends('nixl')['nixl']\n"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("backend.close()", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError('theirs')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGHUP)", -1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import atexit; atexit.register(print, 'said at exit')", 0),
    ],
)
def test_a_process_that_has_loaded_it_ends_as_it_wants(ending, code):
    done = run(OPEN + "backend.endpoint()\n" + ending)
    assert done.returncode == code, done.stderr
    assert ("said at exit" in done.stdout) is ("said at exit" in ending)
    assert done.stdout.replace("said at exit", "").strip() == "", "nixl and UCX write to standard output"


def test_transports_that_cannot_start_are_an_error_that_names_them():
    done = run("from pdlink.backends.registry import open_backends\nopen_backends('nixl')", UCX_TLS="shm,cma,self")
    assert "BackendUnavailable: nixl failed to start an agent over UCX" in done.stderr
    assert "UCX_TLS=shm,cma,self (on a machine with GPUs it must let cuda_copy in)" in done.stderr


def test_auto_leaves_it_out_when_it_cannot_start():
    done = run(
        "from pdlink.backends.registry import open_backends\nprint(*open_backends('auto'))", UCX_TLS="shm,cma,self"
    )
    assert "ipc" in done.stdout
    assert "nixl" not in done.stdout


def test_an_agent_that_something_still_holds_is_not_said_to_be_gone():
    code = """
from pdlink.backends.nixl_engine import Agent
from pdlink.errors import BackendError
agent = Agent()
holder = agent.call("be held", lambda nixl: nixl.agent)
for _ in range(2):
    try:
        agent.destroy()
    except BackendError as error:
        print("refused:", error)
del holder
agent.destroy()
agent.destroy()
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is still in use, so it cannot be taken down") == 2


REACHED = """
import json, os, psutil, sys
from pdlink.backends.registry import open_backends
from pdlink.config import load_settings
backend = open_backends("nixl", load_settings(bind_host=sys.argv[1]))["nixl"]
backend.endpoint()
listening = [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
print(json.dumps([listening, os.environ.get("UCX_NET_DEVICES")]))
backend.close()
"""


def reached(host: str, **env: str) -> tuple[set[str], str | None]:
    """Where UCX listens in a process whose control sockets bind `host`, and the devices that it was given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    ended = processes.run(
        [sys.executable, "-c", REACHED, host], check=True, env={**clean, "UCX_TLS": "tcp,self,cuda_copy", **env}
    )
    listening, devices = json.loads(ended.stdout)
    return set(listening), devices


def test_ucx_is_reached_over_loopback_only_where_pdlink_is():
    assert reached("127.0.0.1") == ({"127.0.0.1"}, "lo")


def test_another_bind_host_leaves_the_devices_to_ucx():
    assert reached("192.0.2.1")[1] is None


def test_the_operators_choice_of_devices_stays():
    assert reached("127.0.0.1", UCX_NET_DEVICES="all")[1] == "all"
