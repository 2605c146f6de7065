import pytest

from pdlink.errors import LayoutError
from pdlink.layout import CacheLayout, MemoryKind, Region, check_region
from pdlink.layout.components import latent
from pdlink.layout.regions import MAX_ADDRESS

LAYOUT = CacheLayout(4, (latent(64, (0, 2), bytes_per_token=656),))
NBYTES = 64 * 656


def region(layer=0, base=4096, stride=NBYTES, nbytes=NBYTES, num_pages=8, **more):
    return Region("latent", layer, base, stride, nbytes, num_pages, **more)


def test_a_region_ends_after_its_last_page_and_not_after_the_gap_behind_it():
    assert region(stride=NBYTES + 100).nbytes == 7 * (NBYTES + 100) + NBYTES
    assert region(num_pages=1, stride=1 << 40).nbytes == NBYTES


def test_a_region_is_dense_when_pages_touch():
    assert region().is_dense
    assert not region(stride=NBYTES + 1).is_dense


def test_offsets_beyond_two_gib_do_not_wrap():
    one = region(base=(1 << 62) + 1, num_pages=1 << 20)
    assert one.end_address == (1 << 62) + 1 + (1 << 20) * NBYTES
    assert one.nbytes > 1 << 35


def test_a_region_may_end_at_the_last_address_and_not_past_it():
    assert region(base=MAX_ADDRESS - 8 * NBYTES).end_address == MAX_ADDRESS
    with pytest.raises(LayoutError, match="spans addresses"):
        region(base=MAX_ADDRESS - 8 * NBYTES + 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_pages": 0}, "registers nothing"),
        ({"nbytes": 0}, "page_bytes=0"),
        ({"layer": -1}, "layer -1"),
        ({"stride": NBYTES - 1}, f"page_stride={NBYTES - 1} below page_bytes={NBYTES}"),
        ({"base": 0}, "spans addresses"),
        ({"num_pages": 1 << 62}, "spans addresses"),
        ({"num_pages": 1, "stride": MAX_ADDRESS + 1}, "page_stride"),
        ({"device": -1}, "device=-1"),
    ],
)
def test_a_region_with_impossible_figures_is_refused(change, says):
    with pytest.raises(LayoutError, match=says):
        region(**change)


def test_a_region_must_hold_pages_that_the_layout_has():
    check_region(region(), LAYOUT)
    check_region(region(layer=2, memory=MemoryKind.CUDA), LAYOUT)
    with pytest.raises(LayoutError, match="'latent' has no layer 1"):
        check_region(region(layer=1), LAYOUT)
    with pytest.raises(LayoutError, match=f"page_bytes={NBYTES - 1}, the layout says {NBYTES}"):
        check_region(region(nbytes=NBYTES - 1), LAYOUT)
    with pytest.raises(LayoutError, match="no component 'k'"):
        check_region(Region("k", 0, 4096, 8, 8, 1), LAYOUT)
