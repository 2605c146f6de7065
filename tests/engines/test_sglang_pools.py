"""The layer ids of sglang pools, and the transports that reach them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdlink.backends.ipc import IpcBackend
from pdlink.errors import LayoutError
from pdlink.layout.regions import MemoryKind, Region
from pdlink_engines.sglang.components import DsaModel, HeadsModel
from pdlink_engines.sglang.layer_ids import LayerIds, layer_ids_of
from pdlink_engines.sglang.offers import offered

WAIT_S = 60.0


class DType:
    itemsize = 2

    def __str__(self) -> str:
        return "torch.bfloat16"


class MLATokenToKVPool:
    """What is read of sglang's pool of that name."""

    start_layer, layer_num, device = 0, 3, "cuda"
    kv_cache_dim, dtype, store_dtype = 576, DType(), DType()
    kv_scale_buffer = None


class MHATokenToKVPool:
    start_layer, layer_num, device = 0, 2, "cpu"
    head_num, head_dim, v_head_dim, kv_cache_layout = 4, 16, 8, "nhd"
    dtype, store_dtype, k_scale_buffer = DType(), DType(), None


def test_ids_of_an_mla_pool_are_its_layers_and_its_draft_follows() -> None:
    ids = layer_ids_of(MLATokenToKVPool(), MLATokenToKVPool(), 3)
    assert isinstance(ids, LayerIds)
    assert ids == [0, 1, 2, 3, 4, 5]
    draft = {"num_draft_layers": 3, "draft_latent_bytes_per_token": 1152, "draft_dtype": "bfloat16"}
    assert ids.facts.model == DsaModel(3, (), 1152, **draft)
    assert ids.facts.memory is MemoryKind.CUDA


def test_ids_of_a_pool_of_heads_are_those_of_k_then_of_v() -> None:
    ids = layer_ids_of(MHATokenToKVPool(), None, 0)
    assert ids == [0, 1, 0, 1]
    assert ids.facts.model == HeadsModel(2, 4, 32, 16)
    assert (ids.facts.memory, ids.facts.is_split) == (MemoryKind.HOST, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_layout": "hnd"}, "kv_cache_layout 'hnd'"),
        ({"k_scale_buffer": object()}, "k_scale_buffer"),
        ({"start_layer": 2}, "pipeline stages"),
    ],
)
def test_a_pool_that_cannot_be_described_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    pool = MHATokenToKVPool()
    for name, value in change.items():
        setattr(pool, name, value)
    with pytest.raises(LayoutError, match=words):
        layer_ids_of(pool, None, 0)


def test_a_strange_pool_and_a_draft_of_heads_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="KV pool DType cannot be described"):
        layer_ids_of(DType(), None, 0)
    with pytest.raises(LayoutError, match="draft pool MHATokenToKVPool"):
        layer_ids_of(MHATokenToKVPool(), MHATokenToKVPool(), 4)


def test_transports_that_cannot_reach_a_private_pool_are_not_named_and_the_setting_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    private = np.zeros(4096, dtype=np.uint8)
    backend = IpcBackend()
    try:
        backend.register(Region("kv", 0, private.ctypes.data, 4096, 4096, 1))
        assert offered({"ipc": backend}) == []
    finally:
        backend.close()
    assert "PDLINK_BACKENDS=ipc,nixl" in caplog.text
