"""Accounts from ledgers written by hand: each machine's end, each paid second in one part, sums by user and month."""

from __future__ import annotations

import csv
import io

import pytest
from msgspec.structs import replace

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.events import event_lines
from spotkeeper.report.job.recovery import Recovery
from spotkeeper.report.job.view import job_view
from spotkeeper.report.job.worktime import WorkPart, pieces
from spotkeeper.report.money import account_text
from spotkeeper.report.money.account import UNKNOWN_USER, Account, AttemptLine, Totals, account, shares, totals
from spotkeeper.report.money.money import HOUR_S, attempts, first_of_each, over_time
from tests.contract.samples import STACK
from tests.report.ledgers import HOUR, NOTICED, SILENT, A, a_record, entry, generation, intent, printed

NOW = 9 * HOUR


def told(ledger: tuple[Entry, ...], now: float = NOW) -> Account:
    return account(job_view(a_record(), None, ledger, STACK, now), ledger, now)


def parts(ledger: tuple[Entry, ...], now: float = NOW) -> dict[tuple[int, WorkPart, str], float]:
    entries = first_of_each(ledger)
    out: dict[tuple[int, WorkPart, str], float] = {}
    for piece in pieces(entries, attempts(entries), now):
        key = piece.machine.attempt, piece.part, piece.cause
        out[key] = out.get(key, 0.0) + piece.seconds
    return {key: seconds for key, seconds in out.items() if seconds}


def test_every_second_of_a_noticed_machine_and_its_replacement_is_counted() -> None:
    """Make before break: the old machine trains on while the new one boots, and stands still for 10 s only."""
    assert parts(NOTICED) == {
        (1, WorkPart.BOOTING, "start"): 60.0,
        (1, WorkPart.STANDING_STILL, "start"): 40.0,
        (1, WorkPart.TRAINED, ""): HOUR + 66 - 100,
        (1, WorkPart.STANDING_STILL, "notice"): 10.0,
        (1, WorkPart.LEAVING, "notice"): 44.0,
        (2, WorkPart.BOOTING, "notice"): 60.0,
        (2, WorkPart.STANDING_BY, "notice"): 1.0,
        (2, WorkPart.STANDING_STILL, "notice"): 10.0,
        (2, WorkPart.TRAINED, ""): 2 * HOUR - (HOUR + 76),
        (2, WorkPart.LEAVING, "succeeded"): 30.0,
    }


def test_a_restart_lasts_until_its_first_step() -> None:
    """Processes that meet and load a checkpoint do not train: report, trace and exporter say the same."""
    first = [replace(entry(Event.FIRST, at), gen=gen) for gen, at in ((1, 130.0), (2, HOUR + 116))]
    found = parts((*NOTICED, *first))
    assert found[1, WorkPart.STANDING_STILL, "start"] == 70.0
    assert found[1, WorkPart.TRAINED, ""] == HOUR + 66 - 130
    assert found[2, WorkPart.STANDING_STILL, "notice"] == 50.0
    assert found[2, WorkPart.TRAINED, ""] == 2 * HOUR - (HOUR + 116)
    (one,) = told((*NOTICED, *first)).recoveries
    row = account_text.recovery_row(one)
    assert (row["notice"], row["stood still"], row["took"]) == ("1m06s", "50s", "1m56s")


def test_a_loss_without_a_notice_shows_no_save() -> None:
    """A recovery has the newest measured save, but nothing could be saved after a loss."""
    one = Recovery("loss", False, (1,), 2, 50.0, 50.0, save_s=3.0, start_s=4.0)
    assert account_text.recovery_row(one)["save"] == "-"
    assert account_text.recovery_row(replace(one, announced=True))["save"] == "3s"


def test_the_parts_add_up_to_what_was_spent() -> None:
    found = told(NOTICED)
    lost = sum(line.usd for line in found.lost)
    assert found.goodput == pytest.approx((2 * HOUR - 176 + 66) / HOUR / found.node_hours)
    assert lost + found.goodput * found.node_hours * 1.0 == pytest.approx(found.money.spent)
    assert sum(line.usd for line in found.attempts) == pytest.approx(found.money.spent)
    assert [(line.ended, line.model) for line in found.attempts] == [("notice", Model.SPOT), ("succeeded", Model.SPOT)]


def test_steps_that_are_done_again_are_lost_by_every_member() -> None:
    lost_at, again = 1100.0, 30
    up = [part for node in (0, 1) for part in (intent(0.0, node, 1), entry(Event.ADMITTED, 60.0, node, 1))]
    ledger = (
        *up,
        generation(100.0, 1),
        entry(Event.LOSS, lost_at, 1, 1, cause="loss"),
        entry(Event.STOP, lost_at, cause="loss"),
        entry(Event.GONE, lost_at + 50, 1, 1, ended=lost_at),
        intent(lost_at, 1, 2, cause="loss"),
        entry(Event.ADMITTED, lost_at + 60, 1, 2),
        replace(generation(lost_at + 70, 2), step=500, again=again, step_s=2.0, save_s=3.0),
        replace(entry(Event.FIRST, lost_at + 74), gen=2),
    )
    entries = first_of_each(ledger)
    found = [piece for piece in pieces(entries, attempts(entries), NOW) if piece.part is WorkPart.AGAIN]
    assert [(piece.machine.node, piece.seconds, piece.cause) for piece in found] == [
        (0, 60.0, "loss"),
        (1, 60.0, "loss"),
    ]
    whole = told(ledger)
    assert whole.steps_again == again
    (one,) = whole.recoveries
    assert (one.save_s, one.start_s, one.steps_again, one.notice_s) == (3.0, 4.0, again, None)
    gone = whole.attempts[1]
    assert (gone.node, gone.attempt, gone.ended, gone.hours * HOUR_S) == (1, 1, "loss", lost_at)
    assert "30 steps done twice" in printed(account_text.report(job_view(a_record(), None, ledger, STACK, NOW), whole))


def test_a_machine_that_never_joined_is_paid_and_named() -> None:
    never = entry(Event.LOSS, 500.0, 0, 1, cause="never joined", detail="no hello in time", started=20.0)
    ledger = (
        intent(0.0, 0, 1),
        never,
        entry(Event.GONE, 560.0, 0, 1, ended=540.0),
        intent(505.0, 0, 2, cause="loss"),
        entry(Event.ADMITTED, 560.0, 0, 2),
        generation(570.0, 1),
    )
    found = told(ledger, HOUR)
    first = found.attempts[0]
    assert (first.ended, first.joined, first.hours * HOUR_S) == ("never joined: no hello in time", None, 520.0)
    assert found.never_joined == 1
    lost = {(line.part, line.cause): line.node_hours * HOUR_S for line in found.lost}
    assert lost[WorkPart.NEVER_JOINED, "start"] == 520.0
    text = printed(account_text.report(job_view(a_record(), None, ledger, STACK, HOUR), found))
    assert "training was never interrupted; 1 machine never joined" in text


def test_a_recovery_names_the_machines_that_never_joined() -> None:
    (one,) = told(SILENT, HOUR).recoveries
    row = account_text.recovery_row(one)
    assert row["replaced by"] == f"spot in {A}, 1 never joined" and "repeated" in row


def test_a_machine_without_a_hello_is_paid_by_the_clouds_times() -> None:
    """It was given up while it booted, so no event but its end tells of it."""
    silent = (intent(0.0, 0, 1), entry(Event.GONE, 200.0, 0, 1))
    assert told(silent).money.spent == 0.0
    ran = (intent(0.0, 0, 1), entry(Event.GONE, 200.0, 0, 1, started=20.0, ended=140.0))
    assert told(ran).money.spent == pytest.approx(120.0 / HOUR)
    assert told(ran).attempts[0].ended == "given up"


def test_billing_ends_at_the_clouds_time() -> None:
    exact = tuple(
        replace(one, ended=HOUR + 100.0) if one.event is Event.GONE and one.attempt == 1 else one for one in NOTICED
    )
    assert told(NOTICED).money.spent - told(exact).money.spent == pytest.approx(20.0 / HOUR)


PROBED = (  # beside one that trains
    intent(0.0, 0, 1),
    entry(Event.ADMITTED, 60.0, 0, 1),
    generation(100.0, 1),
    intent(1000.0, 0, 2, cause="probe"),
    replace(entry(Event.ADMITTED, 1060.0, 0, 2), cause="probe"),
)


def test_a_probe_is_paid_and_no_replacement() -> None:
    """It boots beside one that trains, says that spot is there, and goes; what follows is no doing of its."""
    ledger = (
        *PROBED,
        entry(Event.LOSS, 1070.0, 0, 1, cause="loss"),
        entry(Event.GONE, 1070.0, 0, 1, ended=1070.0),
        entry(Event.STOP, 1070.0, cause="loss"),
        intent(1070.0, 0, 3, cause="loss"),
        entry(Event.ADMITTED, 1140.0, 0, 3),
        replace(generation(1150.0, 2), cause="loss"),
        entry(Event.GONE, 1170.0, 0, 2, ended=1165.0),
    )
    by_part = parts(ledger, now=2000.0)
    assert {key: seconds for key, seconds in by_part.items() if key[0] == 2} == {
        (2, WorkPart.BOOTING, "probe"): 60.0,
        (2, WorkPart.STANDING_STILL, "loss"): 80.0,
        (2, WorkPart.STANDING_BY, "probe"): 25.0,
    }
    assert by_part[3, WorkPart.TRAINED, ""] == 850.0
    found = told(ledger, now=2000.0)
    assert [line.ended for line in found.attempts] == ["loss", "probe ended", ""]
    (recovery,) = found.recoveries
    assert (recovery.boot_s, recovery.nodes) == (70.0, (0,))
    texts = [line.text for line in event_lines(ledger, 0.0)]
    assert "node 0: probing another zone with a spot machine in us-central1-a at $1.00/h" in texts


def test_a_probe_that_became_a_member_counts_as_training() -> None:
    ledger = (
        *PROBED,
        entry(Event.MOVE, 1060.0, cause="cheaper"),
        entry(Event.STOP, 1060.0, cause="move"),
        entry(Event.GONE, 1070.0, 0, 1, ended=1070.0),
        replace(entry(Event.PROMOTED, 1090.0, 0, 2), cause="move"),
        replace(generation(1090.0, 2), cause="move"),
        intent(2000.0, 0, 3, cause="swap"),
        entry(Event.ADMITTED, 2060.0, 0, 3),
        entry(Event.STOP, 2060.0, cause="swap"),
        replace(entry(Event.PROMOTED, 2070.0, 0, 3), cause="swap"),
        replace(generation(2070.0, 3), cause="swap"),
        entry(Event.GONE, 2080.0, 0, 2, ended=2080.0),
    )
    assert {key: seconds for key, seconds in parts(ledger, now=3000.0).items() if key[0] == 2} == {
        (2, WorkPart.BOOTING, "probe"): 60.0,
        (2, WorkPart.STANDING_STILL, "move"): 30.0,
        (2, WorkPart.TRAINED, ""): 970.0,
        (2, WorkPart.STANDING_STILL, "swap"): 10.0,
        (2, WorkPart.LEAVING, "swap"): 10.0,
    }
    found = told(ledger, now=3000.0)
    assert [line.ended for line in found.attempts] == ["replaced: move", "replaced: swap", ""]
    move, _ = found.recoveries
    assert (move.cause, move.boot_s, move.nodes) == ("move", 60.0, (0,))
    assert "goes" not in event_lines(ledger, 0.0)[4].text, "whether it does nobody knows yet"


def test_a_refused_machine_is_marked_and_costs_nothing() -> None:
    ledger = (intent(0.0, 0, 1), entry(Event.REFUSED, 30.0, 0, 1, cause="capacity"))
    found = told(ledger)
    assert (found.refused, found.attempts[0].ended, found.attempts[0].usd) == (1, "refused: capacity", 0.0)
    assert found.goodput is None


def test_a_released_machine_has_the_cause_move_or_hold() -> None:
    """And one of before that, or after it, does not."""
    ran = (intent(100.0, 0, 1), entry(Event.ADMITTED, 200.0, 0, 1), entry(Event.GONE, 900.0, 0, 1))
    assert told(ran).attempts[0].ended == "released"
    for event, cause in ((Event.MOVE, "stockout"), (Event.HOLD, "spend")):
        assert told((*ran, entry(event, 850.0, cause=cause))).attempts[0].ended == f"{event.value}: {cause}"
        assert told((*ran, entry(event, 50.0, cause=cause))).attempts[0].ended == "released"


def test_an_end_is_not_before_its_cause() -> None:
    """EC2's times have no fractions: the call that ends a machine comes milliseconds after the word for it."""
    ran = (intent(100.0, 0, 1), entry(Event.ADMITTED, 200.0, 0, 1), entry(Event.GONE, 960.0, 0, 1, ended=900.0))
    assert told((*ran, entry(Event.HOLD, 900.6, cause="spend"))).attempts[0].ended == "hold: spend"
    assert told((*ran, entry(Event.END, 900.6, cause="succeeded"))).attempts[0].ended == "succeeded"
    assert told((*ran, entry(Event.END, 905.0, cause="succeeded"))).attempts[0].ended == "released"


def by_month() -> Totals:
    """Two users; one machine over the turn of a month, 20 minutes before it and 40 after it."""
    turn = 1_798_761_600.0  # 2027-01-01T00:00:00Z
    ada = (
        replace(entry(Event.SUBMITTED, turn - 1200), by="ada"),
        intent(turn - 1200, 0, 1),
        entry(Event.ADMITTED, turn - 1100, 0, 1),
        entry(Event.GONE, turn + 2400, 0, 1),
    )
    bob = (
        intent(turn + 60, 0, 1, price=2.0),
        entry(Event.ADMITTED, turn + 90, 0, 1),
        entry(Event.GONE, turn + 3660, 0, 1),
    )
    now = turn + HOUR * 2
    return totals([told(ada, now), told(bob, now)], now)


def test_totals_by_user_and_month_add_up() -> None:
    found = by_month()
    assert [(row.key, round(row.usd, 6)) for row in found.users] == [("ada", 1.0), (UNKNOWN_USER, 2.0)]
    assert [(row.key, round(row.usd, 6), row.jobs) for row in found.months] == [
        ("2026-12", round(1 / 3, 6), 1),
        ("2027-01", round(2 / 3 + 2, 6), 2),
    ]
    for rows in (found.jobs, found.users, found.months):
        for name in ("node_hours", "usd", "on_demand_only", "lost_hours", "lost_usd", "saved"):
            assert sum(getattr(row, name) for row in rows) == pytest.approx(getattr(found.total, name))


def test_a_machine_without_an_end_counts_until_now() -> None:
    line = AttemptLine(0, 1, "p", A, Model.SPOT, "start", 1.0, 0.0, 0.0, 0.0, None, "", hours=1.0)
    assert shares(line, HOUR) == (("1970-01", 1.0),)


def test_a_clock_that_is_ahead_of_the_clouds_costs_no_minutes() -> None:
    """The function's is four minutes fast: the machine was on for an hour all the same."""
    fast = 240.0
    ledger = (
        intent(1000.0 + fast, 0, 1),
        entry(Event.ADMITTED, 1060.0 + fast, 0, 1, started=1001.0),
        entry(Event.GONE, 4700.0 + fast, 0, 1, started=1001.0, ended=4601.0),
    )
    (machine,) = attempts(ledger)
    assert machine.span(NOW) == (1001.0, 4601.0)


def test_a_static_machine_is_paid_from_its_grant() -> None:
    ledger = (
        replace(intent(1000.0, 0, 1), model=Model.STATIC),
        entry(Event.ADMITTED, 1060.0, 0, 1, started=5.0),
        entry(Event.GONE, 4600.0, 0, 1),
    )
    (machine,) = attempts(ledger)
    assert machine.span(NOW) == (1000.0, 4600.0)


@pytest.mark.parametrize("name", ["=cmd()", "\t=cmd()", "\r@x", " +1", "\uff1dcmd()", "-2"])
def test_no_field_of_a_csv_is_a_formula(name: str) -> None:
    (row, *_) = csv.DictReader(io.StringIO(account_text.attempts_csv(replace(told(NOTICED), name=name))))
    assert row["name"].startswith("'")
    assert row["name"].isprintable()


def test_csv_has_every_machine() -> None:
    bad = replace(told(NOTICED), name="=cmd()")
    rows = list(csv.DictReader(io.StringIO(account_text.attempts_csv(bad))))
    assert [(row["node"], row["attempt"], row["model"], row["name"]) for row in rows] == [
        ("0", "1", "spot", "'=cmd()"),
        ("0", "2", "spot", "'=cmd()"),
    ]
    assert float(rows[0]["usd"]) == pytest.approx((HOUR + 120) / HOUR)
    sums = list(csv.DictReader(io.StringIO(account_text.totals_csv(by_month()))))
    assert {row["by"] for row in sums} == {"job", "user", "month"}
    assert all(float(row["saved"]) == float(row["on_demand_only"]) - float(row["usd"]) for row in sums)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fit_the_terminal(width: int) -> None:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(account_text.report(job_view(a_record(), None, NOTICED, STACK, NOW), told(NOTICED)))
    console.print(account_text.summary(by_month()))
    assert "notice" in console.export_text()


# -- egress between regions

SENT = tuple(
    entry(Event.EGRESS, at, node, cause=what, detail="us-central1 -> us-east1", gb=gb, usd=gb * 0.02)
    for at, node, what, gb in (
        (HOUR, 0, "checkpoint", 50.0),
        (HOUR, 1, "checkpoint", 30.0),
        (HOUR + 1, None, "data", 20.0),
        (HOUR + 40 * 24 * HOUR, 0, "checkpoint", 10.0),
    )
)
LATER = NOW + 50 * 24 * HOUR


def test_egress_is_in_the_total_and_in_lines_of_its_own() -> None:
    plain, found = told(NOTICED, LATER), told((*NOTICED, *SENT), LATER)
    assert found.money.egress == pytest.approx(2.2)
    assert found.money.spent == pytest.approx(plain.money.spent + 2.2)
    assert found.money.on_demand_only == plain.money.on_demand_only
    assert found.lost == plain.lost, "machines and their work are the same"
    assert account_text.egress_lines(found) == [
        "egress $1.80: 90.0 GB from us-central1 to us-east1 (checkpoint)",
        "egress $0.40: 20.0 GB from us-central1 to us-east1 (data)",
    ]
    assert account_text.egress_lines(plain) == []
    small = told((*NOTICED, replace(SENT[0], gb=0.035, usd=0.0007)), LATER)
    assert account_text.egress_lines(small) == ["egress <$0.01: 35 MB from us-central1 to us-east1 (checkpoint)"]
    view = job_view(a_record(), None, (*NOTICED, *SENT), STACK, LATER)
    text = printed(account_text.report(view, found))
    assert "egress $1.80" in text and "($2.20 of it for egress)" in text


def test_a_transfer_counts_in_its_month_and_every_grouping_agrees() -> None:
    sums = totals([told((*NOTICED, *SENT), LATER), told(NOTICED, LATER)], LATER)
    assert [round(row.egress, 6) for row in sums.months] == [2.0, 0.2]
    for rows in (sums.jobs, sums.users, sums.months):
        for name in ("usd", "egress", "on_demand_only", "saved"):
            assert sum(getattr(row, name) for row in rows) == pytest.approx(getattr(sums.total, name)), name
    assert "egress" in printed(account_text.summary(sums)) and "egress" in account_text.totals_csv(sums)
    assert "egress" not in printed(account_text.summary(totals([told(NOTICED)], NOW)))


def test_egress_is_an_event_and_a_step_of_the_cost_over_time() -> None:
    texts = [line.text for line in event_lines(SENT, 0.0)]
    assert texts[0] == "node 0: transfer between regions of 50.0 GB for $1.00 (checkpoint): us-central1 -> us-east1"
    assert texts[2] == "the job: transfer between regions of 20.0 GB for $0.40 (data): us-central1 -> us-east1"
    points = over_time((*NOTICED, *SENT[:3]), STACK, NOW, points=1000)
    before, after = (max(spent for at, spent, _ in points if (at < HOUR) is early) for early in (True, False))
    assert after == pytest.approx(told((*NOTICED, *SENT[:3])).money.spent)
    assert next(spent for at, spent, _ in points if at >= HOUR + 1) - before == pytest.approx(2.0, abs=0.1)
