"""Owns the process of one prefill rank in the demo: the engine, its pool, and their link.

It runs the prompts twice: in pipeline stages with the layers of each split over its ranks, published to decode; then in
one stage with pools that hold every layer, whose bytes are what decode must have received.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from pdlink.address import parse_address
from pdlink.errors import TransferFailed
from pdlink.layout.parallel import RankCoordinates
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.owners import ShardOwners
from pdlink.memory.sharded_pool import LayerShardedPool
from pdlink.prefill.rank import PrefillRank
from pdlink.runtime.verbs import NodeVerbs, PrefillVerbs, SenderVerbs
from pdlink_engines.reference.demo.arrays import save_logits, save_pages
from pdlink_engines.reference.demo.child import ParentPipe, run_child
from pdlink_engines.reference.demo.damage import StaleScratchPool
from pdlink_engines.reference.demo.link import open_node
from pdlink_engines.reference.demo.page_order import scattered_pages
from pdlink_engines.reference.demo.spec import PREFILL_INSTANCE, Damage, DemoSpec
from pdlink_engines.reference.gather import CpGroup
from pdlink_engines.reference.group import RankGroup
from pdlink_engines.reference.models import ReferenceModel, fix_threads, load_model
from pdlink_engines.reference.page_bytes import collect_pages
from pdlink_engines.reference.pipeline import Pipeline
from pdlink_engines.reference.prefill import FinishedPages, PrefillEngine, PrefillResult
from pdlink_engines.reference.watched import watch_pool, watch_reader

COLLECTIVE_TIMEOUT_S = 180.0
"""Also how far apart processes may start; one that ends is noticed at once."""
REGISTER_TIMEOUT_S = 60.0
RELEASE_TIMEOUT_S = 60.0
WATCH_INTERVAL_S = 0.002
AUX_BYTES = 8


class Published:
    """The requests of this rank on the link: pages go out as they are final, and come back when readers are through."""

    def __init__(self, worker: PrefillVerbs, request_ids: tuple[str, ...]) -> None:
        self.senders: dict[str, SenderVerbs] = {one: worker.open(one) for one in request_ids}
        self.last_at: dict[str, float] = {}

    def on_pages(self, pages: FinishedPages) -> None:
        aux = pages.first_token.to_bytes(AUX_BYTES, "little") if pages.first_token is not None else None
        self.senders[pages.request_id].publish(
            pages.page_ids, start_page=pages.start_page, last=pages.last, aux=aux if pages.last else None
        )
        if pages.last:
            self.last_at[pages.request_id] = time.monotonic()

    def release_to(self, engine: PrefillEngine) -> threading.Thread:
        """Give pages back to `engine` as requests end, on a thread of its own, which ends with the last of them."""
        thread = threading.Thread(target=self._watch, args=(engine,), name="demo-release", daemon=True)
        thread.start()
        return thread

    def _watch(self, engine: PrefillEngine) -> None:
        waiting = dict(self.senders)
        while waiting:
            for request_id in [one for one, sender in waiting.items() if sender.poll().is_final]:
                engine.release(request_id)
                del waiting[request_id]
            time.sleep(WATCH_INTERVAL_S)


def main(pipe: ParentPipe, number: int) -> None:
    """`number` counts prefill ranks as the spec lists them, and is this process's rank in torch's world."""
    spec = pipe.spec
    place = spec.prefill_ranks()[number]
    fix_threads()
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.run_dir}/gloo",
        rank=number,
        world_size=spec.sizes.num_ranks,
        timeout=timeout,
    )
    stages = [dist.new_group(list(_stage_ranks(spec, pp)), timeout=timeout) for pp in range(spec.pp)]
    model = load_model(spec.model)
    group = CpGroup(stages[place.pp])
    pipeline = Pipeline(group, RankGroup(dist.group.WORLD), place.pp, spec.pp)
    with open_node(spec, "prefill") as node, pipe.telling():
        _serve(pipe, spec, place, model, pipeline, node)
    if place.pp == 0:  # the first stage alone has the ranks to compute the whole model
        _run_unsplit(pipe, spec, model, group)
    dist.barrier(group=group.group)


def _stage_ranks(spec: DemoSpec, pp: int) -> range:
    return range(pp * spec.cp, (pp + 1) * spec.cp)


def _serve(
    pipe: ParentPipe, spec: DemoSpec, place: RankCoordinates, model: ReferenceModel, pipeline: Pipeline, node: NodeVerbs
) -> None:
    """Prefill with split layers, and publish to decode."""
    layout, plan = spec.layout(), spec.plan()
    owners = ShardOwners.of(layout, plan, place)
    reader = BroadcastReader.open(owners, _stage_ranks(spec, place.pp)) if spec.cp > 1 else None
    kind = StaleScratchPool if spec.inject is Damage.STALE_SCRATCH else LayerShardedPool
    pool = kind(layout, plan.owned[place], spec.pool_pages, reader=watch_reader(node, reader))
    watch_pool(node, pool)
    worker = node.prefill(
        PrefillRank(PREFILL_INSTANCE, layout, spec.sizes, place, plan.kinds, plan.owned[place], pool.regions()),
        [parse_address(spec.bootstrap)],
    )
    worker.wait_registered(REGISTER_TIMEOUT_S)
    published = Published(worker, spec.request_ids())
    engine = PrefillEngine(
        model,
        pool,
        pipeline.cp,
        chunk_tokens=spec.chunk_tokens,
        on_pages=published.on_pages,
        page_order=scattered_pages(spec.pool_pages, f"prefill-{place.pp}"),
        pipeline=pipeline,
        layers=spec.stage(place.pp),
    )
    pipe.report(
        "ready",
        worker_id=worker.rank.worker_id,
        owned_bytes=pool.nbytes_owned,
        scratch_bytes=pool.nbytes_scratch,
        layers=plan.owned[place],
    )
    pipe.wait_for("go")
    watcher = published.release_to(engine)
    for request_id, tokens in _prompts(spec, model).items():
        engine.submit(request_id, tokens)
        for result in engine.run():
            _report_result(pipe, spec, pipeline, result, published)
    watcher.join(RELEASE_TIMEOUT_S)
    engine.step()
    for request_id, sender in published.senders.items():
        if sender.failure or not sender.poll().is_final:
            raise TransferFailed(f"{request_id} is {sender.poll()} on {worker.rank.worker_id}: {sender.failure}")
    pipe.report("served", bytes_read=pool.stats.nbytes_moved)
    worker.close()
    pool.close()


def _prompts(spec: DemoSpec, model: ReferenceModel) -> dict[str, list[int]]:
    return {one: model.tokenizer.encode(text) for one, text in zip(spec.request_ids(), spec.prompts, strict=True)}


def _report_result(
    pipe: ParentPipe, spec: DemoSpec, pipeline: Pipeline, result: PrefillResult, published: Published
) -> None:
    if pipeline.everyone.rank == 0:
        save_logits(spec.run_dir / "first_logits" / f"{result.request_id}.npy", result.logits)
    pipe.report(
        "prefilled",
        request=result.request_id,
        num_tokens=result.num_tokens,
        cached_tokens=result.cached_tokens,
        published_at=published.last_at[result.request_id],
    )


def _run_unsplit(pipe: ParentPipe, spec: DemoSpec, model: ReferenceModel, group: CpGroup) -> None:
    """The same prefill in one stage, with every layer on every rank; its pages are the expected ones."""
    layout = spec.layout()
    pool = LayerShardedPool(layout, {one.name: one.layers for one in layout.components}, spec.pool_pages)
    engine = PrefillEngine(
        model,
        pool,
        group,
        chunk_tokens=spec.chunk_tokens,
        on_pages=lambda pages: None,
        page_order=scattered_pages(spec.pool_pages, "prefill"),
    )
    for request_id, tokens in _prompts(spec, model).items():
        engine.submit(request_id, tokens)
        for result in engine.run():
            if group.rank == 0:
                pages = collect_pages(pool, result.page_ids, result.num_tokens)
                save_pages(spec.run_dir / "expected" / result.request_id, pages)
            engine.release(result.request_id)
        engine.step()
    pipe.report("unsplit", owned_bytes=pool.nbytes_owned)
    pool.close()


if __name__ == "__main__":
    import sys

    run_child(lambda pipe: main(pipe, int(sys.argv[1])))
