"""Owns the baselines of the pool benches: layers brought whole, at each read, and plain copies. No pdlink here.

Written after what a published layer-split pool does: the owner of a layer copies all of it into its scratch buffer, and
broadcasts that buffer over the ranks' communicator, however few tokens are live. torch alone is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist


class WholePool:
    """Owned layers, and one scratch buffer for each component. Buffers are uint8 [num_pages, page_bytes]."""

    has_pages = True

    def __init__(
        self,
        owners: Mapping[tuple[str, int], int],
        rank: int,
        num_pages: int,
        page_bytes: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self._owners = dict(owners)
        self._rank = rank
        self.owned = {
            key: torch.zeros((num_pages, page_bytes[key[0]]), dtype=torch.uint8, device=device)
            for key, owner in self._owners.items()
            if owner == rank
        }
        self.scratch = {
            name: torch.zeros((num_pages, nbytes), dtype=torch.uint8, device=device)
            for name, nbytes in page_bytes.items()
        }
        self.nbytes_moved = self.num_reads = 0

    def read(self, component: str, layer: int) -> torch.Tensor:
        """The layer in scratch, on all ranks. Collective."""
        buffer, owner = self.scratch[component], self._owners[component, layer]
        if owner == self._rank:
            buffer.copy_(self.owned[component, layer])
        dist.broadcast(buffer, owner)
        self.nbytes_moved += buffer.nbytes
        self.num_reads += 1
        return buffer


class PlainCopy:
    """As many bytes as the live pages of a layer are, from one range of another GPU to one of this: the link's rate."""

    has_pages = False

    def __init__(
        self, owners: Mapping[tuple[str, int], int], rank: int, live_bytes: Mapping[str, int], device: torch.device
    ) -> None:
        other = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
        self._owners, self._rank = dict(owners), rank
        self._there = {name: torch.full((n,), 7, dtype=torch.uint8, device=other) for name, n in live_bytes.items()}
        self.scratch = {name: torch.zeros(n, dtype=torch.uint8, device=device) for name, n in live_bytes.items()}
        torch.cuda.synchronize(other)
        self.nbytes_moved = self.num_reads = 0
        """Of layers of other ranks alone, as those of a pool are counted."""

    def read(self, component: str, layer: int) -> torch.Tensor:
        """The bytes, on ranks that do not own the layer."""
        buffer = self.scratch[component]
        if self._owners[component, layer] != self._rank:
            buffer.copy_(self._there[component], non_blocking=True)
            self.nbytes_moved += buffer.nbytes
            self.num_reads += 1
        return buffer
