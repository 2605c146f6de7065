from dataclasses import replace

import pytest

from pdlink.bootstrap.directory import GONE_TTL_S, Claim, Directory, LeaseStatus
from pdlink.bootstrap.messages import ProtocolRange
from pdlink.bootstrap.refusals import RegistrationConflict
from pdlink.errors import IncompatibleError, InvalidInput, NotOwner, NotReady, StaleIncarnation, UnknownInstance
from pdlink.layout import CacheLayout, ParallelSizes, PlanKind, RankCoordinates
from pdlink.layout.components import heads
from tests.bootstrap.values import make_instance, make_layout, uneven_ranks

NAME = "prefill-a"


def filled(registrations, lease_s=10.0, now=0.0):
    directory = Directory(lease_s)
    for one in registrations:
        directory.register(one, now)
    return directory


def test_an_instance_is_ready_when_every_rank_is_there():
    both = make_instance()
    directory = filled(both)
    info = directory.resolve(NAME, 0.0)
    assert [one.worker_id for one in info.ranks] == ["w0", "w1"]
    assert info.ranks == (both[0].rank, both[1].rank)
    assert info.is_split
    assert info.layer_plan().owners("latent", 3) == (RankCoordinates(cp=1),)
    assert info.rank("w1") == both[1].rank
    with pytest.raises(InvalidInput, match="no worker 'w9'"):
        info.rank("w9")


def test_an_instance_that_nobody_registered_is_unknown():
    with pytest.raises(UnknownInstance, match="nobody has registered instance 'x'"):
        Directory(10.0).resolve("x", 0.0)


def test_registering_twice_counts_once():
    first, second = make_instance(sizes=ParallelSizes(tp=2), kind=PlanKind.REPLICATED)
    directory = filled([first, first, replace(first, rank=replace(first.rank, incarnation=2))])
    assert directory.num_workers == 1
    with pytest.raises(NotReady, match=r"rank dp0\.pp0\.cp0\.tp1 has not registered"):
        directory.resolve(NAME, 0.0)
    directory.register(second, 0.0)
    assert len(directory.resolve(NAME, 0.0).ranks) == 2


def of_heads(num_heads, total=5, **more):
    made = heads("k", 64, range(2), num_heads=num_heads, head_bytes=8, dtype="bfloat16", total_heads=total)
    return CacheLayout(2, (replace(made, **more),))


def test_tp_ranks_of_uneven_heads_make_one_instance_with_a_layout_for_each():
    layouts = (of_heads(2), of_heads(2), of_heads(1))
    info = filled(uneven_ranks(layouts, cp=2)[::-1]).resolve(NAME, 0.0)
    assert (info.layout, info.tp_layouts) == (layouts[0], layouts)
    alike = filled(uneven_ranks((of_heads(2, 6),) * 3)).resolve(NAME, 0.0)
    assert alike.tp_layouts == ()


def test_ranks_of_the_same_tp_coordinate_have_pages_alike():
    first, last = uneven_ranks((of_heads(2, 4), of_heads(2, 4)), cp=2)[::3]
    odd = of_heads(2, 4, page_bytes=64 * 2 * 8 + 16)
    other = uneven_ranks((of_heads(2, 4), odd), cp=2)[1]
    with pytest.raises(
        RegistrationConflict, match=r"'w1' registers k\.pages 2 heads in 1040 B .* registered 2 heads in 1024 B"
    ):
        filled([first, last]).register(other, 0.0)


def test_another_page_size_is_refused_with_both_values_and_the_worker():
    first = make_instance(make_layout(page_size=64))[0]
    other = make_instance(make_layout(page_size=32))[1]
    directory = filled([first])
    with pytest.raises(RegistrationConflict) as refused:
        directory.register(other, 0.0)
    assert isinstance(refused.value, IncompatibleError)
    page_sizes = [(one.prefill, one.decode) for one in refused.value.mismatches if one.field == "index_k.page_size"]
    assert page_sizes == [("64", "32")]
    assert refused.value.peer == "w0"
    assert "'w1'" in str(refused.value)
    assert "64" in str(refused.value)
    assert "32" in str(refused.value)
    with pytest.raises(NotReady, match="cp1"):
        directory.resolve(NAME, 0.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"protocol": ProtocolRange(1, 2)}, "protocol"),
        ({"layout": make_layout(latent_bytes=1312)}, "latent.page_bytes"),
        ({"layout": make_layout(num_layers=5)}, "num_layers"),
        ({"sizes": ParallelSizes(cp=3)}, "parallel sizes"),
        ({"kind": PlanKind.REPLICATED}, "index_k.plan"),
    ],
)
def test_what_all_ranks_must_say_alike_is_compared(change, field):
    directory = filled(make_instance()[:1])
    with pytest.raises(RegistrationConflict) as refused:
        directory.register(make_instance(**change)[1], 0.0)
    assert field in [one.field for one in refused.value.mismatches]


def test_a_worker_that_is_alone_may_change_what_its_instance_says():
    directory = filled(make_instance(make_layout(page_size=64))[:1])
    anew = make_instance(make_layout(page_size=32), incarnation=2)
    directory.register(anew[0], 0.0)
    directory.register(anew[1], 0.0)
    assert directory.resolve(NAME, 0.0).layout.page_group("kv").page_size == 32


def test_an_older_incarnation_is_refused_and_changes_nothing():
    old, new = make_instance(incarnation=7)[0], make_instance(incarnation=8)[0]
    directory = filled([new])
    with pytest.raises(StaleIncarnation, match=r"incarnation 7, but incarnation 8"):
        directory.register(old, 0.0)
    assert directory.renew(old.key, 0.0) is LeaseStatus.REPLACED
    assert not directory.withdraw(old.key, 0.0)
    assert directory.renew(new.key, 0.0) is LeaseStatus.RENEWED


def test_a_rank_held_by_a_live_worker_is_refused_until_its_lease_has_run_out():
    first, second = make_instance()
    thief = replace(first, rank=replace(first.rank, worker_id="w0-again"))
    directory = filled([first, second])
    directory.renew(second.key, 9.0)
    with pytest.raises(RegistrationConflict, match=r"'w0-again' registers rank .* which live worker 'w0' holds"):
        directory.register(thief, 9.9)
    directory.register(thief, 10.0)
    assert [one.worker_id for one in directory.resolve(NAME, 10.0).ranks] == ["w0-again", "w1"]


def test_a_worker_that_moves_leaves_its_old_rank():
    sizes = ParallelSizes(cp=3)
    regs = make_instance(make_layout(3), sizes)
    directory = filled(regs[:1])
    moved = replace(regs[2], rank=replace(regs[2].rank, worker_id="w0", incarnation=2))
    directory.register(moved, 0.0)
    directory.register(replace(regs[0], rank=replace(regs[0].rank, worker_id="w9")), 0.0)
    directory.register(regs[1], 0.0)
    assert [one.worker_id for one in directory.resolve(NAME, 0.0).ranks] == ["w9", "w1", "w0"]


def test_a_gap_in_the_plan_is_not_ready_and_names_the_layers():
    directory = filled(
        make_instance(make_layout(10), ParallelSizes(cp=4), owned={1: {"latent": (3, 4), "index_k": ()}})
    )
    with pytest.raises(NotReady, match=r"'latent' layers 5 have no owner.*'index_k' layers 3-5 have no owner"):
        directory.resolve(NAME, 0.0)


def test_an_overlap_in_the_plan_is_not_ready_and_names_both_ranks_and_workers():
    owned = {1: {"latent": (2, 3, 4, 5), "index_k": (3, 4, 5)}}
    directory = filled(make_instance(make_layout(10), ParallelSizes(cp=4), owned=owned))
    with pytest.raises(NotReady) as waiting:
        directory.resolve(NAME, 0.0)
    assert "'latent' layer 2 is owned by dp0.pp0.cp0.tp0 (w0) and dp0.pp0.cp1.tp0 (w1)" in str(waiting.value)


def test_a_corrected_rank_makes_the_plan_whole():
    sizes, layout = ParallelSizes(cp=4), make_layout(10)
    directory = filled(make_instance(layout, sizes, owned={1: {}}))
    with pytest.raises(NotReady):
        directory.resolve(NAME, 0.0)
    directory.register(make_instance(layout, sizes, incarnation=2)[1], 0.0)
    owned = [one.owned["latent"] for one in directory.resolve(NAME, 0.0).ranks]
    assert owned == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]


def test_a_rank_that_owns_nothing_registers_no_region_and_appears():
    directory = filled(make_instance(make_layout(3), ParallelSizes(cp=4)))
    info = directory.resolve(NAME, 0.0)
    assert info.ranks[3].owns_nothing
    assert info.ranks[3].regions == ()
    assert not any(one.owns_nothing for one in info.ranks[:3])


def test_many_missing_ranks_are_counted_not_listed():
    directory = filled(make_instance(sizes=ParallelSizes(dp=64, cp=2))[:1])
    with pytest.raises(NotReady, match="and 119 more"):
        directory.resolve(NAME, 0.0)


def test_leases_run_out_and_renewals_prolong_them():
    first, second = make_instance()
    directory = filled([first, second], lease_s=10.0)
    assert directory.renew(first.key, 9.0) is LeaseStatus.RENEWED
    assert directory.expire(10.0) == 1
    assert directory.renew(second.key, 10.0) is LeaseStatus.UNKNOWN
    with pytest.raises(NotReady, match="cp1"):
        directory.resolve(NAME, 18.9)
    with pytest.raises(UnknownInstance):
        directory.resolve(NAME, 19.0)
    assert directory.num_workers == 0


def test_a_repeated_registration_renews_and_changes_no_version():
    first = make_instance()[0]
    directory = filled([first])
    version = directory.version(NAME, 0.0)
    assert directory.register(first, 9.0) is False
    assert directory.version(NAME, 18.9) == version
    assert directory.version(NAME, 19.0) == 0


def test_the_same_incarnation_may_say_more():
    first, second = make_instance()
    directory = filled([first, second])
    before = directory.resolve(NAME, 0.0)
    more = replace(first, rank=replace(first.rank, transports={"nixl": b"agent"}))
    assert directory.register(more, 0.0) is True
    after = directory.resolve(NAME, 0.0)
    assert after.ranks[0].transports == {"nixl": b"agent"}
    assert after.version > before.version


def test_withdrawing_takes_the_instance_back_to_not_ready():
    first, second = make_instance()
    directory = filled([first, second])
    assert directory.withdraw(second.key, 1.0)
    assert not directory.withdraw(second.key, 1.0)
    with pytest.raises(NotReady):
        directory.resolve(NAME, 1.0)
    directory.withdraw(first.key, 1.0)
    with pytest.raises(UnknownInstance):
        directory.endpoints(NAME, 1.0)


def test_changes_are_handed_out_once():
    first, second = make_instance()
    directory = filled([first, second])
    assert directory.take_changes() == {NAME}
    assert directory.take_changes() == set()
    directory.renew(first.key, 5.0)
    assert directory.take_changes() == set()
    directory.expire(11.0)
    assert directory.take_changes() == {NAME}


def test_a_worker_that_comes_and_goes_leaves_no_timers_behind():
    lives = [make_instance(incarnation=one)[0] for one in range(1, 102)]
    directory = Directory(10.0)
    for step, life in enumerate(lives[:100]):
        directory.register(life, step * 5.0)
        directory.withdraw(life.key, step * 5.0)
    assert len(directory._deadlines) <= 3
    directory.register(lives[100], 500.0)
    assert directory.expire(509.9) == 0
    assert directory.expire(510.0) == 1


def test_the_timers_of_a_worker_that_left_do_not_outlive_their_time():
    lives = [make_instance(incarnation=one)[0] for one in range(1, 7)]
    directory = Directory(10.0)
    for life in lives[:5]:
        directory.register(life, 0.0)
        directory.withdraw(life.key, 0.0)
    directory.register(lives[5], 5.0)
    assert directory.expire(10.0) == 0
    assert len(directory._deadlines) == 1


def test_a_full_directory_refuses_strangers_and_keeps_its_own():
    first, second = make_instance()
    directory = Directory(10.0, max_workers=1)
    directory.register(first, 0.0)
    with pytest.raises(InvalidInput, match="all this service keeps"):
        directory.register(second, 0.0)
    with pytest.raises(InvalidInput):
        directory.register(replace(second, instance="other"), 0.0)
    with pytest.raises(UnknownInstance):
        directory.resolve("other", 0.0)
    assert directory.register(replace(first, rank=replace(first.rank, incarnation=2)), 0.0) is True


def test_registrations_are_bounded_in_bytes_too_and_give_them_back():
    first, second = make_instance()
    directory = Directory(10.0, max_bytes=100)
    directory.register(first, 0.0, num_bytes=60)
    for num_bytes in (41, 101):
        with pytest.raises(InvalidInput, match="take 60 bytes"):
            directory.register(second, 0.0, num_bytes=num_bytes)
    larger = replace(first, rank=replace(first.rank, incarnation=2))
    directory.register(larger, 0.0, num_bytes=100)
    directory.withdraw(larger.key, 0.0)
    directory.register(second, 0.0, num_bytes=100)
    assert directory.expire(11.0) == 1
    assert directory._num_bytes == 0


def test_thousands_of_ranks_register_and_resolve():
    registrations = make_instance(make_layout(78), ParallelSizes(dp=64, cp=8, tp=8))
    directory = filled(registrations)
    assert all(directory.renew(one.key, 5.0) is LeaseStatus.RENEWED for one in registrations)
    assert len(directory.resolve(NAME, 14.0).ranks) == 4096
    assert directory.expire(15.0) == 4096


MINE, THEIRS = Claim(b"m" * 32), Claim(b"t" * 32)


def test_a_registration_is_changed_renewed_and_withdrawn_by_its_owner_only():
    first, second = make_instance()
    directory = Directory(10.0)
    for one in (first, second):
        directory.register(one, 0.0, MINE)
    before = directory.resolve(NAME, 1.0)
    other = replace(first, rank=replace(first.rank, transports={"nixl": b"elsewhere"}))
    for claim in (THEIRS, Claim()):
        for registration in (first, other):
            with pytest.raises(NotOwner, match=r"'w0' .* is registered by another process"):
                directory.register(registration, 1.0, claim)
        assert directory.renew(first.key, 1.0, claim) is LeaseStatus.NOT_OWNER
        with pytest.raises(NotOwner, match="another process's to withdraw"):
            directory.withdraw(first.key, 1.0, claim)
    assert directory.resolve(NAME, 1.0) == before
    assert directory.register(other, 1.0, MINE) is True
    assert directory.renew(first.key, 9.0, MINE) is LeaseStatus.RENEWED
    assert directory.withdraw(first.key, 9.0, MINE)


def test_what_a_peer_without_owner_keys_registers_is_not_for_one_with_a_key_to_take():
    first = make_instance()[0]
    directory = Directory(10.0)
    directory.register(first, 0.0)
    with pytest.raises(NotOwner):
        directory.register(first, 0.0, THEIRS)
    assert directory.renew(first.key, 0.0) is LeaseStatus.RENEWED
    assert directory.withdraw(first.key, 0.0)


def test_a_life_that_withdrew_or_was_replaced_does_not_come_back_even_with_its_own_key():
    old, new = (make_instance(incarnation=one)[0] for one in (1, 2))
    directory = Directory(10.0)
    directory.register(old, 0.0, MINE)
    directory.register(new, 1.0, THEIRS)
    directory.withdraw(new.key, 2.0, THEIRS)
    for life, claim in ((old, MINE), (new, THEIRS)):
        with pytest.raises(StaleIncarnation, match="has withdrawn or was replaced"):
            directory.register(life, 3.0, claim)
    with pytest.raises(UnknownInstance):
        directory.resolve(NAME, 3.0)
    directory.register(make_instance(incarnation=3)[0], 3.0, THEIRS)


def test_a_life_whose_lease_ran_out_may_register_again():
    first = make_instance()[0]
    directory = Directory(10.0)
    directory.register(first, 0.0, MINE)
    assert directory.expire(10.0) == 1
    assert directory.register(first, 11.0, MINE) is True


def test_a_newer_process_replaces_an_older_one_only_under_the_same_certificate():
    old, new = (make_instance(incarnation=one)[0] for one in (1, 2))
    directory = Directory(10.0)
    directory.register(old, 0.0, replace(MINE, identity="node-a"))
    for identity in ("node-b", ""):
        with pytest.raises(NotOwner, match="another certificate"):
            directory.register(new, 1.0, replace(THEIRS, identity=identity))
    assert directory.register(new, 1.0, replace(THEIRS, identity="node-a")) is True
    directory.expire(11.0)
    newest = make_instance(incarnation=3)[0]
    assert directory.register(newest, 11.0, replace(MINE, identity="node-b")) is True  # its place was free


def test_lives_that_ended_are_remembered_for_a_time_and_in_bounded_number():
    lives = [make_instance(incarnation=one)[0] for one in range(1, 9)]
    directory = Directory(10.0, max_workers=4)
    for life in lives:
        directory.register(life, 0.0)
    assert len(directory._gone) == 4
    directory.expire(GONE_TTL_S)
    assert directory._gone == {}
    assert directory.register(lives[7], GONE_TTL_S) is True
