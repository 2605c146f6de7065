"""Owns what an engine may ask of pdlink, as protocols that `Node` keeps, and a sidecar's client as well.

An engine that is written against these runs in either way. They say nothing that the classes do not say at more length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from pdlink.address import Address
from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange
from pdlink.decode.links import PrefillInstance
from pdlink.decode.receiver import Receiver
from pdlink.health import HealthReport
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.ready_watch import DeviceEvent
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.failure import Failure
from pdlink.transfer.states import SenderState


class SenderVerbs(Protocol):
    """One request on one prefill rank: `pdlink.prefill.sender.Sender`, whose memory rule holds for each of these."""

    transfer_id: str
    failure: Failure | None

    def poll(self) -> SenderState: ...

    def first_pages(self) -> Mapping[str, int] | None: ...

    def raise_failure(self) -> None: ...

    def publish(
        self,
        page_ids: Sequence[int] | Int64Array = (),
        *,
        group: str = "kv",
        start_page: int | None = None,
        layers: Mapping[str, Iterable[int]] | None = None,
        last: bool = False,
        aux: bytes | None = None,
        ready: DeviceEvent | None = None,
    ) -> None: ...

    def withdraw(self, page_ids: Iterable[int], *, group: str = "kv") -> None: ...

    def abort(self, text: str = "aborted by the prefill engine") -> None: ...


class PrefillVerbs(Protocol):
    """One prefill rank: `pdlink.prefill.worker.PrefillWorker`."""

    @property
    def rank(self) -> PrefillRank: ...

    def open(self, transfer_id: str) -> SenderVerbs: ...

    def wait_registered(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class DecodeVerbs(Protocol):
    """One decode rank: `pdlink.decode.worker.DecodeWorker`. Its receivers are the same in either way."""

    @property
    def instance(self) -> str: ...

    def receive(
        self,
        transfer_id: str,
        prefill: PrefillInstance,
        pages: Mapping[str, Sequence[int] | Int64Array],
        num_tokens: int,
        *,
        prefix_tokens: int = 0,
        readers: ReaderSet | None = None,
        dp: int = 0,
        expect_aux: bool = False,
        trace_parent: str = "",
    ) -> Receiver: ...

    def explain(self, prefill: PrefillInstance) -> dict[str, str]: ...

    @property
    def is_quiet(self) -> bool: ...

    def close(self) -> None: ...


class NodeVerbs(Protocol):
    """What an engine opens first: `pdlink.runtime.node.Node`, or what `pdlink.sidecar.connect` returns."""

    @property
    def backends(self) -> Collection[str]:
        """The names of the transports."""

    def prefill(self, rank: PrefillRank, bootstraps: Sequence[Address] = ()) -> PrefillVerbs: ...

    def decode(
        self,
        instance: str,
        layout: CacheLayout,
        regions: Sequence[Region],
        protocol: ProtocolRange = PROTOCOL,
        place: DecodePlace | None = None,
    ) -> DecodeVerbs: ...

    def health(self) -> HealthReport: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
