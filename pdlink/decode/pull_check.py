"""Owns the check of what a pull has brought against the digests that its owner published."""

from __future__ import annotations

import numpy as np

from pdlink.decode.failures import wrong_page
from pdlink.decode.pull_job import PullJob
from pdlink.transfer.digests import Digester, DigestKind, Digests, first_difference
from pdlink.transfer.failure import Failure
from pdlink.transfer.packing import split_turns


def find_wrong(job: PullJob, worker_id: str, digest: Digester) -> Failure | None:
    """The first page that is not what `worker_id` published, as the failure of the request; None where all are, or
    where nothing was said of them. Reads every page that came, so it takes a while.

    Raises `BackendError` when a device cannot be read.
    """
    told = job.pull.digests
    if told is None:
        return None
    found = _digests(job, DigestKind(told.kind), digest)
    wrong = first_difference(found, told.values)
    if wrong is None:
        return None
    region, page = job.regions[wrong[0]], int(job.pull.pages[wrong[1]])
    return wrong_page(worker_id, region, page, told.kind, int(found[wrong]), int(told.values[wrong]))


def _digests(job: PullJob, kind: DigestKind, digest: Digester) -> Digests:
    """uint64 [rows, pages]: of what has landed, packed as its owner digests it where pages did not go whole."""
    pages, landing = job.pull.pages, job.pull.landing
    if landing is None:
        return digest(kind, job.regions, pages)
    found = np.zeros((len(job.regions), len(pages)), dtype=np.uint64)
    bases = np.array([one.base_address for one in job.regions], dtype=np.int64)
    turns = split_turns(job.pull.first_page, len(pages), len(landing.tables))
    for table, mine in zip(landing.tables, turns, strict=True):
        if len(mine):
            found[:, mine] = digest(kind, job.regions, pages[mine], runs=table.runs_in(bases))
    return found
