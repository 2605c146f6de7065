"""What vLLM's cache configuration says becomes layout values without loss, and anything else is refused by name."""

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
from pdlink_engines.vllm.components import DsaModel, VllmCache, cache_layout, translate
from tests import processes

RECORDING = Path(__file__).parent.parent / "fixtures" / "engines" / "vllm-0.33.0.json"
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads(RECORDING.read_text())["cases"]}
WHOLE = [name for name in CASES if name != "kpool-tail"]
WORKERS = [(name, index) for name in WHOLE for index in range(len(CASES[name]["workers"]))]
MODEL = DsaModel(num_layers=5)
ADDRESS, HOST_ADDRESS = 1 << 40, 1 << 30


def revive(value: Any) -> Any:
    """A recorded object with its attributes; a spec has its class's name again."""
    if isinstance(value, list):
        return [revive(one) for one in value]
    if not isinstance(value, dict):
        return value
    fields = {name: revive(one) for name, one in value.items() if name != "class"}
    if "kv_cache_specs" in value:
        fields["kv_cache_specs"] = {name: revive(one) for name, one in value["kv_cache_specs"].items()}
    return type(value.get("class", "Recorded"), (SimpleNamespace,), {})(**fields)


def configs(name: str) -> list[Any]:
    return [revive(worker["config"]) for worker in CASES[name]["workers"]]


def cache_of(name: str, worker: int = 0) -> VllmCache:
    made = configs(name)
    return translate(made[worker], cache_layout(made, MODEL), MODEL, address=ADDRESS, host_address=HOST_ADDRESS)


def place_of(layer_name: str) -> tuple[str, int]:
    """The component and layer that a recorded layer name stands for, read off the name alone."""
    number = int(layer_name.split(".")[2])
    role = "index_k" if layer_name.endswith(".k_cache") else "latent"
    return (f"draft.{role}", number - 5) if number >= 5 else (role, number)


def specs_of(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = group["kv_cache_spec"]
    return spec.get("kv_cache_specs") or dict.fromkeys(group["layer_names"], spec)


@pytest.mark.parametrize(("name", "worker"), WORKERS)
def test_every_layer_lies_where_vllms_own_view_puts_it(name: str, worker: int) -> None:
    cache = cache_of(name, worker)
    config = CASES[name]["workers"][worker]["config"]
    held = {
        layer for group in config["kv_cache_groups"] if group["enable_kv_transfer"] for layer in group["layer_names"]
    }
    views = {place_of(one): view for one, view in CASES[name]["workers"][worker]["views"].items() if one in held}
    ratios = {
        part: cache.block_tables[int(one.name[-1])].pages_per_block
        for one in cache.layout.page_groups
        for part in one.components
    }
    assert {(one.component, one.layer) for one in cache.regions} == set(views)
    for region in cache.regions:
        view, ratio = views[region.component, region.layer], ratios[region.component]
        start = HOST_ADDRESS if region.memory is MemoryKind.HOST else ADDRESS
        check_region(region, cache.layout)
        assert region.base_address == start + view["offset"]
        assert region.page_stride * ratio == view["block_stride"]
        assert region.page_bytes * ratio == view["block_bytes"]
        assert region.num_pages == view["num_blocks"] * ratio


@pytest.mark.parametrize(("name", "worker"), WORKERS)
def test_every_cache_group_can_be_rebuilt_from_the_layout(name: str, worker: int) -> None:
    """Block size, block bytes, bytes per token and layers of each group that has a block table, and nothing else."""
    cache = cache_of(name, worker)
    recorded = {}
    for group_id, group in enumerate(CASES[name]["workers"][worker]["config"]["kv_cache_groups"]):
        if group["enable_kv_transfer"]:
            layers = {
                place_of(layer): (spec["page_size_bytes"], spec["state_content_size_bytes"])
                for layer, spec in specs_of(group).items()
            }
            recorded[group_id] = (group["kv_cache_spec"]["block_size"], layers)
    rebuilt = {}
    for table in cache.block_tables:
        group = cache.layout.page_group(table.page_group)
        layers = {
            (name, layer): (
                cache.layout.component(name).page_bytes * table.pages_per_block,
                sum(field.token_bytes for field in cache.layout.component(name).fields),
            )
            for name in group.components
            for layer in cache.owned[name]
        }
        rebuilt[table.group_id] = (group.page_size * table.pages_per_block, layers)
    assert rebuilt == recorded


@pytest.mark.parametrize(("name", "worker"), WORKERS)
def test_every_placement_can_be_rebuilt_from_the_regions(name: str, worker: int) -> None:
    cache = cache_of(name, worker)
    tables = {one.page_group: one for one in cache.block_tables}
    regions = {(one.component, one.layer): one for one in cache.regions}
    sizes = {one.memory: one.nbytes for one in cache.allocations}
    for tensor in CASES[name]["workers"][worker]["config"]["kv_cache_tensors"]:
        if any(layer in cache.skipped for layer in tensor["layers"]):
            continue
        mine = [regions[place_of(layer)] for layer in tensor["layers"]]
        ratio = tables[cache.layout.component(mine[0].component).page_group].pages_per_block
        start = HOST_ADDRESS if tensor["host_resident"] else ADDRESS
        assert [one.base_address - start for one in mine] == [
            tensor["offset"] + index * tensor["layer_stride"] for index in range(len(mine))
        ]
        assert {one.page_stride * ratio for one in mine} == {tensor["block_stride"]}
        assert sizes[mine[0].memory] == tensor["size"]


@pytest.mark.parametrize(("name", "worker"), WORKERS)
def test_nothing_is_lost_on_the_wire(name: str, worker: int) -> None:
    cache = cache_of(name, worker)
    assert unpack_layout(pack_layout(cache.layout)) == cache.layout
    assert sorted(unpack_regions(pack_regions(cache.regions)), key=str) == sorted(cache.regions, key=str)
    assert unpack_layers(pack_layers(cache.owned)) == cache.owned


def test_latent_and_index_keys_of_one_cache_group_share_one_page_list() -> None:
    layout = cache_of("layer-outer-draft").layout
    assert [(one.name, one.page_size, one.components) for one in layout.page_groups] == [
        ("group0", 64, ("latent", "index_k", "draft.latent", "draft.index_k"))
    ]
    assert layout.component("index_k").layers == (0, 2)
    assert layout.component("draft.index_k").layers == (0,)


def test_a_draft_with_a_block_table_of_its_own_has_its_own_page_list() -> None:
    cache = cache_of("draft-group")
    assert [(one.name, one.components) for one in cache.layout.page_groups] == [
        ("group0", ("latent", "index_k")),
        ("group1", ("draft.latent", "draft.index_k")),
    ]
    assert [(one.group_id, one.pages_per_block) for one in cache.block_tables] == [(0, 1), (1, 1)]


def test_hisparse_keeps_latent_pages_on_the_host_and_index_pages_on_the_device() -> None:
    cache = cache_of("hisparse")
    pages = {(one.component, one.memory): one.num_pages for one in cache.regions}
    assert pages == {("latent", MemoryKind.HOST): 51, ("index_k", MemoryKind.CUDA): 33}
    assert [one.page_group for one in cache.block_tables] == ["group0", "group1"]
    assert {one.rsplit(".", 1)[1] for one in cache.skipped} == {"hisparse_resident", "hisparse_hot"}
    assert {one.memory for one in cache.allocations} == {MemoryKind.HOST, MemoryKind.CUDA}


def test_a_block_of_256_tokens_is_four_pages_that_each_end_with_their_scales() -> None:
    cache = cache_of("blocks-of-256")
    part = cache.layout.component("index_k")
    assert (part.page_size, part.page_bytes, part.field("scale").offset) == (64, 64 * 132, 64 * 128)
    (table,) = cache.block_tables
    assert (table.block_size, table.pages_per_block) == (256, 4)
    assert table.pages([5, 0]).tolist() == [20, 21, 22, 23, 0, 1, 2, 3]
    assert table.pages([]).tolist() == []


def test_servers_with_different_block_sizes_have_one_fingerprint_once_blocks_are_pages() -> None:
    def indexed(name: str) -> Any:
        made = configs(name)
        return cache_layout(made, MODEL)

    found = compare(fingerprint(indexed("blocks-of-256")), fingerprint(indexed("two-stages")))
    assert [one.field for one in found] == ["index_k.layers"]


def test_packed_fp8_rows_keep_the_name_of_their_format() -> None:
    layout = cache_of("block-outer-fp8").layout
    assert (layout.component("latent").dtype, layout.component("latent").page_bytes) == ("fp8_ds_mla", 64 * 656)
    assert cache_of("layer-outer-draft").layout.component("latent").dtype == "bfloat16"


def test_pages_of_a_block_outer_layout_are_strided_and_their_regions_interleave() -> None:
    cache = cache_of("block-outer-fp8")
    assert {one.page_stride for one in cache.regions} == {2 * 64 * 132 + 5 * 64 * 656}
    assert not any(one.is_dense for one in cache.regions)
    (home,) = cache.allocations
    assert all(home.base_address <= one.base_address for one in cache.regions)
    assert max(one.end_address for one in cache.regions) == home.base_address + home.nbytes


def test_the_stages_of_a_model_make_one_whole_plan() -> None:
    caches = [cache_of("two-stages", worker) for worker in range(2)]
    layout = caches[0].layout
    assert caches[1].layout == layout
    assert caches[1].owned == {"latent": (3, 4), "index_k": ()}
    owned = {RankCoordinates(pp=stage): cache.owned for stage, cache in enumerate(caches)}
    kinds = {one.name: PlanKind.REPLICATED for one in layout.components}
    assert find_faults(layout, LayerPlan(ParallelSizes(pp=2), kinds, owned)) == ()


def test_a_model_without_an_indexer_has_latent_pages_only() -> None:
    assert [one.name for one in cache_of("no-indexer").layout.components] == ["latent"]


def refuse(name: str, damage: Callable[[Any], None], words: list[str], model: DsaModel = MODEL) -> None:
    made = configs(name)
    damage(made[0])
    with pytest.raises(LayoutError) as caught:
        translate(made[0], cache_layout(made, model), model, address=ADDRESS, host_address=HOST_ADDRESS)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pooled_indexer_is_refused_by_name() -> None:
    refuse("kpool-tail", lambda config: None, ["indexer.k_cache", "tokens_per_state=4"])


def test_a_ring_of_open_pools_is_refused_by_name() -> None:
    def drop_attention(config: Any) -> None:
        config.kv_cache_groups = config.kv_cache_groups[1:]

    refuse("kpool-tail", drop_attention, ["tail_cache", "CircularBufferSpec"])


@pytest.mark.parametrize(
    "kind", ["FullAttentionSpec", "SlidingWindowMLASpec", "MambaSpec", "HiddenStateCacheSpec", "HiSparseHotSpec", "New"]
)
def test_any_other_spec_is_refused_by_name(kind: str) -> None:
    def damage(config: Any) -> None:
        group = config.kv_cache_groups[0]
        group.kv_cache_spec = type(kind, (SimpleNamespace,), {})(**vars(group.kv_cache_spec))

    refuse("no-indexer", damage, [kind, "model.layers.0.self_attn.attn"])


FIRST = "model.layers.0.self_attn.indexer.k_cache"
SECOND = "model.layers.1.self_attn.attn"


def set_spec(layer: str, **values: Any) -> Callable[[Any], None]:
    return lambda config: vars(config.kv_cache_groups[0].kv_cache_spec.kv_cache_specs[layer]).update(values)


def set_tensor(**values: Any) -> Callable[[Any], None]:
    return lambda config: vars(config.kv_cache_tensors[0]).update(values)


def rename(old: str, new: str) -> Callable[[Any], None]:
    def damage(config: Any) -> None:
        group = config.kv_cache_groups[0]
        group.layer_names = [new if name == old else name for name in group.layer_names]
        specs = group.kv_cache_spec.kv_cache_specs
        specs[new] = specs.pop(old)

    return damage


def split_group(config: Any) -> None:
    """One component under two block tables: a request would have two page lists for it."""
    group = config.kv_cache_groups[0]
    specs = group.kv_cache_spec.kv_cache_specs
    moved = SECOND
    group.layer_names.remove(moved)
    other = type(group.kv_cache_spec)(**{**vars(group.kv_cache_spec), "kv_cache_specs": {moved: specs.pop(moved)}})
    config.kv_cache_groups.append(SimpleNamespace(**{**vars(group), "layer_names": [moved], "kv_cache_spec": other}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (set_spec(FIRST, cache_role="scores"), [FIRST, "'scores'"]),
        (set_spec(FIRST, num_heads=2), [FIRST, "num_heads=2"]),
        (set_spec(FIRST, sliding_window=128), ["sliding_window=128"]),
        (set_spec(FIRST, model_version="deepseek_v4"), ["'deepseek_v4'"]),
        (set_spec(FIRST, block_size=32), [FIRST, "block_size=32", "block_size=64"]),
        (set_spec(FIRST, state_content_size_bytes=68), [FIRST, "68 bytes", "128"]),
        (set_spec(FIRST, is_draft=True), [FIRST, "is_draft=True", "5 layers"]),
        (set_spec("model.layers.5.self_attn.attn", is_draft=False), ["is_draft=False"]),
        (set_spec(SECOND, state_content_size_bytes=656, page_size_bytes=64 * 656), [SECOND, "41984 and 73728"]),
        (set_spec(SECOND, dtype="torch.float16"), [SECOND, "dtype 'float16' and 'bfloat16'"]),
        (split_group, ["'latent'", "page_group 'group1' and 'group0'"]),
        (set_spec(SECOND, page_size_bytes=80000), [SECOND, "80000"]),
        (rename(SECOND, "model.layers.self_attn.attn"), ["0 numbers"]),
        (rename(SECOND, "model.3.layers.1.attn"), ["2 numbers"]),
        (lambda config: config.kv_cache_groups[0].layer_names.pop(), ["layer_names", "kv_cache_specs"]),
        (lambda config: config.kv_cache_tensors.pop(), ["has no kv_cache_tensor"]),
        (lambda config: config.kv_cache_tensors.append(config.kv_cache_tensors[0]), [FIRST, "two kv_cache_tensors"]),
        (set_tensor(size=1 << 30), ["size=15434496", "1073741824"]),
        (set_tensor(block_stride=4224), ["page_stride=4224", "page_bytes=8448"]),
        (
            lambda config: [vars(one).update(size=3000) for one in config.kv_cache_tensors],
            ["ends at byte 278784 of 3000"],
        ),
        (lambda config: vars(config).update(num_blocks=9000), ["ends at byte"]),
    ],
)
def test_a_configuration_that_contradicts_itself_or_the_model_is_refused(
    damage: Callable[[Any], None], words: list[str]
) -> None:
    refuse("layer-outer-draft", damage, words)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda config: vars(config).update(hisparse_shared_host_pool=True), ["hisparse_shared_host_pool"]),
        (lambda config: vars(config).update(hisparse_host_num_blocks=None), ["hisparse_host_num_blocks"]),
    ],
)
def test_a_host_pool_that_cannot_be_placed_is_refused(damage: Callable[[Any], None], words: list[str]) -> None:
    refuse("hisparse", damage, words)


def test_a_host_pool_without_an_address_is_refused() -> None:
    made = configs("hisparse")
    with pytest.raises(LayoutError, match="host_address"):
        translate(made[0], cache_layout(made, MODEL), MODEL, address=ADDRESS)


def test_blocks_that_do_not_divide_into_kernel_blocks_are_refused() -> None:
    model = DsaModel(num_layers=5, kernel_block_tokens=96)
    refuse("layer-outer-draft", lambda config: None, ["block_size=64", "kernel_block_tokens=96"], model)


def test_blocks_between_which_other_pages_lie_are_never_split() -> None:
    model = DsaModel(num_layers=5, kernel_block_tokens=32)
    refuse("block-outer-fp8", lambda config: None, ["block_stride=226816", "VLLM_KV_CACHE_LAYOUT"], model)


def test_padded_blocks_are_never_split() -> None:
    model = DsaModel(num_layers=5, kernel_block_tokens=32)
    refuse("layer-outer-draft", set_spec(FIRST, page_size_bytes=8704), [FIRST, "8448", "8704"], model)


def test_a_padded_block_keeps_its_padding_in_the_page() -> None:
    made = configs("layer-outer-draft")
    specs = made[0].kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    for name, spec in specs.items():
        if name.endswith("k_cache"):
            spec.page_size_bytes = 8704
    assert cache_layout(made, MODEL).component("index_k").page_bytes == 8704


def test_a_layer_that_the_layout_lacks_is_refused() -> None:
    layout = cache_layout(configs("no-indexer"), MODEL)
    with pytest.raises(LayoutError, match="index_k"):
        translate(configs("two-stages")[0], layout, MODEL, address=ADDRESS)


def test_a_stage_that_the_layout_was_not_made_from_is_refused() -> None:
    first, second = configs("two-stages")
    with pytest.raises(LayoutError, match=r"layers\.3\.self_attn\.attn .* in layers \[0, 1, 2\]"):
        translate(second, cache_layout([first], MODEL), MODEL, address=ADDRESS)


def test_a_layout_of_another_cache_dtype_is_refused() -> None:
    layout = cache_layout(configs("block-outer-fp8"), MODEL)
    with pytest.raises(LayoutError, match=r"blocks of 73728 bytes.*pages of 41984"):
        translate(configs("no-indexer")[0], layout, MODEL, address=ADDRESS)


def test_a_layout_of_larger_pages_than_blocks_is_refused() -> None:
    model = DsaModel(num_layers=5, kernel_block_tokens=128)
    layout = cache_layout(configs("blocks-of-256"), model)
    with pytest.raises(LayoutError, match=r"block_size=64, group0 pages of 128"):
        translate(configs("two-stages")[0], layout, model, address=ADDRESS)


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"kernel_block_tokens": 0}, {"index_quant_block": 0}])
def test_a_model_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match=r"at least 1|index_quant_block=0"):
        DsaModel(**{"num_layers": 5, **wrong})


def test_the_smallest_model_is_accepted() -> None:
    assert DsaModel(num_layers=1, kernel_block_tokens=1, index_quant_block=1).index_scale_bytes == 512


def test_an_index_head_that_is_no_whole_number_of_scale_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="index_head_dim=96"):
        DsaModel(num_layers=5, index_head_dim=96)


def test_translating_loads_no_engine_and_no_torch() -> None:
    code = "import sys, pdlink_engines.vllm.components as c; print({'torch', 'vllm', 'grpc'} & set(sys.modules))"
    done = processes.run([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "set()"
