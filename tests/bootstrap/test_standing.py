"""What log and health say of a registration: trouble as a warning at once, not again with every try, and its end."""

import logging

from pdlink.address import Address
from pdlink.bootstrap.standing import GRACE_S, QUIET_TRIES, KeeperState, Teller, describe
from pdlink.errors import AccessDenied, DeadlineExceeded, InvalidInput, StaleIncarnation
from pdlink.sparse_log import INTERVAL_S

HERE, THERE = Address("127.0.0.1", 7400), Address("127.0.0.1", 7401)
REGISTERED, UNREACHABLE = KeeperState.REGISTERED, KeeperState.UNREACHABLE
REFUSED, REPLACED, STARTING = KeeperState.REFUSED, KeeperState.REPLACED, KeeperState.STARTING


class Told:
    def __init__(self, caplog):
        self.now, self.caplog = 0.0, caplog
        caplog.set_level(logging.INFO)
        self.teller = Teller("p/dp0.pp0.cp0.tp0", HERE, lambda: self.now)

    def __call__(self, state, error=None, *, moved=False):
        """The warnings of one step."""
        self.caplog.clear()
        self.teller.tell(state, error, moved=moved)
        return [one.message for one in self.caplog.records if one.levelno >= logging.WARNING]


def test_each_reason_of_a_refusal_is_a_warning_at_once_and_then_once_in_a_while(caplog):
    tell = Told(caplog)
    (line,) = tell(REFUSED, AccessDenied("no token"), moved=True)
    assert line.startswith("worker p/dp0.pp0.cp0.tp0 is not registered at bootstrap 127.0.0.1:7400: refused (no token)")
    assert not tell(REFUSED, AccessDenied("no token"))
    (line,) = tell(REFUSED, InvalidInput("rank is held"))
    assert "rank is held" in line
    tell.now = INTERVAL_S
    (line,) = tell(REFUSED, AccessDenied("no token"))
    assert "(1 more since" in line


def test_a_service_that_stays_away_is_a_warning_and_so_is_its_return(caplog):
    tell, away = Told(caplog), DeadlineExceeded("nothing listens")
    for number in range(QUIET_TRIES):
        assert not tell(UNREACHABLE, away, moved=number == 0)
    assert not tell(REGISTERED, moved=True)  # nobody was worried
    for _ in range(QUIET_TRIES):
        assert not tell(UNREACHABLE, away)
    (line,) = tell(UNREACHABLE, away)
    assert "unreachable (nothing listens)" in line
    assert not tell(UNREACHABLE, away)
    (line,) = tell(REGISTERED, moved=True)
    assert line.endswith("127.0.0.1:7400: registered")
    assert not tell(REGISTERED)


def test_being_replaced_is_a_warning_that_says_what_to_do(caplog):
    (line,) = Told(caplog)(REPLACED, StaleIncarnation("a newer process"), moved=True)
    assert "replaced (a newer process)" in line
    assert "give it a name of its own" in line


def test_a_rank_that_is_registered_nowhere_is_unwell_after_a_grace_or_a_refusal():
    assert describe({HERE: STARTING, THERE: UNREACHABLE}, {}, GRACE_S / 2)[1] is False
    text, is_unwell = describe({HERE: STARTING, THERE: UNREACHABLE}, {THERE: DeadlineExceeded("gone")}, GRACE_S)
    assert is_unwell
    assert text == f"registered nowhere: bootstrap {HERE} starting: no answer yet; bootstrap {THERE} unreachable: gone"
    assert describe({HERE: REFUSED}, {HERE: AccessDenied("no token")}, 0.0)[1] is True


def test_a_rank_that_is_registered_at_one_of_several_is_well_and_names_the_others():
    text, is_unwell = describe({HERE: REGISTERED, THERE: REFUSED}, {THERE: AccessDenied("no token")}, 0.0)
    assert (text, is_unwell) == (f"not registered everywhere: bootstrap {THERE} refused: no token", False)
    assert describe({HERE: REGISTERED, THERE: REGISTERED}, {}, 0.0) == ("", False)
    assert describe({HERE: REGISTERED, THERE: REPLACED}, {}, 0.0)[1] is True


def test_a_dead_thread_and_a_closed_registration_are_left_to_others_to_tell():
    assert describe({HERE: KeeperState.DEAD, THERE: KeeperState.CLOSED}, {}, GRACE_S) == ("", False)
