"""The committed protobuf code is what `make proto` makes of `proto/`, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import processes
from tests.house.tree import GENERATED, REPO

GENERATE = REPO / "proto" / "generate.py"


def generated(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*_pb2*.py*")) if path.is_file()}


def run_generate(script: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), "--out", str(out)]
    return processes.run(command)


def test_the_committed_code_does_not_drift_from_the_protos(tmp_path: Path) -> None:
    done = run_generate(GENERATE, tmp_path)
    assert done.returncode == 0, done.stderr
    made, committed = generated(tmp_path / "pdlink" / "v1"), generated(GENERATED)
    assert made, "the compiler wrote nothing"
    assert sorted(made) == sorted(committed), "run `make proto`, and delete what has no .proto any more"
    drifted = [name for name in made if made[name] != committed[name]]
    assert drifted == [], "run `make proto` and commit the result"


def test_every_proto_of_the_package_is_generated(tmp_path: Path) -> None:
    protos = sorted((REPO / "proto" / "pdlink" / "v1").glob("*.proto"))
    assert protos, "no .proto file under proto/pdlink/v1"
    assert {f"{path.stem}_pb2.py" for path in protos} <= set(generated(GENERATED))


def test_a_folder_without_protos_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "proto" / "generate.py"
    script.parent.mkdir()
    script.write_bytes(GENERATE.read_bytes())
    done = run_generate(script, tmp_path / "out")
    assert done.returncode == 1
    assert "no .proto file under" in done.stderr


def test_a_proto_that_does_not_compile_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "proto" / "generate.py"
    script.parent.mkdir()
    script.write_bytes(GENERATE.read_bytes())
    (script.parent / "broken.proto").write_text('syntax = "proto3";\nmessage M { int32 x = }\n')
    done = run_generate(script, tmp_path / "out")
    assert done.returncode == 1
    assert "broken.proto:2" in done.stderr
