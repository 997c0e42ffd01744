"""The life of every machine as bars: each second once, and what the marks say."""

from __future__ import annotations

from itertools import pairwise

from spotkeeper.contract.ledger import Event
from spotkeeper.report.html import svg
from spotkeeper.report.job.timeline import BarKind, resumed_steps, timeline
from spotkeeper.report.money.money import attempts, money, over_time
from tests.report.ledgers import HOUR, NOTICED, SILENT, entry, generation, intent

END = 2 * HOUR + 31


def test_a_noticed_machine_and_its_replacement() -> None:
    view = timeline(NOTICED, END)
    first = [(bar.kind, bar.start, bar.end) for bar in view.bars if bar.attempt == 1]
    assert first == [
        (BarKind.BOOT, 0.0, 60.0),
        (BarKind.READY, 60.0, 100.0),
        (BarKind.TRAIN, 100.0, HOUR),
        (BarKind.NOTICE, HOUR, HOUR + 5),
        (BarKind.NOTICE, HOUR + 5, HOUR + 66),
        (BarKind.SAVE, HOUR + 66, HOUR + 76),
        (BarKind.READY, HOUR + 76, HOUR + 120),
    ]
    second = [bar for bar in view.bars if bar.attempt == 2]
    assert [bar.kind for bar in second][:1] == [BarKind.BOOT] and BarKind.TRAIN in {bar.kind for bar in second}
    assert [(mark.event, mark.at) for mark in view.marks] == [(Event.NOTICE, HOUR), (Event.PROMOTED, HOUR + 70)]
    assert [number for _, number, _ in view.starts] == [1, 2]
    assert (view.start, view.end, view.nodes) == (0.0, END, (0,))


def test_charts_mark_each_step_at_which_a_later_generation_resumed() -> None:
    """Not the step of its first checkpoint; nor one twice, if two generations resumed there."""
    ledger = [
        entry(Event.GENERATION, 0.0, gen=1, step=0),
        *(
            entry(event, 9.0, gen=number, step=7 * number)
            for number in (2, 3)
            for event in (Event.FIRST, Event.CHECKPOINT)
        ),
        *(entry(Event.GENERATION, float(number), gen=number, step=step) for number, step in ((2, 12), (3, 12), (4, 9))),
        entry(Event.GENERATION, 5.0, gen=5),
    ]
    assert resumed_steps(ledger) == [9.0, 12.0]


def test_two_machines_of_a_node_share_its_lane_while_both_exist() -> None:
    shared = {(bar.attempt, bar.row) for bar in timeline(NOTICED, END).bars if bar.shared}
    assert shared == {(1, 0), (2, 1)}
    alone = [bar for bar in timeline(NOTICED, END).bars if not bar.shared]
    assert all(bar.row == 0 for bar in alone)
    assert all(bar.end <= HOUR + 5 for bar in alone if bar.attempt == 1)


def test_each_second_of_a_machine_is_in_one_bar() -> None:
    view = timeline(NOTICED, END)
    for machine in attempts(NOTICED):
        bars = sorted((bar.start, bar.end) for bar in view.bars if bar.attempt == machine.attempt)
        assert all(before[1] == after[0] for before, after in pairwise(bars))
        assert (bars[0][0], bars[-1][1]) == (machine.asked, machine.end)


def test_a_lost_machine_leaves_and_a_refused_one_never_was() -> None:
    ledger = (
        intent(0.0, 0, 1),
        entry(Event.ADMITTED, 60.0, 0, 1),
        generation(100.0, 1),
        entry(Event.LOSS, 500.0, 0, 1, cause="loss"),
        entry(Event.STOP, 500.0, cause="loss"),
        intent(500.0, 0, 2, cause="loss"),
        entry(Event.REFUSED, 520.0, 0, 2),
        entry(Event.GONE, 560.0, 0, 1),
    )
    kinds = {(bar.attempt, bar.kind): (bar.start, bar.end) for bar in timeline(ledger, 600.0).bars if not bar.shared}
    every = {(bar.attempt, bar.kind) for bar in timeline(ledger, 600.0).bars}
    assert (1, BarKind.LEAVE) in every and (2, BarKind.REFUSED) in every
    assert kinds[1, BarKind.TRAIN] == (100.0, 500.0)


def test_a_machine_that_never_joined_has_a_bar_of_its_own_kind() -> None:
    bars = [(bar.kind, bar.start, bar.end) for bar in timeline(SILENT, 1500.0).bars if bar.attempt == 2]
    assert (BarKind.NEVER, 501.0, 1400.0) in bars and (BarKind.LEAVE, 1400.0, 1430.0) in bars
    assert BarKind.BOOT not in [kind for kind, *_ in bars]
    assert "node 1, attempt 2: boots, but never joins, for 14m59s" in svg.timeline(timeline(SILENT, 1500.0))


def test_the_time_of_a_hold_without_machines_is_not_drawn() -> None:
    up = (intent(0.0, 0, 1), entry(Event.ADMITTED, 60.0, 0, 1), generation(100.0, 1))
    held = (*up, entry(Event.HOLD, 500.0, cause="pause"))
    assert timeline(held, 9 * HOUR).end == 9 * HOUR, "its machine is not deleted yet"
    deleted = (*held, entry(Event.GONE, 540.0, 0, 1))
    assert timeline(deleted, 9 * HOUR).end == 540.0
    resumed = (*deleted, entry(Event.RESUME, 600.0, cause="resume"))
    assert timeline(resumed, 9 * HOUR).end == 9 * HOUR, "it waits for a machine"


def test_the_money_over_time_ends_at_what_status_shows() -> None:
    now = HOUR + 50
    points = over_time(NOTICED[:6], None, now)
    told = money(NOTICED[:6], None, now)
    assert points[0][1:] == (0.0, 0.0)
    assert abs(points[-1][1] - told.spent) < 1e-9 and abs(points[-1][2] - told.on_demand_only) < 1e-9
    assert all(before[1] <= after[1] for before, after in pairwise(points))
