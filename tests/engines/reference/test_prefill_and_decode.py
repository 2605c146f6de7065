"""Prefill on real rank processes, then decode from the pages alone, against plain transformers."""

from __future__ import annotations

import pytest

from pdlink_engines.reference.compare import compare_generations
from pdlink_engines.reference.decode import Generation, generate
from pdlink_engines.reference.glm_tiny import INDEX_TOPK
from pdlink_engines.reference.models import ReferenceModel
from pdlink_engines.reference.plain import generate_plain
from tests.engines.reference.ranks import Ranks, Run

# The first test of a session waits for processes that import torch, and the first run on a machine converts weights.
pytestmark = pytest.mark.timeout(240)

BY_SIZE = {1: (2,), 2: (3, 1), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
PROMPT = "Layers are split over ranks, and every rank reads the rest of them from whoever owns them."


def decode(model: ReferenceModel, run: Run, name: str, prompt: list[int], new: int, page_size: int) -> Generation:
    """Decode from pages in another order than prefill's, in a pool whose other pages are noise."""
    layout = model.layout(page_size)
    count = -(-(len(prompt) + new) // page_size)
    page_ids = [2 * count - 1 - 2 * i for i in range(count)]
    first = run.results(name)[0]["first_token"]
    with run.pulled(name, layout, page_ids, 2 * count) as pool:
        found = generate(model, pool, page_ids, prompt, first, max_new_tokens=new)
    return Generation(found.tokens, found.logits, run.logits(name))


def assert_like_plain(model: ReferenceModel, run: Run, name: str, prompt: list[int], new: int, page_size: int) -> None:
    verdict = compare_generations(
        generate_plain(model, prompt, max_new_tokens=new), decode(model, run, name, prompt, new, page_size)
    )
    assert verdict.tokens_equal, verdict.text
    assert verdict.logit_difference <= 1e-3, verdict.text
    assert verdict.num_steps == new or model.stop_tokens


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("length", "chunk"),
    [
        pytest.param(90, 512, id="one-chunk"),
        pytest.param(90, 32, id="chunk-of-two-pages"),
        pytest.param(75, 13, id="chunk-divides-nothing"),
        pytest.param(22, 2, id="chunk-smaller-than-cp"),
        pytest.param(1, 8, id="one-token"),
        pytest.param(48, 48, id="full-pages-only"),
    ],
)
def test_any_chunking_over_any_ranks_gives_the_tokens_and_logits_of_plain_transformers(
    ranks: Ranks, tiny: ReferenceModel, cp: int, length: int, chunk: int
) -> None:
    prompt = tiny.tokenizer.encode(PROMPT)[:length]
    run = ranks.run(
        BY_SIZE[cp],
        model="glm-dsa-tiny",
        page_size=16,
        num_pages=12,
        page_order=[7, 2, 9, 4, 11, 0, 5],
        chunk=chunk,
        waves=[{"submit": {"a": prompt}}],
    )
    assert [one["pages"] for one in run.results("a")] == [[7, 2, 9, 4, 11, 0, 5][: -(-length // 16)]] * cp
    assert len({one["first_token"] for one in run.results("a")}) == 1
    assert_like_plain(tiny, run, "a", prompt, 6, 16)


@pytest.mark.parametrize(
    ("stages", "ranks_of_job"), [pytest.param(2, (1, 0, 2, 3), id="pp2-cp2"), pytest.param(3, (0, 2, 3), id="pp3-cp1")]
)
def test_pipeline_stages_give_the_bytes_and_logits_of_one_stage(
    ranks: Ranks, tiny: ReferenceModel, stages: int, ranks_of_job: tuple[int, ...]
) -> None:
    """The second of two stages begins with a layer that shares an indexer of the first, the third of three as well."""
    prompt = tiny.tokenizer.encode(PROMPT)[:75]
    again = prompt[:40] + tiny.tokenizer.encode("Another ending.")[1:]
    job = {
        "model": "glm-dsa-tiny",
        "page_size": 16,
        "num_pages": 12,
        "page_order": [7, 2, 9, 4, 11, 0, 5, 1, 3, 6],
        "chunk": 13,
        "waves": [{"submit": {"a": prompt}}, {"submit": {"b": again}}],
    }
    # One stage of as many cp ranks computes the same rows in the same shapes, so that every byte must be equal.
    alone = {1: (2,), 2: (3, 1)}[len(ranks_of_job) // stages]
    piped, whole = ranks.run(ranks_of_job, pp=stages, **job), ranks.run(alone, **job)
    for name, tokens in (("a", prompt), ("b", again)):
        found = piped.results(name)
        assert {one["first_token"] for one in found} == {whole.results(name)[0]["first_token"]}
        assert len({tuple(one["pages"]) for one in found}) == 2, "stages hand out pages of their own"
        assert [one["cached"] for one in found] == [whole.results(name)[0]["cached"]] * len(ranks_of_job)
        for rank in range(len(ranks_of_job)):
            assert piped.logits(name, rank).equal(whole.logits(name))
        assert piped.merged(name) == whole.merged(name)
        assert_like_plain(tiny, piped, name, tokens, 6, 16)


def test_real_weights_answer_alike_over_two_ranks(ranks: Ranks, smollm2: ReferenceModel) -> None:
    prompt = smollm2.tokenizer.encode("What is the capital of France?")
    run = ranks.run((3, 1), model="smollm2", page_size=8, num_pages=8, chunk=21, waves=[{"submit": {"a": prompt}}])
    assert_like_plain(smollm2, run, "a", prompt, 12, 8)
    found = decode(smollm2, run, "a", prompt, 12, 8)
    assert "Paris" in smollm2.tokenizer.decode(found.tokens)
    assert found.tokens[-1] in smollm2.stop_tokens


def test_requests_that_run_by_turns_do_not_touch_each_other(ranks: Ranks, tiny: ReferenceModel) -> None:
    prompts = {name: tiny.tokenizer.encode(PROMPT[shift:])[:60] for name, shift in (("a", 0), ("b", 3), ("c", 9))}
    run = ranks.run((0, 2, 3), model="glm-dsa-tiny", page_size=8, num_pages=32, chunk=11, waves=[{"submit": prompts}])
    order = [one["id"] for one in run.answers[0]["told"]]
    assert order[:4] == ["a", "b", "c", "a"]
    for name, prompt in prompts.items():
        assert_like_plain(tiny, run, name, prompt, 4, 8)


def test_a_common_prefix_is_computed_once_and_its_pages_are_told_for_both(ranks: Ranks, tiny: ReferenceModel) -> None:
    first = tiny.tokenizer.encode(PROMPT)[:70]
    second = first[:40] + tiny.tokenizer.encode("Another ending.")[1:]
    run = ranks.run(
        (3, 2, 1),
        model="glm-dsa-tiny",
        page_size=8,
        num_pages=32,
        chunk=16,
        waves=[{"submit": {"a": first}}, {"submit": {"b": second}}],
    )
    a, b = run.results("a")[0], run.results("b")[0]
    assert (a["cached"], b["cached"]) == (0, 40)
    assert b["pages"][:5] == a["pages"][:5]
    assert not set(b["pages"][5:]) & set(a["pages"])
    assert run.told("b")[0]["start"] == 0
    assert run.told("b")[0]["pages"][:5] == a["pages"][:5]
    for name, prompt in (("a", first), ("b", second)):
        assert_like_plain(tiny, run, name, prompt, 6, 8)


@pytest.mark.parametrize("cp", [2, 4])
def test_each_page_is_told_once_in_order_and_only_full_ones_before_the_last(
    ranks: Ranks, tiny: ReferenceModel, cp: int
) -> None:
    prompt = tiny.tokenizer.encode(PROMPT)[:51]
    run = ranks.run(
        BY_SIZE[cp], model="glm-dsa-tiny", page_size=16, num_pages=8, chunk=20, waves=[{"submit": {"a": prompt}}]
    )
    result = run.results("a")[0]
    for rank in range(cp):
        told = run.told("a", rank)
        # 20 and 40 tokens fill one page and two; 51 end inside the fourth.
        assert [one["start"] for one in told] == [0, 1, 2]
        assert [one["pages"] for one in told] == [result["pages"][0:1], result["pages"][1:2], result["pages"][2:4]]
        assert [one["last"] for one in told] == [False, False, True]
        assert [one["first_token"] for one in told] == [None, None, result["first_token"]]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_split_pools_hold_the_bytes_of_unsplit_ones_and_take_a_share_of_the_memory(
    ranks: Ranks, tiny: ReferenceModel, cp: int
) -> None:
    prompt = tiny.tokenizer.encode(PROMPT)
    again = prompt[:40] + tiny.tokenizer.encode("Another ending.")[1:]
    job = {
        "model": "glm-dsa-tiny",
        "page_size": 8,
        "num_pages": 32,
        "chunk": 23,
        "waves": [{"submit": {"a": prompt[:61], "b": prompt[9:50]}}, {"submit": {"c": again}}],
    }
    split, whole = ranks.run(BY_SIZE[cp], **job), ranks.run(BY_SIZE[cp], plan="replicated", **job)
    for name in ("a", "b", "c"):
        assert split.logits(name).equal(whole.logits(name))
        for rank in range(cp):
            assert whole.bytes(name, rank) == split.merged(name)
    owned = [answer["nbytes_owned"] for answer in split.answers]
    assert sum(owned) == tiny.shape.token_bytes * 8 * 32
    assert [answer["nbytes_owned"] for answer in whole.answers] == [sum(owned)] * cp


def test_pages_are_used_again_once_every_rank_has_released_them(ranks: Ranks, tiny: ReferenceModel) -> None:
    first = tiny.tokenizer.encode(PROMPT)[:60]
    second = tiny.tokenizer.encode(PROMPT[5:])[:60]
    run = ranks.run(
        (3, 1),
        model="glm-dsa-tiny",
        page_size=8,
        num_pages=8,
        chunk=32,
        waves=[{"submit": {"a": first}, "release": {"a": [0, 1]}}, {"submit": {"b": second}}],
    )
    assert set(run.results("b")[0]["pages"]) == set(run.results("a")[0]["pages"])
    assert_like_plain(tiny, run, "a", first, 3, 8)
    assert_like_plain(tiny, run, "b", second, 3, 8)


def test_pages_that_one_rank_still_lends_are_not_used_again(ranks: Ranks, tiny: ReferenceModel) -> None:
    run = ranks.run(
        (3, 1),
        model="glm-dsa-tiny",
        page_size=8,
        num_pages=8,
        chunk=32,
        page_timeout_s=0.2,
        waves=[
            {"submit": {"a": tiny.tokenizer.encode(PROMPT)[:60]}, "release": {"a": [0]}},
            {"submit": {"b": tiny.tokenizer.encode(PROMPT[5:])[:60]}},
        ],
    )
    for answer in run.answers:
        assert answer["error"]["type"] == "DeadlineExceeded"
        assert "'b'" in answer["error"]["text"]
        assert [one["id"] for one in answer["results"]] == ["a"]


def test_an_aborted_request_gives_its_pages_back_and_leaves_the_others_alone(
    ranks: Ranks, tiny: ReferenceModel
) -> None:
    prompts = {name: tiny.tokenizer.encode(PROMPT[shift:])[:60] for name, shift in (("a", 0), ("b", 3), ("c", 9))}
    run = ranks.run(
        (0, 2, 3),
        model="glm-dsa-tiny",
        page_size=8,
        num_pages=16,
        chunk=11,
        waves=[{"submit": prompts, "steps": 3, "abort": {"a": [0, 1, 2]}}],
    )
    assert [one["id"] for one in run.answers[0]["results"]] == ["b", "c"]
    assert set(run.results("c")[0]["pages"]) & set(range(8)), "c runs on what a gave back"
    for name in ("b", "c"):
        assert_like_plain(tiny, run, name, prompts[name], 4, 8)


def test_a_wrong_byte_in_a_selected_indexer_key_or_latent_row_changes_the_answer(
    ranks: Ranks, tiny: ReferenceModel
) -> None:
    prompt = tiny.tokenizer.encode(PROMPT)[:80]
    assert len(prompt) > 2 * INDEX_TOPK
    run = ranks.run(
        (3, 1), model="glm-dsa-tiny", page_size=16, num_pages=8, chunk=80, waves=[{"submit": {"a": prompt}}]
    )
    expected = generate_plain(tiny, prompt, max_new_tokens=6)
    layout = tiny.layout(16)
    page_ids = list(range(6))
    for component, layer in layout.cells():
        with run.pulled("a", layout, page_ids, 6) as pool:
            region = pool.region_tensor(component, layer)
            region[:5] = region[:5].flip(0)
            found = generate(tiny, pool, page_ids, prompt, expected.tokens[0], max_new_tokens=6)
        assert not compare_generations(expected, found).passed, (component, layer)
