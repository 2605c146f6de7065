import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink import errors
from pdlink.address import Address
from pdlink.bootstrap import error_wire, service_wire
from pdlink.bootstrap.messages import MAX_TRANSPORT_BYTES, PrefillServerInfo, RankInfo
from pdlink.bootstrap.refusals import RegistrationConflict
from pdlink.errors import FrameError, IncompatibleError, InvalidInput, LayoutError, Mismatch, PdlinkError
from pdlink.layout import MemoryKind, ParallelSizes, PlanKind, RankCoordinates, Region, fingerprint
from pdlink.v1 import bootstrap_pb2 as pb
from pdlink.v1 import common_pb2
from tests.bootstrap.frames import DEVICE_STAGING, GOLDENS, INFO, REGISTRATION, STAGING
from tests.bootstrap.values import make_instance, make_layout

VERSION_1 = json.loads((Path(__file__).parent / "golden" / "v1.json").read_text())


def test_every_value_has_golden_bytes():
    assert VERSION_1.keys() == GOLDENS.keys()


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_bytes_of_version_1_still_read_as_the_same_value(name):
    assert GOLDENS[name].read(bytes.fromhex(VERSION_1[name])) == GOLDENS[name].value


@pytest.mark.parametrize("name", GOLDENS)
def test_packing_then_reading_is_identity(name):
    golden = GOLDENS[name]
    assert golden.read(golden.pack(golden.value).SerializeToString()) == golden.value


def test_the_handshake_is_compact_and_its_size_does_not_depend_on_the_page_count():
    def nbytes(num_pages):
        ranks = make_instance(make_layout(78), ParallelSizes(cp=8), num_pages=num_pages)
        one = ranks[0]
        info = PrefillServerInfo(
            one.instance,
            one.protocol,
            one.layout,
            fingerprint(one.layout),
            one.sizes,
            one.kinds,
            tuple(each.rank for each in ranks),
        )
        return len(service_wire.pack_info(info).SerializeToString())

    assert nbytes(1) < 6000
    assert nbytes(1 << 27) - nbytes(1) <= 8 * 2 * 4  # longer numbers, once for each rank and component


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_slots", 0, "num_slots=0"),
        ("num_slots", (1 << 16) + 1, "num_slots=65537"),
        ("slot_bytes", 0, "slot_bytes=0"),
        ("base_address", 0, "spans addresses"),
        ("slot_bytes", 1 << 63, "spans addresses"),
    ],
)
def test_a_staging_area_that_cannot_be_memory_is_refused(field, value, text):
    message = service_wire.pack_rank_info(STAGING)
    setattr(message.staging, field, value)
    with pytest.raises(FrameError, match=text):
        service_wire.unpack_rank_info(message)


def test_slots_in_host_memory_are_told_as_before_there_were_any_in_device_memory():
    message = service_wire.pack_rank_info(STAGING)
    assert not message.staging.memory
    assert service_wire.unpack_rank_info(message).staging.memory is MemoryKind.HOST


def test_slots_in_memory_of_an_unknown_kind_are_refused():
    message = service_wire.pack_rank_info(STAGING)
    message.staging.memory = 9
    with pytest.raises(FrameError, match="unknown memory kind 9"):
        service_wire.unpack_rank_info(message)


def test_where_slots_lie_is_what_their_region_says():
    region = DEVICE_STAGING.staging.region()
    assert (region.memory, region.device) == (MemoryKind.CUDA, 3)
    assert region.end_address - region.base_address == 4 * (128 << 20)


@pytest.mark.parametrize("names", [["a\nb"], [""], [str(number) for number in range(17)]])
def test_backends_of_a_staging_area_are_names_and_not_too_many(names):
    message = service_wire.pack_rank_info(STAGING)
    message.staging.backends.extend(names)
    with pytest.raises(FrameError, match="staging"):
        service_wire.unpack_rank_info(message)


def changed(path, value):
    """The golden registration with one wire field set; `path` is dotted, a number indexes."""
    message = service_wire.pack_registration(REGISTRATION)
    *parts, last = path.split(".")
    here = message
    for part in parts:
        here = here[int(part)] if part.isdigit() else getattr(here, part)
    if value is None:
        here.ClearField(last)
    elif isinstance(value, list):
        here.ClearField(last)
        getattr(here, last).extend(value)
    else:
        setattr(here, last, value)
    return message


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("instance", "", "instance ''"),
        ("instance", "a\nb", "printable"),
        ("instance", "a" * 257, "got 257"),
        ("protocol", None, r"registration\.protocol is missing"),
        ("protocol.least", 0, r"protocol range 0\.\.1"),
        ("protocol.greatest", 70000, "70000"),
        ("layout", None, r"registration\.layout is missing"),
        ("layout.components", [], "at least one component"),
        ("layout.num_layers", 1 << 31, "num_layers is 2147483648"),
        ("layout.components.0.page_size", 0, "page_size=0"),
        ("layout.components.0.page_size", 1 << 31, "token rows"),
        ("layout.components.0.page_bytes", 1 << 40, "page_bytes=1099511627776"),
        ("layout.components.0.layers", [1, 0], "strictly increasing"),
        ("layout.components.0.layers", list(range(5000)), "5000 entries"),
        ("layout.components.0.fields.0.offset", 1 << 63, "outside its page"),
        ("layout.components.0.fields.0.num_heads", 0, "num_heads"),
        ("layout.components.0.fields.0.num_heads", 1 << 31, "token rows"),
        ("layout.components.0.total_heads", 3, "has 1 of 3 heads on tp rank 0"),
        ("layout.components.0.dtype", "", "dtype of component 'latent'"),
        ("sizes.cp", 0, "cp=0"),
        ("sizes.dp", 1 << 31, "at most 65536"),
        ("kinds", [], "plan kinds are stated for"),
        ("kinds.0.kind", 0, "unknown plan kind 0"),
        ("kinds.0.kind", 9, "unknown plan kind 9"),
        ("kinds.0.component", "latent", "'latent' is named twice"),
        ("rank", None, r"registration\.rank is missing"),
        ("rank.worker_id", "", "worker_id ''"),
        ("rank.incarnation", 0, "incarnation 0"),
        ("rank.incarnation", 1 << 63, "incarnation 9223372036854775808"),
        ("rank.coordinates", None, r"rank\.coordinates is missing"),
        ("rank.coordinates.cp", 3, "cp=3 is outside parallel size cp=3"),
        ("rank.control_endpoint", "", "no host"),
        ("rank.control_endpoint", "h:70000", "70000"),
        ("rank.control_endpoint", "h:1" * 200, "600 characters"),
        ("rank.control_endpoint", "h:0", "not an address that peers can reach"),
        ("rank.control_endpoint", "[::]:5", "not an address that peers can reach"),
        ("rank.owned.2.layers", [1, 0], "do not increase"),
        ("rank.owned.2.layers", [0, 1, 2], "one region for each owned layer"),
        ("rank.owned.2.component", "index_k", "'index_k' is named twice"),
        ("rank.owned.2.component", "other", "regions of 'latent'"),
        ("rank.owned.0.layers", [5], "regions of 'draft.k'|owns 'draft.k' layers"),
        ("rank.regions.0.memory", 7, "unknown memory kind 7"),
        ("rank.regions.0.num_pages", 0, "num_pages=0"),
        ("rank.regions.0.num_pages", (1 << 64) - 1, "spans addresses"),
        ("rank.regions.0.page_stride", 1, "page_stride=1"),
        ("rank.regions.0.page_bytes", 1, "page_bytes=1"),
        ("rank.regions.0.base_addresses", [0], "spans addresses"),
        ("rank.regions.0.base_addresses", [], "1 layers and 0 base addresses"),
        ("rank.regions.0.layers", [1], "one region for each owned layer"),
        ("rank.transports.0.name", "nixl", "name one twice"),
        ("rank.transports.0.data", b"x" * (MAX_TRANSPORT_BYTES + 1), "'ipc'.*has 262145 bytes"),
    ],
)
def test_a_wire_value_out_of_bounds_is_refused_with_its_field(path, value, words):
    message = changed(path, value)
    with pytest.raises(FrameError, match=words):
        service_wire.unpack_registration(message)


def test_a_fingerprint_that_does_not_describe_the_layout_is_refused():
    message = service_wire.pack_info(INFO)
    message.fingerprint.items[0].value = "4"
    with pytest.raises(FrameError, match="does not describe its layout"):
        service_wire.unpack_info(message)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"worker_id": "node0/gpu0"}, "worker_id 'node0/gpu0' twice"),
        ({"coordinates": RankCoordinates()}, "rank .* twice"),
    ],
)
def test_two_ranks_of_one_name_or_one_place_are_refused(change, words):
    with pytest.raises(InvalidInput, match=words):
        replace(INFO, ranks=(*INFO.ranks[:2], replace(INFO.ranks[2], **change)))


def test_a_region_of_a_layer_that_the_rank_does_not_own_is_refused():
    rank = REGISTRATION.rank
    stray = Region("latent", 2, 4096, 41984, 41984, 1)
    with pytest.raises(LayoutError, match=r"layers \[0, 1, 2\] and owns layers \[0, 1\]"):
        replace(rank, regions=(*rank.regions, stray))


def test_a_region_whose_page_the_layout_does_not_have_is_refused():
    rank = REGISTRATION.rank
    small = tuple(
        replace(one, page_bytes=8, page_stride=8) if one.component == "latent" else one for one in rank.regions
    )
    with pytest.raises(LayoutError, match="page_bytes=8, the layout says 41984"):
        replace(REGISTRATION, rank=replace(rank, regions=small))


def test_a_rank_may_register_no_region_of_what_it_owns():
    rank = replace(REGISTRATION.rank, regions=())
    assert replace(REGISTRATION, rank=rank).rank.owned["latent"] == (0, 1)


def test_regions_and_owned_layers_are_kept_in_order():
    rank = REGISTRATION.rank
    turned = RankInfo(
        rank.worker_id,
        rank.incarnation,
        rank.coordinates,
        dict(reversed(rank.owned.items())),
        rank.regions[::-1],
        rank.control_endpoint,
        dict(reversed(rank.transports.items())),
    )
    assert turned == rank
    assert turned.regions == rank.regions


@given(st.binary(max_size=300))
def test_any_bytes_are_a_registration_or_a_refusal(data):
    with pytest.raises(InvalidInput):
        service_wire.unpack_registration(service_wire.parse(pb.Registration, data))


@given(st.data())
def test_damaged_bytes_never_raise_anything_but_a_refusal(data):
    good = bytearray(service_wire.pack_registration(REGISTRATION).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        service_wire.unpack_registration(service_wire.parse(pb.Registration, bytes(good)))
    except InvalidInput:
        return


@pytest.mark.parametrize(
    "kind",
    [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PdlinkError)],
    ids=lambda one: one.__name__,
)
def test_an_error_arrives_as_the_class_it_was(kind):
    error = IncompatibleError([Mismatch("f", "1", "2", "fix it")], "peer") if kind is IncompatibleError else kind("why")
    sent = common_pb2.ErrorDetail.FromString(error_wire.pack_error(error).SerializeToString())
    got = error_wire.unpack_error(sent)
    assert type(got) is kind
    assert str(got) == str(error)
    assert getattr(got, "mismatches", None) == getattr(error, "mismatches", None)


def test_a_registration_conflict_keeps_its_words_and_its_mismatches():
    error = RegistrationConflict([Mismatch("page_size", "64", "32")], "w0", "worker 'w1' says 32")
    got = error_wire.unpack_error(error_wire.pack_error(error))
    assert type(got) is RegistrationConflict
    assert (str(got), got.peer, got.mismatches) == (str(error), "w0", error.mismatches)


def test_an_error_of_an_unknown_class_is_still_an_error():
    got = error_wire.unpack_error(common_pb2.ErrorDetail(kind="FromTheFuture", text="new\x1b[31m trouble"))
    assert type(got) is PdlinkError
    assert str(got) == "new?[31m trouble"


def test_an_error_detail_fits_into_headers_whatever_differs():
    many = [Mismatch("f" * 5000, "p" * 5000, "d" * 5000, "x" * 5000)] * 100
    assert len(error_wire.pack_error(IncompatibleError(many, "w" * 5000)).SerializeToString()) < 6000


def test_a_control_endpoint_is_never_a_wildcard():
    with pytest.raises(InvalidInput, match="PDLINK_ADVERTISE_HOST"):
        replace(REGISTRATION.rank, control_endpoint=Address("::", 5))


def test_replicated_everywhere_is_not_split():
    assert INFO.is_split
    assert not replace(INFO, kinds=dict.fromkeys(INFO.kinds, PlanKind.REPLICATED)).is_split
