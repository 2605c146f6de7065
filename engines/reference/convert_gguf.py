"""Owns the one conversion of a GGUF file to a folder of float32 safetensors and a tokenizer. Run as a program."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def convert(weights: Path, folder: Path) -> None:
    """Read `weights` through transformers and write config, weights and tokenizer to `folder`, which is made."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    folder.mkdir(parents=True)
    # The network itself refuses to save: it counts as quantised. What it holds is plain float32 by now.
    config = network.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(network).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    # named_parameters names a shared tensor once, as the file format wants it.
    tensors = {name: weight.detach().contiguous() for name, weight in network.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
