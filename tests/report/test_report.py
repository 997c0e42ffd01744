"""Money, recoveries and views from ledgers written by hand, checked by arithmetic a reader can redo."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console, RenderableType
from spotkeeper.cli.localcloud import tables
from spotkeeper.local.bill import Bill
from spotkeeper.local.views import DiskView, Status, VmView, ZoneView
from spotkeeper.report import account_text
from spotkeeper.report.account import account
from spotkeeper.report.events import describe
from spotkeeper.report.lines import reasons, training_line
from spotkeeper.report.money import attempts, first_of_each, money, stopped
from spotkeeper.report.recovery import recoveries
from spotkeeper.report.render import live, status
from spotkeeper.report.spans import minus, seconds, union
from spotkeeper.report.tables import job_table
from spotkeeper.report.view import JobView, NodeState, OutputView, Site, job_view
from spotkeeper.report.words import count, duration, loss_word, saved, usd
from spotkeeper.spec.cloud import disks_kept
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Hold, Outcome, Phase, Rank, Record, Slot, SlotState
from spotkeeper.spec.stack import StackState

from tests.spec.samples import STACK, ZONES

HOUR = 3600.0
A = ZONES[0]


def entry(event: Event, at: float, rank: int | None = None, attempt: int | None = None, **more: object) -> Entry:
    base = Entry(at=at, id=f"{event.value}.{rank}.{attempt}.{at}", event=event, rank=rank, attempt=attempt)
    return msgspec.structs.replace(base, **more)


def intent(
    at: float, rank: int, attempt: int, price: float = 1.0, model: Model = Model.SPOT, cause: str = "start"
) -> Entry:
    return entry(Event.INTENT, at, rank, attempt, pool="workers", zone=A, model=model, price=price, cause=cause)


def generation(at: float, gen: int) -> Entry:
    return entry(Event.GENERATION, at, gen=gen)


# A rank that trains one hour on spot, is noticed, is replaced at once, trains another hour, ends.
NOTICED = (
    intent(0.0, 0, 1),
    entry(Event.ADMITTED, 60.0, 0, 1),
    generation(100.0, 1),
    entry(Event.NOTICE, HOUR, 0, 1),
    intent(HOUR + 5, 0, 2, cause="notice"),
    entry(Event.ADMITTED, HOUR + 65, 0, 2),
    entry(Event.STOP, HOUR + 66, cause="notice"),
    entry(Event.PROMOTED, HOUR + 70, 0, 2),
    generation(HOUR + 76, 2),
    entry(Event.GONE, HOUR + 120, 0, 1),
    entry(Event.END, 2 * HOUR, cause="succeeded"),
    entry(Event.GONE, 2 * HOUR + 30, 0, 2),
    entry(Event.DONE, 2 * HOUR + 31),
)


def report(view: JobView, ledger: tuple[Entry, ...] = (), now: float = 9 * HOUR) -> RenderableType:
    return account_text.report(view, account(view, ledger, now))


def test_money_of_a_noticed_machine() -> None:
    """Both machines are paid while they overlap, whatever they cost an hour; nothing that is undisturbed has two, or
    the stop of 10 s, and so that is another figure."""
    found = money(NOTICED, STACK, now=9 * HOUR)
    paid_s = (HOUR + 120) + (HOUR + 25)
    assert found.spent == pytest.approx(paid_s / HOUR * 1.0)
    assert found.spot == found.spent
    needed_s = 2 * HOUR + 30 - 10
    assert found.on_demand_only == pytest.approx(paid_s / HOUR * 3.0)
    assert found.undisturbed == pytest.approx(needed_s / HOUR * 3.0)
    assert found.saved_percent == pytest.approx(100 * (1 - found.spent / found.on_demand_only))


def test_boots_and_standstills_make_no_machine_dearer_than_on_demand() -> None:
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
    assert f"nothing interrupts, for as long as it trained: {usd(found.undisturbed)}" in printed(report(view))


def test_a_spot_price_of_a_pool_that_is_gone_is_no_on_demand_price() -> None:
    """The pool was renamed under a job: the machine it had there does not make on-demand as cheap as spot."""
    renamed = tuple(
        msgspec.structs.replace(one, pool="gone") if one.event is Event.INTENT and one.attempt == 1 else one
        for one in NOTICED
    )
    assert money(renamed, STACK, now=9 * HOUR) == money(NOTICED, STACK, now=9 * HOUR)


def test_what_still_runs_is_paid_until_now() -> None:
    found = money((intent(0.0, 0, 1), entry(Event.ADMITTED, 60.0, 0, 1)), STACK, now=HOUR)
    assert found.spent == pytest.approx(1.0)


def test_what_the_cloud_refused_costs_nothing() -> None:
    ledger = (intent(0.0, 0, 1), entry(Event.REFUSED, 30.0, 0, 1), intent(31.0, 0, 2, price=3.0, model=Model.ON_DEMAND))
    found = money(ledger, STACK, now=31.0 + HOUR)
    assert (found.spot, found.on_demand) == (0.0, pytest.approx(3.0))


def test_a_machine_that_booted_and_never_joined_is_paid() -> None:
    ledger = (intent(0.0, 0, 1), entry(Event.LOSS, 500.0, 0, 1, cause="never joined"), entry(Event.GONE, HOUR, 0, 1))
    assert money(ledger, STACK, now=2 * HOUR).spent == pytest.approx(1.0)


def test_billing_begins_when_the_cloud_made_the_machine() -> None:
    ledger = (intent(0.0, 0, 1), entry(Event.ADMITTED, 100.0, 0, 1, started=40.0), entry(Event.GONE, HOUR + 40, 0, 1))
    assert money(ledger, STACK, now=2 * HOUR).spent == pytest.approx(1.0)


def test_an_event_that_was_written_twice_counts_once() -> None:
    twin = msgspec.structs.replace(NOTICED[9], at=NOTICED[9].at + 50)  # the same GONE, later
    assert money((*NOTICED, twin), STACK, 9 * HOUR) == money(NOTICED, STACK, 9 * HOUR)


def test_on_demand_only_uses_the_list_price_of_what_was_had() -> None:
    static = intent(0.0, 0, 1, price=2.5, model=Model.STATIC)
    found = money((static, entry(Event.ADMITTED, 1.0, 0, 1)), STACK, now=HOUR)
    assert (found.static, found.on_demand_only) == (pytest.approx(2.5), pytest.approx(3.0))
    assert money((static, entry(Event.ADMITTED, 1.0, 0, 1)), None, now=HOUR).on_demand_only == pytest.approx(2.5)


def test_nothing_known_is_nothing_spent() -> None:
    found = money((), STACK, now=HOUR)
    assert (found.spent, found.on_demand_only, found.saved_percent) == (0.0, 0.0, None)


def test_a_recovery_from_a_notice() -> None:
    (one,) = recoveries(NOTICED, now=9 * HOUR)
    assert (one.cause, one.announced, one.ranks, one.gen) == ("notice", True, (0,), 2)
    assert (one.seconds, one.stopped_s, one.boot_s) == (76.0, 10.0, 60.0)
    assert (one.replacement, one.zone) == (Model.SPOT, A)


def lost(*ranks: int, cause: str = "loss") -> tuple[Entry, ...]:
    losses = [entry(Event.LOSS, 500.0, rank, 1, cause=cause) for rank in ranks]
    came = [intent(505.0, rank, 2, price=3.0, model=Model.ON_DEMAND, cause="loss") for rank in ranks]
    up = [entry(Event.ADMITTED, 545.0, rank, 2) for rank in ranks]
    return (generation(100.0, 1), *losses, entry(Event.STOP, 500.0, cause="loss"), *came, *up, generation(550.0, 2))


def test_recoveries_from_losses() -> None:
    (one,) = recoveries(lost(1), now=600.0)
    assert (one.cause, one.announced, one.ranks) == ("loss", False, (1,))
    assert (one.seconds, one.stopped_s, one.boot_s, one.replacement) == (50.0, 50.0, 40.0, Model.ON_DEMAND)
    (two,) = recoveries(lost(1, 2), now=600.0)
    assert (two.cause, two.ranks) == ("loss of 2", (1, 2))


def test_a_loss_that_was_announced_is_no_surprise() -> None:
    ledger = (generation(100.0, 1), entry(Event.NOTICE, 400.0, 1, 1), *lost(1, cause="notice")[1:])
    (one,) = recoveries(ledger, now=600.0)
    assert (one.cause, one.announced, one.seconds) == ("notice", True, 150.0)


def test_what_interrupts_nothing_is_no_recovery() -> None:
    withdrawn = (entry(Event.NOTICE, 200.0, 0, 1), entry(Event.REPRIEVE, 210.0, 0, 1))
    standby = entry(Event.LOSS, 300.0, 0, 2, cause="standby")
    assert recoveries((generation(100.0, 1), *withdrawn, standby), now=400.0) == ()
    assert recoveries((intent(0.0, 0, 1), generation(100.0, 1)), now=400.0) == ()


def test_a_recovery_that_goes_on_has_no_end() -> None:
    (one,) = recoveries(lost(1)[:-1], now=560.0)
    assert (one.seconds, one.stopped_s, one.gen) == (None, 60.0, 1)


def test_a_crash_and_a_swap_have_their_causes() -> None:
    crash = (entry(Event.CRASH, 200.0, 0, cause="crash"), generation(210.0, 2))
    swap = (intent(300.0, 0, 2, cause="swap"), entry(Event.STOP, 400.0, cause="swap"), generation(410.0, 3))
    found = recoveries((generation(100.0, 1), *crash, *swap), now=500.0)
    told = [(one.cause, one.stopped_s, one.announced, one.ranks) for one in found]
    assert told == [("crash", 10.0, False, (0,)), ("swap", 10.0, True, ())], "whose code failed is said"


LOSSES = {2.113: "2.1130", -0.5: "-0.5000", 0.0: "0.0000", 0.0123456: "0.01235", 1e-5: "1e-05", 1.23456e-5: "1.235e-05"}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_small_loss_is_not_shown_as_none(loss: float) -> None:
    assert loss_word(loss) == LOSSES[loss]


def test_a_crash_has_no_part_in_a_swap_that_is_under_way() -> None:
    """It stood still since its process ended, which the roll call is about; the machine that boots is the swap's."""
    swap = intent(200.0, 0, 2, cause="swap to spot")
    rolled = entry(Event.ROLL, 210.0, cause="exit")
    crash = (entry(Event.CRASH, 213.0, 0, cause="crash"), entry(Event.STOP, 213.0, cause="crash"), generation(233.0, 2))
    up = (entry(Event.ADMITTED, 347.0, 0, 2), entry(Event.STOP, 347.0, cause="swap"))
    over = (entry(Event.PROMOTED, 350.0, 0, 2, cause="swap to spot"), generation(355.0, 3))
    one, two = recoveries((generation(100.0, 1), swap, rolled, *crash, *up, *over), now=400.0)
    assert (one.cause, one.seconds, one.stopped_s, one.boot_s, one.replacement) == ("crash", 23.0, 23.0, None, None)
    assert (two.cause, two.seconds, two.boot_s, two.replacement) == ("swap", 8.0, 147.0, Model.SPOT)


def test_a_swap_that_is_withdrawn_is_told_as_such() -> None:
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
    assert (one.ranks, one.boot_s, one.replacement) == ((), None, None)
    refused = (intent(400.0, 0, 3, cause="swap"), entry(Event.REFUSED, 401.0, 0, 3, cause="capacity"))
    assert recoveries((generation(100.0, 1), *refused), now=500.0) == ()


def test_a_machine_that_comes_later_replaces_nothing_before_it_is_there() -> None:
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


@pytest.mark.parametrize(
    ("amount", "text"), [(0.01234, "$0.0123"), (1.0, "$1.00"), (9.151, "$9.15"), (-1234.5, "$-1,234.50")]
)
def test_money_is_rounded_to_what_matters(amount: float, text: str) -> None:
    assert usd(amount) == text


@pytest.mark.parametrize(("percent", "text"), [(70.6, "71 % saved"), (-0.4, "0 % saved"), (-9.2, "9 % more")])
def test_what_was_not_saved_is_said_so(percent: float, text: str) -> None:
    assert saved(percent) == text


@pytest.mark.parametrize("now", [50.0, 100.0, 699.0])
def test_nothing_is_said_of_savings_before_a_job_has_trained_for_a_while(now: float) -> None:
    """A machine that never joined is paid for beside the one that trains: at first that is all there is to compare."""
    ledger = (intent(0.0, 0, 1, price=9.0), *(one for one in NOTICED if one.at <= now))
    view = job_view(a_record(), None, ledger, STACK, now)
    assert view.money.spent > 0.0
    assert msgspec.json.decode(msgspec.json.encode(view))["money"]["saved_percent"] is None
    for text in (printed(live(view)), printed(status(view)), printed(report(view)), printed(job_table([view]))):
        assert "%" not in text
    assert "too early to say what was saved" in printed(status(view))


def test_savings_are_said_once_it_has_trained_for_ten_minutes_or_ended() -> None:
    begun = tuple(one for one in NOTICED if one.at <= 100.0)
    assert money(begun, STACK, 700.0).saved_percent is not None
    assert money((*begun, entry(Event.STOP, 400.0)), STACK, 9 * HOUR).saved_percent is None, "it stands still"
    assert money((*begun, entry(Event.END, 400.0)), STACK, 9 * HOUR).saved_percent is not None
    assert money((intent(0.0, 0, 1), entry(Event.END, 400.0)), STACK, 9 * HOUR).saved_percent is None


@pytest.mark.parametrize(
    ("number", "noun", "text"), [(1, "crash", "1 crash"), (2, "crash", "2 crashes"), (0, "VM", "0 VMs")]
)
def test_one_and_many(number: int, noun: str, text: str) -> None:
    assert count(number, noun) == text


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


def slot(state: SlotState = SlotState.MEMBER, attempt: int = 1, **over: object) -> Slot:
    return msgspec.structs.replace(Slot(attempt, state, "workers", A, Model.SPOT, since=50.0), **over)


def a_record(**over: object) -> Record:
    record = Record(
        job="abcdefgh",
        uid="u",
        name="first",
        spec_sha256="0",
        created=0.0,
        gen=3,
        ranks=(
            Rank(cur=slot()),
            Rank(cur=slot(notice=700.0), next=slot(SlotState.ADMITTED, attempt=2)),
            Rank(cur=slot(SlotState.INTENT, attempt=4)),
            Rank(),
        ),
        members=(1, 0),
    )
    return msgspec.structs.replace(record, **over)


def states(view: JobView) -> list[tuple[int, str]]:
    return [(node.rank, node.state.value) for node in view.nodes]


def test_the_states_of_machines() -> None:
    view = job_view(a_record(), None, NOTICED, STACK, now=600.0)
    assert states(view) == [(0, "training"), (1, "notice"), (1, "standby"), (2, "booting"), (3, "waiting")]
    assert [node.rank for node in view.nodes if node.master] == [1]
    assert view.nodes[1].left_s == 100.0
    assert view.nodes[0].age_s == 600.0  # since its intent, not since it became a member
    stopping = job_view(a_record(stop=True), None, (), STACK, now=600.0)
    assert states(stopping)[:2] == [(0, "saving"), (1, "saving")]


def held(kind: Hold = Hold.FAILURE, **over: object) -> Record:
    ends = 99 * HOUR if kind is Hold.FAILURE else None
    idle = {"phase": Phase.HOLD, "reason": "rank 0 exited with 93", "members": (), "hold_ends": ends}
    return a_record(hold=kind, ranks=(Rank(), Rank()), **idle | over)


def priced(usd: float | None) -> StackState:
    pools = tuple(msgspec.structs.replace(pool, disk_gb=100, disk_usd_gb_month=usd) for pool in STACK.pools)
    return msgspec.structs.replace(STACK, pools=pools)


def test_a_failed_job_that_holds_says_what_it_costs_and_both_ways_out() -> None:
    up = [entry(Event.ADMITTED, 60.0, rank, 1, pool="workers", model=Model.SPOT) for rank in (0, 1)]
    again = entry(Event.ADMITTED, 90.0, 1, 2, pool="workers", model=Model.ON_DEMAND)
    static = entry(Event.ADMITTED, 60.0, 2, 1, pool="always", model=Model.STATIC)
    view = job_view(held(hold_ends=HOUR * 25), None, [*up, again, static], priced(0.10), now=HOUR)
    assert view.stands() and not view.over()
    assert view.hold is not None and view.hold.usd_per_day == pytest.approx(2 * 100 * 0.10 * 12 / 365)
    assert printed(status(view)).splitlines()[-5:] == [
        "its machines are given back; 2 disks of 200 GB in all: $0.6575 a day",
        "if nobody resumes it, it ends in 1d00h: its disks and their checkpoints are deleted",
        "to go on from the newest checkpoint, with a fresh crash budget:  spotkeeper resume first",
        "the same with a mended script or job file:  spotkeeper resume first JOB.YAML",
        "to end it (its disks and their checkpoints are deleted):  spotkeeper cancel first",
    ]
    assert "spotkeeper resume first" in printed(live(view))
    dear = job_view(held(keep_disks=True), None, up, priced(None), now=HOUR)
    assert "2 disks of 200 GB in all: the stack knows no price" in printed(status(dear))
    assert "to end it (its disks stay (keep_disks)):" in printed(status(dear))
    assert msgspec.json.decode(msgspec.json.encode(view), type=JobView) == view


def test_a_job_held_for_its_money_names_both_ways_to_more() -> None:
    record = held(Hold.SPEND, reason="max_usd: $5.00 is spent", hold_ends=HOUR * 25)
    lines = printed(status(job_view(record, None, (), STACK, now=HOUR))).splitlines()
    assert "holds (max_usd: $5.00 is spent)" in lines[0]
    assert lines[-5:] == [
        "what it spent above its max_usd: a look is a minute apart, and saving and giving back take time",
        "if nobody resumes it, it ends in 1d00h: its disks and their checkpoints are deleted",
        "to go on from the newest checkpoint, for as much again (max_usd):  spotkeeper resume first",
        "the same with another max_usd, or other files:  spotkeeper resume first JOB.YAML",
        "to end it (its disks and their checkpoints are deleted):  spotkeeper cancel first",
    ]


@pytest.mark.parametrize(
    ("commit", "line"),
    [
        (1, "to go on from the newest checkpoint (step 1), with a fresh crash budget:  spotkeeper resume first"),
        (None, "to begin anew, for no checkpoint was reported, with a fresh crash budget:  spotkeeper resume first"),
    ],
)
def test_the_newest_checkpoint_has_its_step_beside_the_job_s(commit: int | None, line: str) -> None:
    progress = Progress(gen=3, step=50, at=1.0, total_steps=200, commit_gen=commit and 3, commit_step=commit)
    text = printed(status(job_view(held(), progress, (), STACK, now=HOUR)))
    assert line in text.splitlines()
    assert ("step 50/200 (checkpoint: 1)" in text) == (commit == 1)


def test_where_the_newest_checkpoint_cannot_be_had_the_command_that_helps_is_named_once() -> None:
    progress = Progress(gen=3, step=50, at=1.0, commit_gen=3, commit_step=48)
    remedy = "spotkeeper resume first --go-back"
    why = f"no machine to be had holds the newest checkpoint, 3-48. To go on without it: {remedy}"
    view = job_view(held(Hold.CLOUD, reason=why, hold_until=HOUR * 2), progress, (), STACK, now=HOUR)
    text = " ".join(printed(status(view)).split())
    assert text.count(remedy) == 1 and "spotkeeper resume first JOB.YAML --go-back" in text
    assert "to go on from the newest" not in text
    assert view.hold is not None and view.hold.resume == remedy


def test_a_job_whose_output_is_on_its_way_says_so_and_one_that_left_some_how_to_have_it() -> None:
    progress = Progress(gen=3, step=300, at=100.0, step_s=1.0, total_steps=300, uploading_s=65.0)
    view = job_view(a_record(gen=3), progress, (), STACK, now=1000.0)
    assert view.uploading_s == 65.0 and "its output goes to the bucket" in printed(status(view))
    assert job_view(a_record(gen=4), progress, (), STACK, now=1000.0).uploading_s is None, "of an older generation"
    over = job_view(a_record(phase=Phase.DONE, outcome=Outcome.SUCCEEDED, gen=3), progress, (), STACK, now=1000.0)
    assert over.uploading_s is None and "output" not in printed(status(over))
    left = msgspec.structs.replace(over, output=OutputView(2, 4_100_000))
    assert f"output: 2 files, 4.1 MB; fetch it: spotkeeper download {over.name}" in printed(status(left))


def test_a_job_that_trains_and_tells_of_no_new_step_says_for_how_long() -> None:
    progress = Progress(gen=3, step=50, at=1000.0, step_s=2.0, samples_per_s=9.0)

    def look(now: float, scale: float = 1.0, **over: object) -> JobView:
        return job_view(a_record(**over), progress, (), STACK, now=now, site=Site(scale))

    quiet = look(1720.0)
    assert quiet.no_new_step_s == 720.0 and "no new step for 12m00s" in printed(status(quiet))
    assert "no new step" not in printed(status(look(1180.0)))
    assert look(1300.0, scale=20.0).no_new_step_s is None, "a step of 2 real seconds takes 40 of this clock's"
    assert look(1720.0, gen=4, gen_since=1500.0).no_new_step_s == 220.0, "since its generation began"
    for over in ({"stop": True}, {"phase": Phase.HOLD, "hold": Hold.PAUSE}, {"phase": Phase.END}, {"gen": 0}):
        view = look(1720.0, **over)
        assert (view.no_new_step_s, view.samples_per_s) == (None, None), "nothing trains, so nothing has a rate"


def test_on_a_clock_of_its_own_it_is_said_what_is_of_which_clock() -> None:
    progress = Progress(gen=3, step=50, at=590.0, samples_per_s=9.0)
    view = job_view(a_record(), progress, (), STACK, now=600.0, site=Site(20.0, local=True))
    assert "9 samples/s (real time)" in training_line(view)
    assert "since: on the cloud's clock, 20x" in printed(job_table([view]))
    assert "10m00s since submission on the cloud's clock, 20x" in " ".join(
        line.strip("│ ") for line in printed(live(view)).splitlines()
    )
    usual = job_view(a_record(), progress, NOTICED, STACK, now=600.0)
    for text in (printed(live(usual)), printed(status(usual)), printed(job_table([usual]))):
        assert "clock" not in text and "real" not in text


@pytest.mark.parametrize("local", [False, True])
def test_a_disk_that_outlives_its_job_is_named_wherever_the_job_is(local: bool) -> None:
    done = entry(Event.DONE, 2 * HOUR, cause="succeeded", detail=f"but {disks_kept(['sk-prod-abcdefgh-r0000-d0'])}")
    over = a_record(phase=Phase.DONE, outcome=Outcome.SUCCEEDED, ranks=(Rank(),), members=(), keep_disks=True)
    view = job_view(over, None, (done,), STACK, now=9 * HOUR, site=Site(local=local))
    assert view.disks_kept == "1 disk kept, which bill: sk-prod-abcdefgh-r0000-d0"
    for text in (printed(status(view)), printed(report(view)), printed(live(view)), printed(job_table([view]))):
        assert view.disks_kept in text
    how = "spotkeeper local down deletes them" if local else "--filter=labels.sk-job=abcdefgh)"
    assert how in printed(status(view)) and how in printed(report(view))
    assert job_view(over, None, (entry(Event.DONE, 1.0),), STACK, now=9 * HOUR).disks_kept == ""


def test_a_machine_that_is_given_back_has_its_name() -> None:
    gone = (entry(Event.GONE, 5.0, 1, 1, detail="slot:workers"), entry(Event.GONE, 5.0, 1, 2, detail="node:sk-prod-s0"))
    told = [line.text for line in job_view(a_record(), None, gone, STACK, now=9.0).events]
    assert told == [
        "rank 1: old machine given back: sk-prod-abcdefgh-r0001-a1",
        "rank 1: old machine given back: sk-prod-s0",
    ]
    assert describe(gone[0]) == "rank 1: old machine given back (attempt 1)", "of a stack that cannot be read"


def test_what_was_not_saved_reads_alike_in_the_table() -> None:
    dear = (intent(0.0, 0, 1, price=3.3), *NOTICED[1:4], entry(Event.END, HOUR + 5))
    view = job_view(a_record(), None, dear, STACK, now=2 * HOUR)
    assert saved(view.money.saved_percent or 0.0) == "10 % more"
    assert "10 % more" in printed(job_table([view]))


def test_a_warning_stands_until_that_very_rank_saves_again() -> None:
    def told(*entries: Entry) -> list[str]:
        return [line.partition(":")[0] for line in job_view(a_record(), None, entries, STACK, now=99.0).warnings]

    def of(event: Event, at: float, rank: int, attempt: int = 1, which: str = "0", gen: int = 3) -> Entry:
        name = f"{event.value}.r{rank}.a{attempt}.g{gen}.{which}"
        return Entry(at=at, id=name, event=event, gen=gen, rank=rank, attempt=attempt)

    full, unsaved = of(Event.FULL, 10.0, 0), of(Event.UNSAVED, 11.0, 1, which="saver-lost")
    assert told(full, unsaved) == ["rank 0", "rank 1"]
    assert told(full, unsaved, of(Event.SAVED, 20.0, 0)) == ["rank 1"], "rank 0's commit says nothing of rank 1's disk"
    assert told(full, of(Event.SAVED, 20.0, 0), of(Event.FULL, 30.0, 0, which="1")) == ["rank 0"], "and again"
    assert told(of(Event.SAVED, 5.0, 0), full) == ["rank 0"]
    assert told(full, of(Event.SAVED, 20.0, 0, attempt=2)) == ["rank 0"], "another machine's word"
    assert told(of(Event.FULL, 10.0, 0, gen=2)) == [], "a new generation begins anew"


def test_other_holds_are_waited_for() -> None:
    """A pause and a refusal end by themselves or were wished for; a resume that is on its way ends the hold."""
    assert not job_view(held(Hold.PAUSE), None, (), STACK, now=1.0).stands()
    cloud = job_view(held(Hold.CLOUD, hold_until=61.0), None, (), STACK, now=1.0)
    assert not cloud.stands() and "it tries again by itself in 1m00s" in printed(status(cloud))
    assert "disk" not in printed(status(cloud)).replace("its disks and their checkpoints", ""), "it never had one"
    resuming = job_view(held(), None, (), STACK, now=1.0, resuming=True)
    assert not resuming.stands() and "asked to resume" in printed(status(resuming))


def test_the_days_that_a_failed_job_held_are_no_recovery() -> None:
    crash = entry(Event.CRASH, 200.0, 0, cause="crash")
    failed = entry(Event.HOLD, 200.0, 0, cause="failure")
    story = (generation(100.0, 1), crash, failed, entry(Event.RESUME, 9e5, cause="resume"), generation(9e5 + 60, 2))
    assert recoveries(story, now=1e6) == ()
    assert len(recoveries((*story[:2], *story[4:]), now=1e6)) == 1, "a crash that the budget covers is one"
    assert stopped(story, now=1e6) == ((200.0, 9e5 + 60),), "nor does on-demand pay for them"


def test_a_job_that_is_over_has_no_waiting_ranks_and_no_clock() -> None:
    over = a_record(phase=Phase.DONE, outcome=Outcome.SUCCEEDED, ranks=(Rank(), Rank()), members=())
    view = job_view(over, None, NOTICED, STACK, now=99 * HOUR)
    assert view.nodes == ()
    assert view.elapsed_s == 2 * HOUR
    assert view.over()


def test_the_view_carries_progress_money_and_recoveries() -> None:
    view = job_view(a_record(), Progress(gen=3, step=7, at=1.0, loss=0.5, total_steps=9), NOTICED, STACK, 9 * HOUR)
    assert (view.step, view.total_steps, view.loss) == (7, 9, 0.5)
    assert view.money.spent == pytest.approx(money(NOTICED, STACK, 9 * HOUR).spent)
    assert len(view.recoveries) == 1
    assert [line.event for line in view.events] == [one.event for one in NOTICED]
    assert msgspec.json.decode(msgspec.json.encode(view), type=JobView) == view


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("notice", "all save and stop (notice)"),
        ("swap", "all save and stop (swap)"),
        ("loss", "all stop (loss)"),
        ("silence", "all stop (silence)"),
    ],
)
def test_nobody_saves_for_what_nobody_announced(cause: str, text: str) -> None:
    assert describe(entry(Event.STOP, 1.0, cause=cause)) == text


@pytest.mark.parametrize("event", list(Event))
def test_every_event_has_a_line(event: Event) -> None:
    text = describe(
        Entry(at=0.0, id="x", event=event, gen=4, rank=2, zone=A, model=Model.SPOT, cause="why", detail="d")
    )
    assert text.endswith(": d") == (event is not Event.GONE)  # its detail names the grant, which says nothing here
    assert "{" not in text
    assert describe(Entry(at=0.0, id="x", event=event))


def printed(what: RenderableType) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_what_is_printed_fits_and_says_what_matters() -> None:
    view = job_view(a_record(), Progress(gen=3, step=7, at=1.0, loss=0.5), NOTICED, STACK, 600.0, ("boom [bold]",))
    text = printed(live(view))
    for word in (
        "first (abcdefgh)",
        "generation 3",
        "step 7",
        "notice, 1m40s left",
        "standby",
        "spent $",
        "boom [bold]",
    ):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "boom [bold]" in printed(status(view))
    assert "notice" in printed(report(view))
    assert "first" in printed(job_table([view]))


@pytest.mark.parametrize("width", [56, 60, 76, 110])
@pytest.mark.parametrize("show", [status, live])
def test_machines_on_a_narrow_terminal_lose_columns_but_no_word(
    show: Callable[[JobView], RenderableType], width: int
) -> None:
    view = job_view(a_record(), None, NOTICED, STACK, 600.0)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(show(view))
    text = capture.get()
    assert "notice, 1m40s left" in text and "attempt 1 (master)" in text and "…" not in text
    inner = width - 4 * (show is live)  # its box
    assert ("zone  " in text, "model" in text, "  age" in text) == (inner >= 59, inner >= 66, inner >= 74)
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [60, 80, 110])
def test_names_that_are_copied_into_a_command_are_whole_on_any_terminal(width: int) -> None:
    name = "sk-local-abcdefgh-r0000-a11"
    vm = VmView(name, "1", A, "spot", "a3-highgpu-1g", "RUNNING", "127.173.0.4", {}, "", 2.5, notice_until=1.0)
    disk = DiskView(name, A, 50, "READY", (name,), {})
    zone = ZoneView(A, 8, 2, 0, overridden=True, partitioned=False, spot_price_share=0.23)
    found = Status(0.0, 20.0, "", (vm,), (disk,), (zone,), (), Bill(1.0, 2.0, 3.0, 4.0))
    view = job_view(a_record(), None, NOTICED, STACK, 9 * HOUR)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(tables(found))
        console.print(report(view))
    text = capture.get()
    assert text.count(name) == 3 and "running, notice" in text and "8 (set)" in text and "…" not in text
    assert f"spot in {A}" in text and "stood still" in text
    assert ("a3-highgpu-1g" in text, "  ranks  " in text) == (width >= 110, width >= 80)
    assert ("no room here for " in text) == (width < 110), "what a narrow terminal leaves out is named, and who has it"
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [40, 80, 110, 160, 300])
def test_a_long_reason_takes_no_name_and_no_number_away(width: int) -> None:
    reason = "waiting for static node rack-7: it alone has the newest checkpoint (generation 3, step 1200) " * 2
    progress = Progress(gen=3, step=123456, at=1.0, loss=2.1130)
    waits = job_view(a_record(reason=reason.strip(), name="a-job-with-a-name"), progress, NOTICED, STACK, 600.0)
    other = job_view(a_record(job="hgfedcba", name="other"), progress, NOTICED, STACK, 600.0)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(job_table([waits, other]), crop=False)
    text = capture.get()
    head, *lines = text.splitlines()
    for title in ("job", "name", "state", "nodes", "gen", "step", "spent"):
        assert title in head.split()
    for view, line in zip((waits, other), lines, strict=False):
        for word in (view.job, view.name, "trains", "2/4", "3", "123456", usd(view.money.spent)):
            assert word in line.split()
    assert waits.reason in " ".join(text.split()), "and nothing of the reason is lost"
    assert "…" not in text
    if width >= 80:
        assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize(
    ("over", "step", "total", "line", "cell"),
    [
        ({}, 586, 600, "step 586/600", "586"),
        ({"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, 586, 600, "last reported: step 586/600", "586+"),
        ({"phase": Phase.END, "outcome": Outcome.SUCCEEDED}, 586, None, "last reported: step 586", "586+"),
        ({"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, 600, 600, "step 600/600", "600"),
        ({"phase": Phase.DONE, "outcome": Outcome.CANCELLED}, 586, 600, "last reported: step 586/600", "586"),
    ],
)
def test_the_last_report_of_a_job_that_is_over_is_not_taken_for_its_end(
    over: dict[str, object], step: int, total: int | None, line: str, cell: str
) -> None:
    view = job_view(
        a_record(**over), Progress(gen=3, step=step, at=9 * HOUR, total_steps=total), NOTICED, STACK, 9 * HOUR
    )
    assert training_line(view) == f"generation 3  {line}"
    assert cell in printed(job_table([view])).splitlines()[1].split()


LONG = '  File "/srv/' + "a-long-folder/" * 12 + 'train.py", line 7, in <module>'


def test_the_lines_of_a_log_are_printed_as_they_are() -> None:
    """A path that is broken, or stands in a box, cannot be copied."""
    view = job_view(held(), None, (), STACK, 600.0, (LONG, "boom"))
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(status(view), crop=False)
    assert {LONG, "boom"} <= set(capture.get().splitlines())
    assert max(len(line) for line in capture.get().splitlines() if line != LONG) <= 80


def test_the_live_view_keeps_its_box_and_leaves_the_log_to_its_end() -> None:
    between = job_view(a_record(stop=True), None, (), STACK, 600.0, (LONG, "boom"))
    text = printed(live(between))
    assert "boom" in text and 'File "/srv/' in text and max(len(line) for line in text.splitlines()) <= 110
    assert "boom" not in printed(live(job_view(held(), None, (), STACK, 600.0, (LONG, "boom"))))


@pytest.mark.parametrize(
    ("seconds_", "text"), [(None, "-"), (0.4, "0s"), (59.4, "59s"), (200, "3m20s"), (7500, "2h05m"), (273600, "3d04h")]
)
def test_durations(seconds_: float | None, text: str) -> None:
    assert duration(seconds_) == text


def test_of_events_of_one_moment_causes_come_first() -> None:
    ledger = (generation(5.0, 2), intent(5.0, 1, 2), entry(Event.STOP, 5.0), entry(Event.LOSS, 5.0, 1, 1))
    assert [one.event.value for one in first_of_each(ledger)] == ["loss", "stop", "generation", "intent"]


def test_attempts_without_an_intent_are_unknown() -> None:
    assert attempts((entry(Event.ADMITTED, 5.0, 0, 1),)) == ()


def test_a_rank_that_waits_says_for_what_and_nothing_of_capacity() -> None:
    waits = entry(Event.REFUSED, 5.0, 1, cause="wait", detail="waiting for static node n1: it alone has it")
    assert describe(waits) == "rank 1: waiting for static node n1: it alone has it"
    refused = entry(Event.REFUSED, 5.0, 1, 2, cause="capacity", zone=A, model=Model.SPOT, detail="none left")
    assert describe(refused) == f"rank 1: no capacity for spot {A}: none left"


def test_node_states_are_all_drawn() -> None:
    from spotkeeper.report.tables import _NODE_STYLE

    assert set(_NODE_STYLE) == set(NodeState)


def test_a_job_that_nobody_has_touched_says_so_and_one_that_somebody_has_does_not() -> None:
    fresh = Record("abcdefgh", "u", "first", "", 0.0, ranks=(Rank(), Rank()))
    assert not job_view(fresh, None, (), STACK, 599.0).warnings
    (line,) = job_view(fresh, None, (), STACK, 720.0).warnings
    assert "12 min ago" in line and "spotkeeper reconcile --once" in line
    assert not job_view(replace(fresh, ver=1), None, (), STACK, 720.0).warnings
    assert "0/2" in printed(job_table([job_view(fresh, None, (), STACK, 720.0)]))


def test_status_says_why_each_machine_is_what_it_is() -> None:
    """What was chosen alike is one line; of a bout of on-demand, what brought it about and when it ends."""
    spot = "33% of on-demand, expected to last 9.1 h"
    ledger = (
        replace(intent(0.0, 0, 1), detail=spot),
        replace(intent(0.0, 1, 1), detail=spot),
        entry(Event.BOUT, 100.0, cause="too many losses", detail=f"3 losses in 41 min in {A}, spot again at 14:20 UTC"),
        replace(intent(100.0, 1, 2, model=Model.ON_DEMAND), detail="a bout of on-demand"),
        replace(intent(100.0, 2, 4), detail="node:sk-prod-always-s0"),
    )
    record = a_record(
        ranks=(
            Rank(cur=slot()),
            Rank(cur=slot(), next=slot(attempt=2, model=Model.ON_DEMAND)),
            Rank(cur=slot(attempt=4, model=Model.STATIC, node="sk-prod-always-s0")),
        )
    )
    view = job_view(record, None, ledger, STACK, 200.0)
    assert [node.reason for node in view.nodes] == [
        spot,
        spot,
        f"a bout of on-demand: 3 losses in 41 min in {A}, spot again at 14:20 UTC",
        "",
    ]
    lines = account(view, ledger, 200.0).attempts
    assert [line.reason for line in lines if line.rank < 2] == [spot, spot, view.nodes[2].reason], "as in the report"
    assert reasons(view.nodes) == [
        ("ranks 0, 1", f"spot in {A}: {spot}"),
        ("rank 1", f"on-demand in {A}: a bout of on-demand: 3 losses in 41 min in {A}, spot again at 14:20 UTC"),
    ]
    first, second, third = (line.rstrip() for line in printed(status(view)).splitlines()[-3:])
    assert first.split("  ") == ["ranks 0, 1", f"spot in {A}: {spot}"]
    assert second.startswith("rank 1") and third.startswith("            ") and third.endswith("UTC")


def test_a_long_event_goes_on_below_its_text_and_not_below_its_time() -> None:
    long = entry(Event.NOTICE, 61.0, 0, 1, detail="word " * 30)
    console = Console(width=60, color_system=None)
    with console.capture() as capture:
        console.print(live(job_view(a_record(), None, (long,), STACK, 600.0)))
    lines = capture.get().splitlines()
    first = next(number for number, line in enumerate(lines) if "rank 0: its machine will" in line)
    column = lines[first].index("rank 0:")
    assert "word" in lines[first + 1]
    assert all(not line[2:column].strip() for line in lines[first + 1 : first + 3])
