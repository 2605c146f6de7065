"""Owns how `pdlink/v1` is made from `proto/pdlink/v1`: which files, by which compiler, in which order.

It writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py`, and decides nothing about the messages. `make proto` runs it on
the checkout; the tests run it into an empty folder and compare.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
REPO_ROOT = PROTO_ROOT.parent
ENDINGS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def find_protos(proto_root: Path = PROTO_ROOT) -> list[Path]:
    """The `.proto` files under `proto_root`, relative to it, sorted. Raises `SystemExit` when there are none."""
    protos = sorted(path.relative_to(proto_root) for path in proto_root.rglob("*.proto"))
    if not protos:
        raise SystemExit(f"error: no .proto file under {proto_root}")
    return protos


def generate(out: Path, proto_root: Path = PROTO_ROOT) -> list[Path]:
    """Write the Python code of every proto under `out` and return the files written, relative to `out`.

    Raises `SystemExit` when there is no proto or the compiler refuses one; its own words are on stderr then.
    """
    protos = find_protos(proto_root)
    out.mkdir(parents=True, exist_ok=True)
    outputs = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto_root}", *outputs, *map(str, protos)]
    done = subprocess.run(command, cwd=proto_root, check=False)
    if done.returncode:
        raise SystemExit(f"error: protoc refused the files under {proto_root} (exit {done.returncode})")
    stems = [proto.with_suffix("") for proto in protos]
    return [stem.with_name(stem.name + ending) for stem in stems for ending in ENDINGS]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the protobuf code of pdlink.")
    where = "folder that gets pdlink/v1/ (default: the checkout)"
    parser.add_argument("--out", type=Path, default=REPO_ROOT, help=where)
    for path in generate(parser.parse_args().out.resolve()):
        print(path)


if __name__ == "__main__":
    main()
