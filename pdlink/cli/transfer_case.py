"""Owns what `pdlink bench transfer` measures: the cases of a sweep, checked, and the settings that each stands for.

It starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from pdlink.errors import InvalidInput

WORD_BYTES = 8
HOST, CUDA = "host", "cuda"
NVLINK = "nvlink"
"""Whatever joins the GPUs: a row says what it was."""
TRANSPORTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("ipc", HOST): ("shm",),
    ("nixl", HOST): ("cma", "tcp"),
    ("mooncake", HOST): ("tcp",),
    ("ipc", CUDA): (NVLINK,),
    ("nixl", CUDA): (NVLINK,),
    ("mooncake", CUDA): ("nvlink_intra",),
}
"""(backend, device) -> what it can be made to move over."""
WAYS = {"ipc": ("mapped", "staged"), "nixl": ("direct", "staged"), "mooncake": ("direct", "staged")}
DEFAULT_WAYS = {"ipc": ("mapped",), "nixl": ("direct", "staged"), "mooncake": ("direct", "staged")}
_UCX_TLS = {"tcp": "tcp,cuda_copy", "cma": "cma,tcp,cuda_copy"}
"""UCX needs tcp to say hello, and then takes cma for the bytes. On a machine with GPUs nixl does not start without a
transport for their memory, though none of these bytes is there."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: so many pages in each of so many layers, over one backend and transport, in one way."""

    backend: str
    transport: str
    way: str
    page_bytes: int
    num_pages: int
    num_layers: int
    scattered: bool
    device: str = HOST
    part: tuple[int, int] = (0, 0)
    """The first layer and the one after the last that move; (0, 0): all of them."""

    def __post_init__(self) -> None:
        if self.page_bytes < WORD_BYTES or self.page_bytes % WORD_BYTES:
            raise InvalidInput(f"--page-bytes {self.page_bytes} is no multiple of {WORD_BYTES}, which the check needs")

    @property
    def link(self) -> tuple[str, str]:
        """Cases that share it share their processes."""
        return self.backend, self.transport

    @property
    def shape(self) -> tuple[int, int, int, bool, int, int]:
        """The fields of `transfer_bytes.Shape`."""
        return self.page_bytes, self.num_pages, self.num_layers, self.scattered, *self.part

    @property
    def nbytes(self) -> int:
        first, stop = self.part
        return self.page_bytes * self.num_pages * ((stop or self.num_layers) - first)

    @property
    def settings(self) -> dict[str, object]:
        """What forces this backend, transport and way, of the settings of pdlink."""
        protocol = {"mooncake_protocol": self.transport} if self.backend == "mooncake" else {}
        return {"backends": self.backend, "way": "staged" if self.way == "staged" else "direct", **protocol}

    def __str__(self) -> str:
        how = "scattered" if self.scattered else "contiguous"
        size = f"{self.num_pages} {how} pages of {self.page_bytes:,} B x {self.num_layers} layers"
        return f"{self.backend} over {self.transport}, {self.way}: {size}"


def environment(backend: str, transport: str, device: str) -> dict[str, str]:
    """The variables that make `backend`'s library use `transport`, for pdlink and for the baseline alike."""
    if backend == "nixl" and device == HOST:
        return {"UCX_TLS": _UCX_TLS[transport], "UCX_NET_DEVICES": "lo"}
    if backend == "mooncake":
        return {"MC_FORCE_TCP": "1"} if device == HOST else {"MC_INTRANODE_NVLINK": "1"}
    return {}


def sweep(
    backends: Sequence[str],
    transports: Sequence[str],
    ways: Sequence[str],
    page_bytes: Sequence[int],
    num_pages: Sequence[int],
    num_layers: Sequence[int],
    scattered: Sequence[bool],
    device: str,
) -> Iterator[Case]:
    """Every case of the options, those of one link together. Empty `transports` or `ways`: each backend's own.

    Raises `InvalidInput` for a transport or way that none of the backends has, and for a backend that has none of them.
    """
    known = {name: TRANSPORTS[name, device] for name in backends}
    _check("--transport", transports, known, device)
    _check("--way", ways, {name: WAYS[name] for name in backends}, device)
    for name in backends:
        for transport in (one for one in known[name] if not transports or one in transports):
            for way in (one for one in WAYS[name] if one in (ways or DEFAULT_WAYS[name])):
                for nbytes, pages, layers, apart in product(page_bytes, num_pages, num_layers, scattered):
                    yield Case(name, transport, way, nbytes, pages, layers, apart, device)


def _check(option: str, asked: Sequence[str], known: dict[str, tuple[str, ...]], device: str) -> None:
    told = "; ".join(f"{name}: {', '.join(values)}" for name, values in known.items())
    for one in asked:
        if not any(one in values for values in known.values()):
            raise InvalidInput(f"{option} {one} is none of what these backends do with {device} memory ({told})")
    for name, values in known.items():
        if asked and not set(asked) & set(values):
            raise InvalidInput(f"{option} {', '.join(asked)} leaves nothing to measure of backend {name} ({told})")
