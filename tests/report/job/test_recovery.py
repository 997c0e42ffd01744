"""Recoveries from ledgers: what caused each, how long training stopped, and what interrupts nothing."""

from __future__ import annotations

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.recovery import recoveries
from spotkeeper.report.money.money import stopped
from tests.report.ledgers import (
    HOUR,
    NOTICED,
    A,
    entry,
    generation,
    intent,
    lost,
)


def test_a_recovery_from_a_notice() -> None:
    (one,) = recoveries(NOTICED, now=9 * HOUR)
    assert (one.cause, one.announced, one.nodes, one.gen) == ("notice", True, (0,), 2)
    assert (one.seconds, one.stopped_s, one.boot_s) == (76.0, 10.0, 60.0)
    assert (one.replacement, one.zone) == (Model.SPOT, A)


def test_recoveries_from_losses() -> None:
    (one,) = recoveries(lost(1), now=600.0)
    assert (one.cause, one.announced, one.nodes) == ("loss", False, (1,))
    assert (one.seconds, one.stopped_s, one.boot_s, one.replacement) == (50.0, 50.0, 40.0, Model.ON_DEMAND)
    (two,) = recoveries(lost(1, 2), now=600.0)
    assert (two.cause, two.nodes) == ("loss of 2", (1, 2))


def test_an_announced_loss_is_one_recovery() -> None:
    ledger = (generation(100.0, 1), entry(Event.NOTICE, 400.0, 1, 1), *lost(1, cause="notice")[1:])
    (one,) = recoveries(ledger, now=600.0)
    assert (one.cause, one.announced, one.seconds) == ("notice", True, 150.0)


def test_a_change_without_interruption_is_no_recovery() -> None:
    withdrawn = (entry(Event.NOTICE, 200.0, 0, 1), entry(Event.REPRIEVE, 210.0, 0, 1))
    standby = entry(Event.LOSS, 300.0, 0, 2, cause="standby")
    assert recoveries((generation(100.0, 1), *withdrawn, standby), now=400.0) == ()
    assert recoveries((intent(0.0, 0, 1), generation(100.0, 1)), now=400.0) == ()


def test_a_running_recovery_has_no_end() -> None:
    (one,) = recoveries(lost(1)[:-1], now=560.0)
    assert (one.seconds, one.stopped_s, one.gen) == (None, 60.0, 1)


def test_a_crash_and_a_swap_have_their_causes() -> None:
    crash = (entry(Event.CRASH, 200.0, 0, cause="crash"), generation(210.0, 2))
    swap = (intent(300.0, 0, 2, cause="swap"), entry(Event.STOP, 400.0, cause="swap"), generation(410.0, 3))
    found = recoveries((generation(100.0, 1), *crash, *swap), now=500.0)
    told = [(one.cause, one.stopped_s, one.announced, one.nodes) for one in found]
    assert told == [("crash", 10.0, False, (0,)), ("swap", 10.0, True, ())], "whose code failed is said"


def test_a_crash_is_separate_from_a_running_swap() -> None:
    """It stood still since its process ended, which the roll call is about; the machine that boots is the swap's."""
    swap = intent(200.0, 0, 2, cause="swap to spot")
    rolled = entry(Event.ROLL, 210.0, cause="exit")
    crash = (entry(Event.CRASH, 213.0, 0, cause="crash"), entry(Event.STOP, 213.0, cause="crash"), generation(233.0, 2))
    up = (entry(Event.ADMITTED, 347.0, 0, 2), entry(Event.STOP, 347.0, cause="swap"))
    over = (entry(Event.PROMOTED, 350.0, 0, 2, cause="swap to spot"), generation(355.0, 3))
    one, two = recoveries((generation(100.0, 1), swap, rolled, *crash, *up, *over), now=400.0)
    assert (one.cause, one.seconds, one.stopped_s, one.boot_s, one.replacement) == ("crash", 23.0, 23.0, None, None)
    assert (two.cause, two.seconds, two.boot_s, two.replacement) == ("swap", 8.0, 147.0, Model.SPOT)


def test_a_withdrawn_swap_is_shown_as_withdrawn() -> None:
    """All saved and stopped, the successor was lost, and the same machines went on: nothing was replaced."""
    stop = (
        intent(200.0, 0, 2, cause="swap"),
        entry(Event.ADMITTED, 300.0, 0, 2),
        entry(Event.STOP, 300.0, cause="swap"),
    )
    back = (
        entry(Event.LOSS, 302.0, 0, 2, cause="standby"),
        entry(Event.GENERATION, 308.0, gen=2, cause="stop withdrawn"),
    )
    (one,) = recoveries((generation(100.0, 1), *stop, *back), now=400.0)
    assert (one.cause, one.announced, one.stopped_s) == ("swap, withdrawn", True, 8.0)
    assert (one.nodes, one.boot_s, one.replacement) == ((), None, None)
    refused = (intent(400.0, 0, 3, cause="swap"), entry(Event.REFUSED, 401.0, 0, 3, cause="capacity"))
    assert recoveries((generation(100.0, 1), *refused), now=500.0) == ()


def test_a_later_machine_belongs_to_no_earlier_recovery() -> None:
    """An elastic job went on smaller, and grew when the machine was up."""
    lost_one = (entry(Event.LOSS, 200.0, 1, 1, cause="loss"), entry(Event.STOP, 200.0, cause="loss"))
    grown = (entry(Event.ADMITTED, 400.0, 1, 2), entry(Event.STOP, 400.0, cause="grow"), generation(410.0, 3))
    ledger = (generation(100.0, 1), *lost_one, intent(201.0, 1, 2, cause="loss"), generation(260.0, 2), *grown)
    one, two = recoveries(ledger, now=500.0)
    assert (one.cause, one.replacement, one.boot_s) == ("loss", None, None)
    assert (two.cause, two.replacement, two.boot_s) == ("grow", Model.SPOT, 199.0)


def test_a_pause_is_no_recovery_but_a_loss_beside_it_is() -> None:
    pause = (entry(Event.STOP, 200.0, cause="pause"), entry(Event.HOLD, 210.0, cause="pause"))
    assert recoveries((generation(100.0, 1), *pause, generation(900.0, 2)), now=950.0) == ()
    assert recoveries((generation(100.0, 1), *pause), now=950.0) == ()
    loss = entry(Event.LOSS, 205.0, 0, 1, cause="loss")
    (one,) = recoveries((generation(100.0, 1), *pause, loss, generation(900.0, 2)), now=950.0)
    assert (one.cause, one.announced) == ("loss", False)


def test_the_time_on_hold_is_no_recovery() -> None:
    crash = entry(Event.CRASH, 200.0, 0, cause="crash")
    failed = entry(Event.HOLD, 200.0, 0, cause="failure")
    story = (generation(100.0, 1), crash, failed, entry(Event.RESUME, 9e5, cause="resume"), generation(9e5 + 60, 2))
    assert recoveries(story, now=1e6) == ()
    assert len(recoveries((*story[:2], *story[4:]), now=1e6)) == 1, "a crash that the budget covers is one"
    assert stopped(story, now=1e6) == ((200.0, 9e5 + 60),), "nor does on-demand pay for them"
