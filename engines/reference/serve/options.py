"""Owns what a server of the reference engine is started with, and the checks of it. It reads no command line."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdlink.address import Address, parse_address
from pdlink.errors import InvalidInput
from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink_engines.reference.models import model_shape


class EngineOptions(BaseModel):
    """What prefill ranks and decode servers have in common. Frozen.

    `sidecar` is the socket of the sidecar that has the link; without it the link is in the engine's own process.
    `max_requests` bounds what one server takes at once; further ones are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    instance: str
    http: str = Field(description="host and port to serve requests, health and metrics at")
    sidecar: Path | None = None
    page_size: int = Field(16, ge=1)
    pool_pages: int = Field(256, ge=1)
    max_requests: int = Field(64, ge=1)

    @property
    def http_address(self) -> Address:
        return parse_address(self.http)

    def layout(self) -> CacheLayout:
        return model_shape(self.model).layout(self.page_size)


class PrefillOptions(EngineOptions):
    """One prefill rank: `rank` of `cp`. Rank 0 leads; every rank meets the others at `leader`, where rank 0 listens.

    `group_timeout_s` bounds each wait of a rank for the others; the group is given up then, and formed anew.
    """

    rank: int = Field(0, ge=0)
    cp: int = Field(4, ge=1)
    leader: str
    bootstraps: tuple[str, ...]
    chunk_tokens: int = Field(64, ge=1)
    group_timeout_s: float = Field(15.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> PrefillOptions:
        if self.rank >= self.cp:
            raise InvalidInput(f"--rank {self.rank} is not below --cp {self.cp}; ranks count from 0")
        if not self.bootstraps:
            raise InvalidInput("a prefill rank registers with a bootstrap; give --bootstrap HOST:PORT")
        num_layers = self.layout().num_layers
        if self.cp > num_layers:
            raise InvalidInput(f"--cp {self.cp} is more than the {num_layers} layers of {self.model!r}; give fewer")
        return self

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(cp=self.cp)

    @property
    def place(self) -> RankCoordinates:
        return tuple(self.sizes.ranks())[self.rank]

    @property
    def leader_address(self) -> Address:
        return parse_address(self.leader)

    def bootstrap_addresses(self) -> list[Address]:
        return [parse_address(one) for one in self.bootstraps]

    def plan(self) -> LayerPlan:
        return LayerPlan.balanced(self.layout(), self.sizes)
