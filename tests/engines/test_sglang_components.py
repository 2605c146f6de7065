"""What sglang hands a transfer backend becomes layout values without loss, and anything else is refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdlink.bootstrap.wire import pack_layers, pack_layout, pack_regions, unpack_layers, unpack_layout, unpack_regions
from pdlink.errors import LayoutError
from pdlink.layout.fingerprint import compare, fingerprint
from pdlink.layout.layer_plan import LayerPlan, PlanKind, find_faults
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.regions import MemoryKind, check_region
from pdlink_engines.sglang.components import INDEX_PAGES, KV_PAGES, DsaModel, SglangCache, cache_layout, translate
from tests import processes

RECORDING = Path(__file__).parent.parent / "fixtures" / "engines" / "sglang-0.5.23.json"
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads(RECORDING.read_text())["cases"]}
WHOLE = [name for name in CASES if name != "decode-kpool-tail"]
SPLIT = [f"cp{size}-rank{rank}{tail}" for size in (2, 3) for rank in range(size) for tail in ("", "-shared-draft")]


def kv_args(name: str) -> SimpleNamespace:
    """The recorded `KVArgs`, its lists fresh for each test."""
    return SimpleNamespace(**json.loads(json.dumps(CASES[name]["kv_args"])))


def model_of(name: str) -> DsaModel:
    """What an engine knows of the recorded model. Layers 1, 3 and 4 of the `shared` ones have no index keys."""
    facts = CASES[name]["facts"]
    shared = (1, 3, 4) if "shared" in name else ()
    drafts = 2 if "draft2" in name else 1 if "draft" in name else 0
    return DsaModel(
        num_layers=facts["num_hidden_layers"],
        index_layers=tuple(layer for layer in range(facts["num_hidden_layers"]) if layer not in shared),
        latent_bytes_per_token=facts["kv_row_bytes"],
        num_draft_layers=drafts,
        draft_index_layers=tuple(range(drafts)),
    )


def cache_of(name: str) -> SglangCache:
    first = 0 if CASES[name]["facts"]["role"] == "decode" else None
    return translate(kv_args(name), model_of(name), memory=MemoryKind.HOST, first_layer=first)


def rebuild(cache: SglangCache) -> dict[str, Any]:
    """sglang's lists from layout values alone. A 0-row place holder is (0, 0, 0)."""
    places = {(one.component, one.layer): one for one in cache.regions}
    drafts = [("draft.latent", layer) for layer in cache.owned.get("draft.latent", ())]
    latents = [("latent", layer) for layer in cache.owned["latent"]] + drafts
    index = [(name.replace("latent", "index_k"), layer) for name, layer in latents]
    assert set(index) == {key for key in places if "index_k" in key[0]} | set(cache.elided)

    def lists(keys: list[tuple[str, int]]) -> tuple[list[int], list[int], list[int]]:
        rows = [places.get(key) for key in keys]
        return (
            [one.base_address if one else 0 for one in rows],
            [one.num_pages * one.page_stride if one else 0 for one in rows],
            [one.page_bytes if one else 0 for one in rows],
        )

    kv, state = lists(latents), lists(index)
    return {
        "kv_data_ptrs": kv[0],
        "kv_data_lens": kv[1],
        "kv_item_lens": kv[2],
        "num_draft_entries": len(drafts),
        "page_size": cache.layout.page_group(KV_PAGES).page_size,
        "state_data_ptrs": [state[0]],
        "state_data_lens": [state[1]],
        "state_item_lens": [state[2]],
        "aux_data_ptrs": [one.base_address for one in cache.aux],
        "aux_data_lens": [one.row_bytes * one.num_rows for one in cache.aux],
        "aux_item_lens": [one.row_bytes for one in cache.aux],
    }


@pytest.mark.parametrize("name", WHOLE)
def test_every_list_of_kv_args_can_be_rebuilt_from_components_and_regions(name: str) -> None:
    recorded = CASES[name]["kv_args"]
    rebuilt = rebuild(cache_of(name))
    assert {field: recorded[field] for field in rebuilt} == rebuilt


def test_no_list_of_kv_args_is_left_out_of_the_round_trip() -> None:
    moved = set(rebuild(cache_of("decode")))
    empty = {"kv_layer_ids", "state_layer_ids"}
    for name in WHOLE:
        carried = {field for field in CASES[name]["kv_args"] if field.endswith(("_ptrs", "_lens", "_ids"))}
        hosts = {field for field in carried if CASES[name]["kv_args"][field] is None}
        assert carried - hosts - empty <= moved
        assert not any(CASES[name]["kv_args"]["kv_layer_ids"] + CASES[name]["kv_args"]["state_layer_ids"][0])


@pytest.mark.parametrize("name", WHOLE)
def test_every_pointer_is_the_layer_that_the_pool_says_it_is(name: str) -> None:
    recorded, cache = CASES[name]["kv_args"], cache_of(name)
    lists = {"kv": recorded["kv_data_ptrs"], "state.dsa": recorded["state_data_ptrs"][0]}
    truth = {
        lists[one["list"]][one["position"]]: (one["component"], one["layer"])
        for one in CASES[name]["pointers"]
        if "component" in one
    }
    assert {one.base_address: (one.component, one.layer) for one in cache.regions} == truth


@pytest.mark.parametrize("name", WHOLE)
def test_regions_hold_exactly_the_rows_of_the_pool(name: str) -> None:
    facts, cache = CASES[name]["facts"], cache_of(name)
    start = facts["stage_layers"][0]
    for region in cache.regions:
        check_region(region, cache.layout)
        assert region.is_dense
        if region.component == "latent":
            assert region.num_pages * facts["page_size"] == facts["kv_rows"][region.layer - start]
        if region.component == "index_k":
            assert region.num_pages == facts["index_rows"][region.layer - start]


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_is_lost_on_the_wire(name: str) -> None:
    cache = cache_of(name)
    assert unpack_layout(pack_layout(cache.layout)) == cache.layout
    assert sorted(unpack_regions(pack_regions(cache.regions)), key=str) == sorted(cache.regions, key=str)
    assert unpack_layers(pack_layers(cache.owned)) == cache.owned


def test_layers_that_share_an_indexer_are_reported_and_have_no_region() -> None:
    cache = cache_of("decode-shared-draft")
    assert cache.elided == (("index_k", 1), ("index_k", 3), ("index_k", 4))
    assert cache.owned == {
        "latent": (0, 1, 2, 3, 4),
        "index_k": (0, 2),
        "draft.latent": (0,),
        "draft.index_k": (0,),
    }


def test_a_rank_that_owns_nothing_has_a_layout_and_no_region() -> None:
    cache = cache_of("prefill-cp3-owns-nothing")
    assert cache.regions == ()
    assert cache.owned == {"latent": (), "index_k": ()}
    assert cache.layout == cache_layout(model_of("prefill-cp3-owns-nothing"), page_size=64, dtype="auto")
    assert cache.aux


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tail", ["", "-shared-draft"])
def test_the_ranks_of_a_layer_split_make_one_whole_plan(size: int, tail: str) -> None:
    caches = [cache_of(f"prefill-cp{size}-rank{rank}{tail}") for rank in range(size)]
    layout = caches[0].layout
    assert all(cache.layout == layout for cache in caches)
    owned = {RankCoordinates(cp=rank): cache.owned for rank, cache in enumerate(caches)}
    kinds = {one.name: PlanKind.SPLIT for one in layout.components}
    assert find_faults(layout, LayerPlan(ParallelSizes(cp=size), kinds, owned)) == ()
    assert owned == LayerPlan.balanced(layout, ParallelSizes(cp=size)).owned


@pytest.mark.parametrize("name", [f"prefill-{one}" for one in SPLIT])
def test_prefill_and_decode_of_one_model_have_one_fingerprint(name: str) -> None:
    decode = cache_of("decode-shared-draft" if name.endswith("-draft") else "decode")
    assert compare(fingerprint(cache_of(name).layout), fingerprint(decode.layout)) == ()


def test_an_indexer_page_is_all_keys_and_then_all_scales_under_its_own_page_list() -> None:
    layout = cache_of("decode").layout
    part = layout.component("index_k")
    key, scale = part.field("key"), part.field("scale")
    assert (key.offset, key.bytes_per_token, key.token_stride) == (0, 128, 128)
    assert (scale.offset, scale.bytes_per_token, scale.token_stride) == (64 * 128, 4, 4)
    assert part.page_bytes == CASES["decode"]["kv_args"]["state_item_lens"][0][0] == 64 * 132
    assert [(one.name, one.components) for one in layout.page_groups] == [
        (KV_PAGES, ("latent",)),
        (INDEX_PAGES, ("index_k",)),
    ]


def test_a_draft_shares_the_page_lists_of_its_target() -> None:
    layout = cache_of("decode-fp8-draft2").layout
    assert [(one.name, one.components) for one in layout.page_groups] == [
        (KV_PAGES, ("latent", "draft.latent")),
        (INDEX_PAGES, ("index_k", "draft.index_k")),
    ]
    assert layout.component("latent").dtype == "fp8_e4m3"
    assert layout.component("latent").page_bytes == 64 * 656


def test_aux_is_one_row_of_every_buffer() -> None:
    cache = cache_of("decode")
    assert cache.aux_bytes == sum(CASES["decode"]["kv_args"]["aux_item_lens"])
    assert {one.num_rows for one in cache.aux} == {8}


def test_a_pipeline_stage_keeps_its_global_layers() -> None:
    assert cache_of("prefill-pp-stage").owned == {"latent": (5, 6, 7), "index_k": (5, 6, 7)}


def test_layer_ids_on_both_lists_of_layers_stand_in_for_a_first_layer() -> None:
    args = kv_args("decode-fp8-draft2")
    args.kv_layer_ids = [0, 1, 2, 3, 4, 5, 6]  # the draft's go on from the model's, as sglang numbers them
    assert translate(args, model_of("decode-fp8-draft2"), memory=MemoryKind.HOST) == cache_of("decode-fp8-draft2")


def test_a_host_entry_among_device_entries_keeps_its_memory() -> None:
    args = kv_args("decode")
    args.gpu_id = 3
    args.kv_data_mem_kinds = ["DRAM", "VRAM", "VRAM", "VRAM", "VRAM"]
    cache = translate(args, model_of("decode"), memory=MemoryKind.CUDA, first_layer=0)
    assert [(one.memory, one.device) for one in cache.regions[:2]] == [(MemoryKind.HOST, 0), (MemoryKind.CUDA, 3)]
    assert {one.memory for one in cache.regions[2:]} == {MemoryKind.CUDA}


def refuse(
    name: str, damage: Callable[[SimpleNamespace], None], words: list[str], first_layer: int | None = None
) -> None:
    args = kv_args(name)
    damage(args)
    with pytest.raises(LayoutError) as caught:
        translate(args, model_of(name), memory=MemoryKind.HOST, first_layer=first_layer)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pooled_indexer_with_its_tail_is_refused_by_name() -> None:
    refuse("decode-kpool-tail", lambda args: None, ["'dsa_tail'", "state_types"], first_layer=0)


@pytest.mark.parametrize(
    "kind",
    ["mamba", "swa", "swa_ring", "minimax_index_k", "qsa_pending", "c128_state", "block_scale", "request_row", "new"],
)
def test_any_other_state_kind_is_refused_by_name(kind: str) -> None:
    def damage(args: SimpleNamespace) -> None:
        args.state_types = [kind]

    refuse("decode", damage, [repr(kind)], first_layer=0)


def test_a_layer_is_never_guessed_from_its_position() -> None:
    refuse("decode", lambda args: None, ["kv_layer_ids", "prefill_start_layer", "first_layer"])


def set_field(field: str, value: Any) -> Callable[[SimpleNamespace], None]:
    return lambda args: setattr(args, field, value)


def change(field: str, position: int, amount: int) -> Callable[[SimpleNamespace], None]:
    def damage(args: SimpleNamespace) -> None:
        getattr(args, field)[position] += amount

    return damage


def change_state(field: str, position: int, value: int) -> Callable[[SimpleNamespace], None]:
    def damage(args: SimpleNamespace) -> None:
        getattr(args, field)[0][position] = value

    return damage


def shorten(field: str) -> Callable[[SimpleNamespace], None]:
    return lambda args: getattr(args, field).pop()


LAST = "prefill-cp2-rank1-shared-draft"


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (LAST, shorten("kv_data_lens"), ["kv_data_lens 2", "kv_data_ptrs 3"]),
        (LAST, shorten("kv_item_lens"), ["kv_item_lens 2"]),
        (LAST, shorten("state_data_lens"), ["state_data_lens 0"]),
        (LAST, lambda a: a.state_data_ptrs[0].pop(), ["2, 3 and 3", "'dsa'"]),
        (
            LAST,
            lambda a: [one[0].pop(0) for one in (a.state_data_ptrs, a.state_data_lens, a.state_item_lens)],
            ["2, 2"],
        ),
        (LAST, shorten("aux_item_lens"), ["aux_item_lens 9"]),
        (LAST, set_field("kv_data_mem_kinds", ["VRAM"]), ["kv_data_mem_kinds 1"]),
        (LAST, set_field("kv_data_mem_kinds", ["VRAM", "disk", "VRAM"]), ["'disk'", "kv_data_ptrs[1]"]),
        (LAST, change("kv_item_lens", 0, 1), ["kv_data_ptrs[0]", "73729", "page_size=64"]),
        (LAST, change("kv_item_lens", 0, -64), ["kv_data_ptrs[0]", "73664", "73728"]),
        (LAST, set_field("page_size", 32), ["73728", "36864"]),
        (LAST, set_field("page_size", 100), ["73728", "page_size=100"]),
        (LAST, change("kv_data_lens", 1, 64), ["kv_data_ptrs[1]", "64 more"]),
        (LAST, set_field("num_draft_entries", 0), ["prefill_start_layer 3", "kv_data_ptrs has 3"]),
        (LAST, set_field("num_draft_entries", 2), ["num_draft_entries is 2", "1 draft"]),
        (LAST, set_field("num_draft_entries", 9), ["num_draft_entries is 9"]),
        (LAST, set_field("prefill_start_layer", 2), ["prefill_start_layer 2", "prefill_end_layer 5", "3 layers"]),
        (LAST, set_field("prefill_end_layer", 6), ["prefill_end_layer 6"]),
        (
            LAST,
            lambda a: a.__dict__.update(prefill_start_layer=9, prefill_end_layer=11),
            ["9 to 10", "only 5"],
        ),
        (LAST, set_field("kv_layer_ids", [2, 3, 5]), ["[2, 3]", "[3, 4]"]),
        (LAST, set_field("kv_layer_ids", [3, 4]), ["2 entries", "has 3"]),
        (LAST, set_field("kv_layer_ids", [3, 4, 0]), ["[0]", "[5]"]),
        (LAST, set_field("kv_layer_ids", [4, 3, 5]), ["[4, 3]", "increase"]),
        (LAST, set_field("kv_layer_ids", [3, 3, 5]), ["[3, 3]", "increase"]),
        (LAST, set_field("state_layer_ids", [[3, 4, 5]]), ["state_layer_ids", "[3, 4, 5]"]),
        (LAST, change_state("state_data_lens", 0, 42240), ["state_data_ptrs[0][0]", "index keys", "this is 3"]),
        (
            LAST,
            lambda a: (change_state("state_data_lens", 2, 0)(a), change_state("state_item_lens", 2, 0)(a)),
            ["place holder", "draft.index_k"],
        ),
        (LAST, change_state("state_item_lens", 2, 8384), ["state_data_ptrs[0][2]", "8384", "8448"]),
        (LAST, change_state("state_item_lens", 2, 0), ["state_data_ptrs[0][2]", "0 bytes"]),
        (LAST, change_state("state_data_lens", 2, 0), ["num_pages=0"]),
        (LAST, set_field("state_types", ["dsa", "dsa"]), ["'dsa' 2 times"]),
        (LAST, set_field("kv_layout", "unified_kv"), ["kv_layout", "'unified_kv'"]),
        (LAST, set_field("swa_kv_cache_layout", "nhd"), ["swa_kv_cache_layout"]),
        (LAST, set_field("mla_compression_ratios", [0, 4]), ["mla_compression_ratios"]),
        (LAST, set_field("host_kv_data_ptrs", [1]), ["host_kv_data_ptrs"]),
        (LAST, set_field("kv_buf_groups", 3), ["kv_buf_groups"]),
        (LAST, set_field("is_hybrid_mla_backend", True), ["is_hybrid_mla_backend"]),
        (LAST, set_field("state_dim_per_tensor", [[1]]), ["state_dim_per_tensor"]),
        (LAST, change("aux_item_lens", 0, -1), ["aux_data_ptrs[0]", "63"]),
        (LAST, change("aux_item_lens", 0, -64), ["aux_data_ptrs[0]", "rows of 0"]),
        (LAST, change("aux_data_lens", 0, -512), ["aux_data_ptrs[0]", "0 bytes"]),
        (LAST, change("aux_data_lens", 3, 64), ["aux_data_ptrs[3]", "9 rows", "8"]),
    ],
)
def test_lists_that_contradict_each_other_or_the_model_are_refused(
    name: str, damage: Callable[[SimpleNamespace], None], words: list[str]
) -> None:
    refuse(name, damage, words)


def test_a_latent_entry_without_rows_is_refused() -> None:
    def damage(args: SimpleNamespace) -> None:
        args.kv_data_lens[0] = args.kv_item_lens[0] = 0

    refuse("decode", damage, ["kv_data_ptrs[0]", "0 bytes"], first_layer=0)


def test_a_first_layer_that_the_pool_denies_is_refused() -> None:
    refuse("prefill-cp2-rank1", lambda args: None, ["prefill_start_layer is 3", "first_layer is 0"], first_layer=0)


@pytest.mark.parametrize("first_layer", [1, 3, -1])
def test_a_stage_past_the_model_is_refused(first_layer: int) -> None:
    words = [f"layers {first_layer} to {first_layer + 4}", "only 5"]
    refuse("decode", lambda args: None, words, first_layer)


def test_missing_index_keys_are_refused() -> None:
    def damage(args: SimpleNamespace) -> None:
        for field in ("state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids"):
            setattr(args, field, [])

    refuse("decode", damage, ["state_types is empty", "[0, 1, 2, 3, 4]"], first_layer=0)


@pytest.mark.parametrize(
    "wrong",
    [{"num_layers": 0}, {"latent_bytes_per_token": 0}, {"num_draft_layers": -1}, {"index_quant_block": 96}],
)
def test_a_model_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(LayoutError):
        DsaModel(**{"num_layers": 2, "index_layers": (0,), "latent_bytes_per_token": 1152, **wrong})


def test_the_smallest_model_is_accepted() -> None:
    model = DsaModel(num_layers=1, index_layers=(), latent_bytes_per_token=1, index_quant_block=1)
    assert [one.name for one in cache_layout(model, page_size=1, dtype="bf16").components] == ["latent"]


def test_translating_loads_no_engine_and_no_torch() -> None:
    code = "import sys, pdlink_engines.sglang.components as c; print({'torch', 'sglang', 'grpc'} & set(sys.modules))"
    done = processes.run([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "set()"
