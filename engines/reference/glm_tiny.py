"""Owns `glm-dsa-tiny`: the GLM MoE DSA architecture at a size that runs in milliseconds, with seeded weights.

It keeps what matters for a cache: a compressed latent row, an indexer that chooses few tokens, layers that share the
choice of an earlier one, a dense layer before the layers with experts, and seven layers, which no small number of
ranks divides.

Runs that round differently must come to the same choices (next token, indexer, router), or their logits part for good.
So the weights are scaled to keep choices apart, and the network runs in float64: what little noise is left comes from
the few steps that the architecture itself does in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlink_engines.reference.shapes import CacheShape
from pdlink_engines.reference.tokens import BEGIN, END, VOCAB_SIZE, ByteTokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

NAME = "glm-dsa-tiny"
INDEXERS = ("full", "full", "shared", "full", "shared", "shared", "full")
INDEX_TOPK = 16
NUM_HEADS = 4
LATENT_RANK = 48
ROPE_DIMS = 16
INDEX_DIMS = 32
SEED = 20

SHAPE = CacheShape(
    num_layers=len(INDEXERS),
    dtype="float64",
    latent_dims=LATENT_RANK + ROPE_DIMS,
    index_dims=INDEX_DIMS,
    index_layers=tuple(layer for layer, kind in enumerate(INDEXERS) if kind == "full"),
)
STOP_TOKENS: frozenset[int] = frozenset()
"""None: with random weights the end mark means nothing, and a generation should reach its length."""


def prepare() -> None:
    """Nothing to prepare: the weights are made from a seed."""


def load() -> tuple[PreTrainedModel, ByteTokenizer]:
    """Build the network in float64; two builds have equal bits."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    network = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**_config())).double()
    # Fused expert kernels order their sums by how many tokens share an expert; the plain loop does not.
    network.set_experts_implementation("eager")
    _seed_weights(network)
    return network, ByteTokenizer()


def _config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "hidden_size": 96,
        "intermediate_size": 192,
        "moe_intermediate_size": 48,
        "num_hidden_layers": len(INDEXERS),
        "first_k_dense_replace": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "kv_lora_rank": LATENT_RANK,
        "q_lora_rank": 48,
        "qk_rope_head_dim": ROPE_DIMS,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "index_topk": INDEX_TOPK,
        "index_head_dim": INDEX_DIMS,
        # Many heads, or several tokens on which none is positive would share the score 0.
        "index_n_heads": 32,
        "indexer_types": list(INDEXERS),
        "max_position_embeddings": 8192,
        "attn_implementation": "sdpa",
    }


def _seed_weights(network: PreTrainedModel) -> None:
    """Fill every parameter from one generator, in the order of names, so that no library's own init matters."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in sorted(network.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(_scaled(name, noise))


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise
    per_input = noise * float(noise.shape[-1] ** -0.5)
    if "lm_head" in name:
        gain = noise.new_full((len(noise), 1), 0.5)
        gain[ord(" ") : ord("~") + 1] = 4.0  # next tokens far apart, and printable
        return gain * per_input
    if "mlp.gate.weight" in name:
        return 2.0 * per_input  # experts far apart
    if "o_proj" in name or "down_proj" in name:
        return 0.5 * per_input  # each layer adds to the stream without drowning it
    return per_input
