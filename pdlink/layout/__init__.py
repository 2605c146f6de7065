"""Pure values: parallel ranks, components, layer plans, regions, reader sets, fingerprints. No I/O, no torch."""

from pdlink.layout.components import CacheLayout, Component, Field, PageGroup
from pdlink.layout.decode_plan import DecodePlace, DecodePlan, DecodeRank, DecodeSizes
from pdlink.layout.fingerprint import Fingerprint, compare, fingerprint
from pdlink.layout.layer_plan import LayerPlan, OwnedLayers, PlanKind, balanced_ranges, find_faults
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.parts import WHOLE, Part, part_of
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import MemoryKind, Region, check_region

__all__ = [
    "CacheLayout",
    "Component",
    "Field",
    "PageGroup",
    "DecodePlace",
    "DecodePlan",
    "DecodeRank",
    "DecodeSizes",
    "Fingerprint",
    "compare",
    "fingerprint",
    "LayerPlan",
    "OwnedLayers",
    "PlanKind",
    "balanced_ranges",
    "find_faults",
    "ParallelSizes",
    "RankCoordinates",
    "WHOLE",
    "Part",
    "part_of",
    "ReaderSet",
    "MemoryKind",
    "Region",
    "check_region",
]
