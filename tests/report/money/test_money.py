"""What a job cost and what it would have cost on-demand, by arithmetic that a reader can redo."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.report.html import job as html
from spotkeeper.report.job.lines import money_line
from spotkeeper.report.job.view import job_view
from spotkeeper.report.money.account import account
from spotkeeper.report.money.money import attempts, first_of_each, minus, money, seconds, stopped, union
from spotkeeper.report.text.render import job_table, live, status
from spotkeeper.report.text.words import usd
from tests.contract.samples import STACK
from tests.report.ledgers import (
    HOUR,
    NOTICED,
    a_record,
    entry,
    generation,
    held,
    intent,
    printed,
    report,
)


def spent_on(model: Model, ledger: tuple[Entry, ...], now: float) -> float:
    return sum(machine.cost(now) for machine in attempts(ledger) if machine.model is model)


def test_money_of_a_noticed_machine() -> None:
    """Both machines are paid while they overlap, whatever they cost an hour; nothing that is undisturbed has two, or
    the stop of 10 s, and so that is another figure."""
    found = money(NOTICED, STACK, now=9 * HOUR)
    paid_s = (HOUR + 120) + (HOUR + 25)
    assert found.spent == pytest.approx(paid_s / HOUR * 1.0)
    assert spent_on(Model.SPOT, NOTICED, 9 * HOUR) == found.spent
    needed_s = 2 * HOUR + 30 - 10
    assert found.on_demand_only == pytest.approx(paid_s / HOUR * 3.0)
    assert found.undisturbed == pytest.approx(needed_s / HOUR * 3.0)
    assert found.saved_percent == pytest.approx(100 * (1 - found.spent / found.on_demand_only))


def test_boots_and_standstills_are_in_both_costs() -> None:
    """A storm: machines that boot and are taken, a static node that waits beside them. All of it at a third."""
    static = intent(0.0, 1, 1, price=3.0, model=Model.STATIC)
    storm = [part for n in range(1, 9) for part in (intent(300.0 * n, 0, n), entry(Event.LOSS, 300.0 * n + 250, 0, n))]
    gone = [entry(Event.GONE, 300.0 * n + 290, 0, n) for n in range(1, 9)]
    begun, stop = generation(350.0, 1), entry(Event.STOP, 400.0, cause="loss")
    ledger = (static, entry(Event.ADMITTED, 1.0, 1, 1), *storm, *gone, begun, stop, entry(Event.END, 2700.0))
    found = money(ledger, STACK, now=2700.0)
    assert found.undisturbed < found.spent < found.on_demand_only
    assert found.saved_percent is not None and 0.0 < found.saved_percent < 67.0
    view = job_view(a_record(), None, ledger, STACK, now=2700.0)
    assert " % more" not in printed(report(view))
    assert f"uninterrupted on-demand machines for the same training time: {usd(found.undisturbed)}" in printed(
        report(view)
    )


def test_a_removed_pools_spot_price_is_no_on_demand_price() -> None:
    """The pool was renamed under a job: the machine it had there does not make on-demand as cheap as spot."""
    renamed = tuple(
        msgspec.structs.replace(one, pool="gone") if one.event is Event.INTENT and one.attempt == 1 else one
        for one in NOTICED
    )
    assert money(renamed, STACK, now=9 * HOUR) == money(NOTICED, STACK, now=9 * HOUR)


def test_running_machines_are_paid_until_now() -> None:
    found = money((intent(0.0, 0, 1), entry(Event.ADMITTED, 60.0, 0, 1)), STACK, now=HOUR)
    assert found.spent == pytest.approx(1.0)


def test_refused_machines_cost_nothing() -> None:
    ledger = (intent(0.0, 0, 1), entry(Event.REFUSED, 30.0, 0, 1), intent(31.0, 0, 2, price=3.0, model=Model.ON_DEMAND))
    assert money(ledger, STACK, now=31.0 + HOUR).spent == pytest.approx(3.0)
    assert spent_on(Model.SPOT, ledger, now=31.0 + HOUR) == 0.0


def test_a_machine_that_booted_and_never_joined_is_paid() -> None:
    ledger = (intent(0.0, 0, 1), entry(Event.LOSS, 500.0, 0, 1, cause="never joined"), entry(Event.GONE, HOUR, 0, 1))
    assert money(ledger, STACK, now=2 * HOUR).spent == pytest.approx(1.0)


def test_billing_begins_when_the_cloud_made_the_machine() -> None:
    ledger = (intent(0.0, 0, 1), entry(Event.ADMITTED, 100.0, 0, 1, started=40.0), entry(Event.GONE, HOUR + 40, 0, 1))
    assert money(ledger, STACK, now=2 * HOUR).spent == pytest.approx(1.0)


def test_an_event_that_was_written_twice_counts_once() -> None:
    twin = msgspec.structs.replace(NOTICED[9], at=NOTICED[9].at + 50)  # the same GONE, later
    assert money((*NOTICED, twin), STACK, 9 * HOUR) == money(NOTICED, STACK, 9 * HOUR)


def test_on_demand_only_uses_list_prices() -> None:
    static = intent(0.0, 0, 1, price=2.5, model=Model.STATIC)
    found = money((static, entry(Event.ADMITTED, 1.0, 0, 1)), STACK, now=HOUR)
    assert (found.spent, found.on_demand_only) == (pytest.approx(2.5), pytest.approx(3.0))
    assert money((static, entry(Event.ADMITTED, 1.0, 0, 1)), None, now=HOUR).on_demand_only == pytest.approx(2.5)


def test_an_empty_ledger_costs_nothing() -> None:
    found = money((), STACK, now=HOUR)
    assert (found.spent, found.on_demand_only, found.saved_percent) == (0.0, 0.0, None)


@pytest.mark.parametrize("now", [50.0, 100.0, 699.0])
def test_no_saving_is_shown_at_first(now: float) -> None:
    """A machine that never joined is paid for beside the one that trains: at first that is all there is to compare."""
    ledger = (intent(0.0, 0, 1, price=9.0), *(one for one in NOTICED if one.at <= now))
    view = job_view(a_record(), None, ledger, STACK, now)
    assert view.money.spent > 0.0
    assert msgspec.json.decode(msgspec.json.encode(view))["money"]["saved_percent"] is None
    for text in (printed(live(view)), printed(status(view)), printed(report(view)), printed(job_table([view]))):
        assert "%" not in text
    assert "too early to estimate the saving" in printed(status(view))


def test_a_missing_saving_is_explained_for_a_job_that_stands() -> None:
    begun = tuple(one for one in NOTICED if one.at <= 100.0)
    ended = {"phase": Phase.END, "outcome": Outcome.CANCELLED}
    cases = (
        (held(), (), "no machine was billed yet"),
        (held(), (*begun, entry(Event.STOP, 400.0)), "trained for less than 10 minutes, so no saving is estimated"),
        (a_record(**ended), begun[:2], "nothing was trained, so no saving is estimated"),
        (a_record(**ended), (), "no machine was billed"),
    )
    for record, ledger, why in cases:
        view = job_view(record, None, ledger, STACK, 9 * HOUR)
        assert money_line(view).partition(", ")[2] == why
        assert f">{why}<" in html.figures(view, account(view, ledger, 9 * HOUR))


def test_savings_are_shown_after_ten_minutes_or_at_the_end() -> None:
    begun = tuple(one for one in NOTICED if one.at <= 100.0)
    assert money(begun, STACK, 700.0).saved_percent is not None
    assert money((*begun, entry(Event.STOP, 400.0)), STACK, 9 * HOUR).saved_percent is None, "it stands still"
    assert money((*begun, entry(Event.END, 400.0)), STACK, 9 * HOUR).saved_percent is not None
    assert money((intent(0.0, 0, 1), entry(Event.END, 400.0)), STACK, 9 * HOUR).saved_percent is None


def test_stopped_spans_end_with_the_generation_or_the_job() -> None:
    ledger = (entry(Event.STOP, 10.0), entry(Event.CRASH, 11.0), generation(20.0, 2), entry(Event.STOP, 30.0))
    assert stopped(ledger, now=35.0) == ((10.0, 20.0), (30.0, 35.0))


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda s: (float(s[0]), float(s[0] + s[1]))))


@given(SPANS, SPANS)
def test_spans_are_sets_of_moments(one: list[tuple[float, float]], two: list[tuple[float, float]]) -> None:
    def cells(spans: object) -> set[int]:
        return {cell for start, end in spans for cell in range(int(start), int(end))}  # type: ignore[attr-defined]

    assert cells(union(one)) == cells(one)
    assert seconds(union(one)) == len(cells(one))
    assert cells(minus(one, two)) == cells(one) - cells(two)


def test_simultaneous_events_are_ordered_by_cause() -> None:
    ledger = (generation(5.0, 2), intent(5.0, 1, 2), entry(Event.STOP, 5.0), entry(Event.LOSS, 5.0, 1, 1))
    assert [one.event.value for one in first_of_each(ledger)] == ["loss", "stop", "generation", "intent"]


def test_attempts_without_an_intent_are_unknown() -> None:
    assert attempts((entry(Event.ADMITTED, 5.0, 0, 1),)) == ()
