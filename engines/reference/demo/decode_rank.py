"""Owns the process of one decode rank in the demo: it learns who owns what, pulls from every owner, and generates.

With several tensor-parallel ranks each pulls the heads that it keeps (all of a cache without heads) into a pool and
pages of its own. Afterwards the first rank runs plain transformers on the same prompts, in which nothing of pdlink
takes part, and compares.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist

from pdlink.address import parse_address
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.errors import InvalidInput
from pdlink.layout.decode_plan import DecodePlace, DecodeRank, DecodeSizes
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.runtime.node import Node
from pdlink_engines.reference.compare import compare_generations
from pdlink_engines.reference.decode import Generation, generate
from pdlink_engines.reference.demo.arrays import load_logits, save_pages
from pdlink_engines.reference.demo.child import ParentPipe, run_child
from pdlink_engines.reference.demo.damage import TamperedBackend, flip_bit, skip_owner, swap_layers
from pdlink_engines.reference.demo.link import open_node
from pdlink_engines.reference.demo.page_order import scattered_pages
from pdlink_engines.reference.demo.spec import DECODE_INSTANCE, PREFILL_INSTANCE, Damage, DemoSpec
from pdlink_engines.reference.models import ReferenceModel, fix_threads, load_model
from pdlink_engines.reference.page_bytes import collect_pages
from pdlink_engines.reference.plain import generate_plain
from pdlink_engines.reference.tensor_parallel import TpGroup

RECEIVE_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 300.0
"""Ranks start to generate when each has received, which may be far apart."""


class Requests:
    """The prompts as one decode rank sees them: tokens, and its pages that hold prompt and answer."""

    def __init__(self, spec: DemoSpec, model: ReferenceModel, tp: int) -> None:
        self.tokens = {
            one: model.tokenizer.encode(text) for one, text in zip(spec.request_ids(), spec.prompts, strict=True)
        }
        self.pages: dict[str, list[int]] = {}
        self.prompt_pages: dict[str, list[int]] = {}
        order = scattered_pages(spec.pool_pages, f"decode-{tp}")
        for request_id, tokens in self.tokens.items():
            needed = -(-(len(tokens) + spec.new_tokens) // spec.page_size)
            if needed > len(order):
                raise InvalidInput(
                    f"{request_id} of {len(tokens)} prompt and {spec.new_tokens} new tokens needs {needed} pages of "
                    f"{spec.page_size}, {len(order)} of {spec.pool_pages} are left; shorten it or raise --pool-pages"
                )
            self.pages[request_id], order = order[:needed], order[needed:]
            self.prompt_pages[request_id] = self.pages[request_id][: -(-len(tokens) // spec.page_size)]


def main(pipe: ParentPipe, tp: int) -> None:
    spec = pipe.spec
    fix_threads()
    group = _join(spec, tp)
    model = load_model(spec.model)
    layout = spec.decode_layout(tp)
    requests = Requests(spec, model, tp)
    pool = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, spec.pool_pages)
    with open_node(spec, "decode") as node, pipe.telling():
        if isinstance(node, Node):
            _tamper(node, spec)
        place = DecodePlace(DecodeSizes(tp=spec.decode_tp), DecodeRank(tp=tp))
        worker = node.decode(DECODE_INSTANCE, layout, pool.regions(), place=place)
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
            one: _finish(pipe, spec, group, model, pool, requests, receiver, done_at)
            for one, receiver in receivers.items()
        }
    pipe.wait_for("compare")
    for request_id, generation in generations.items() if tp == 0 else ():
        _compare(pipe, spec, model, requests, request_id, generation)
    pool.close()


def _join(spec: DemoSpec, tp: int) -> TpGroup:
    """The group of the decode ranks, in a torch world of their own."""
    if spec.decode_tp == 1:
        return TpGroup()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.run_dir}/gloo-decode",
        rank=tp,
        world_size=spec.decode_tp,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return TpGroup(dist.group.WORLD)


def _finish(
    pipe: ParentPipe,
    spec: DemoSpec,
    group: TpGroup,
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
    if spec.inject is Damage.FLIP and group.rank == group.size - 1:
        flip_bit(pool, pages)
    received = collect_pages(pool, requests.prompt_pages[request_id], len(tokens))
    save_pages(spec.received_dir(group.rank) / request_id, received)
    owners = [f"{PREFILL_INSTANCE}/{rank}" for rank in spec.prefill_ranks()]
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
    first_token = int.from_bytes(result.aux, "little")
    generation = generate(model, pool, pages, tokens, first_token, max_new_tokens=spec.new_tokens, group=group)
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
        change = skip_owner(f"{PREFILL_INSTANCE}/{spec.prefill_ranks()[-1]}")
    elif spec.inject is Damage.SWAP_LAYERS:
        change = swap_layers
    else:
        return
    for name, backend in node.backends.items():
        node.backends[name] = TamperedBackend(backend, change)


if __name__ == "__main__":
    import sys

    run_child(lambda pipe: main(pipe, int(sys.argv[1])))
