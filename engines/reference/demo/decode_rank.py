"""Owns the decode process of the demo: it learns who owns what, pulls every layer from its owner, and generates.

Afterwards it runs plain transformers on the same prompts, in which nothing of pdlink takes part, and compares.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from pdlink.address import parse_address
from pdlink.config import load_settings
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import InvalidInput
from pdlink.layout.parallel import RankCoordinates
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.runtime.node import Node
from pdlink_engines.reference.compare import compare_generations
from pdlink_engines.reference.decode import Generation, generate
from pdlink_engines.reference.demo.arrays import load_logits, save_pages
from pdlink_engines.reference.demo.child import ParentPipe, run_child
from pdlink_engines.reference.demo.damage import TamperedBackend, flip_bit, skip_owner, swap_layers
from pdlink_engines.reference.demo.page_order import scattered_pages
from pdlink_engines.reference.demo.spec import DECODE_INSTANCE, PREFILL_INSTANCE, Damage, DemoSpec
from pdlink_engines.reference.models import ReferenceModel, fix_threads, load_model
from pdlink_engines.reference.page_bytes import collect_pages
from pdlink_engines.reference.plain import generate_plain

RECEIVE_TIMEOUT_S = 300.0


class Requests:
    """The prompts as decode sees them: tokens, and the pages that hold prompt and answer."""

    def __init__(self, spec: DemoSpec, model: ReferenceModel) -> None:
        self.tokens = {
            one: model.tokenizer.encode(text) for one, text in zip(spec.request_ids(), spec.prompts, strict=True)
        }
        self.pages: dict[str, list[int]] = {}
        self.prompt_pages: dict[str, list[int]] = {}
        order = scattered_pages(spec.pool_pages, "decode")
        for request_id, tokens in self.tokens.items():
            needed = -(-(len(tokens) + spec.new_tokens) // spec.page_size)
            if needed > len(order):
                raise InvalidInput(
                    f"{request_id} of {len(tokens)} prompt and {spec.new_tokens} new tokens needs {needed} pages of "
                    f"{spec.page_size}, {len(order)} of {spec.pool_pages} are left; shorten it or raise --pool-pages"
                )
            self.pages[request_id], order = order[:needed], order[needed:]
            self.prompt_pages[request_id] = self.pages[request_id][: -(-len(tokens) // spec.page_size)]


def main(pipe: ParentPipe) -> None:
    spec = pipe.spec
    fix_threads()
    model = load_model(spec.model)
    layout = spec.layout()
    requests = Requests(spec, model)
    pool = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, spec.pool_pages)
    with Node(load_settings(backends=spec.backend)) as node:
        _tamper(node, spec)
        worker = node.decode(DECODE_INSTANCE, layout, pool.regions())
        prefill = PrefillInstance(PREFILL_INSTANCE, (parse_address(spec.bootstrap),))
        pipe.report("ready", backends=list(node.backends))
        pipe.wait_for("go")
        receivers = {
            one: worker.receive(one, prefill, {"kv": requests.prompt_pages[one]}, len(tokens), expect_aux=True)
            for one, tokens in requests.tokens.items()
        }
        done_at: dict[str, float] = {}
        for receiver in receivers.values():
            receiver.on_end(lambda ended: done_at.__setitem__(ended.transfer_id, time.monotonic()))
        generations = {
            one: _finish(pipe, spec, model, pool, requests, receiver, done_at) for one, receiver in receivers.items()
        }
    pipe.wait_for("compare")
    for request_id, generation in generations.items():
        _compare(pipe, spec, model, requests, request_id, generation)
    pool.close()


def _finish(
    pipe: ParentPipe,
    spec: DemoSpec,
    model: ReferenceModel,
    pool: LayerShardedPool,
    requests: Requests,
    receiver: Receiver,
    done_at: dict[str, float],
) -> Generation:
    """Wait for one request, keep its pages as they came, and generate."""
    request_id = receiver.transfer_id
    result = receiver.wait(RECEIVE_TIMEOUT_S)
    tokens, pages = requests.tokens[request_id], requests.pages[request_id]
    if spec.inject is Damage.FLIP:
        flip_bit(pool, pages)
    received = collect_pages(pool, requests.prompt_pages[request_id], len(tokens))
    save_pages(spec.run_dir / "received" / request_id, received)
    owners = [f"{PREFILL_INSTANCE}/{RankCoordinates(cp=rank)}" for rank in range(spec.cp)]
    pipe.report(
        "received",
        request=request_id,
        done_at=done_at[request_id],
        backends=sorted(set(result.backends.values())),
        pages=requests.prompt_pages[request_id],
        pulled_bytes=[result.num_bytes.get(owner, 0) for owner in owners],
        num_descriptors=result.num_descriptors,
    )
    assert result.aux is not None
    generation = generate(
        model, pool, pages, tokens, int.from_bytes(result.aux, "little"), max_new_tokens=spec.new_tokens
    )
    text = model.tokenizer.decode(generation.tokens)
    pipe.report("generated", request=request_id, tokens=list(generation.tokens), text=text)
    return generation


def _compare(
    pipe: ParentPipe,
    spec: DemoSpec,
    model: ReferenceModel,
    requests: Requests,
    request_id: str,
    generation: Generation,
) -> None:
    first = load_logits(spec.run_dir / "first_logits" / f"{request_id}.npy")
    plain = generate_plain(model, requests.tokens[request_id], max_new_tokens=spec.new_tokens)
    verdict = compare_generations(plain, replace(generation, first_logits=first))
    pipe.report(
        "compared",
        request=request_id,
        passed=verdict.passed,
        tokens_equal=verdict.tokens_equal,
        logit_difference=verdict.logit_difference,
        tie=asdict(verdict.tie) if verdict.tie else None,
        verdict=verdict.text,
        plain_tokens=list(plain.tokens),
    )


def _tamper(node: Node, spec: DemoSpec) -> None:
    if spec.inject is Damage.SKIP_OWNER:
        change = skip_owner(f"{PREFILL_INSTANCE}/{RankCoordinates(cp=spec.cp - 1)}")
    elif spec.inject is Damage.SWAP_LAYERS:
        change = swap_layers
    else:
        return
    for name, backend in node.backends.items():
        node.backends[name] = TamperedBackend(backend, change)


if __name__ == "__main__":
    run_child(main)
