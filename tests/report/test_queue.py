"""The queue as people see it: places, reasons, expected starts, who borrows from whom."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.console import Console

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop, TeamUse
from spotkeeper.contract.stack import StackState, TeamState
from spotkeeper.reconcile.decide.queue import scheduler
from spotkeeper.report.job.waiting import WaitingView, place, protected_word, waiting_line
from spotkeeper.report.queue import FORESEEN, SHOWN, Queue, QueueView
from spotkeeper.report.text.queue import queue as tables
from spotkeeper.report.text.queue import running_row
from tests.contract.samples import STACK, pool

NOW, HOUR, DAY = 1_000_000.0, 3600.0, 86_400.0
TEAMS = (TeamState("nlp", share=3.0), TeamState("vision", share=1.0, max_machines=3, max_usd_month=90.0))


def a_stack(machines: int = 4, **over: object) -> StackState:
    pools = (pool("workers", max_machines=machines),)
    return replace(STACK, pools=pools, max_machines=None, teams=TEAMS, **over)


def running(job: str, machines: int, **over: object) -> Claim:
    """A job that nothing can be taken from, and that ends in an hour."""
    base = Claim(job, machines, machines, NOW - DAY, team="nlp", reserved=machines, reserved_at=NOW - 2 * HOUR)
    base = replace(base, started=NOW - 2 * HOUR, stop=Stop.NEVER, cost_s=600.0, ends=NOW + HOUR)
    return replace(base, **over)


def waiting(job: str, machines: int, **over: object) -> Claim:
    base = Claim(job, machines, machines, NOW - 600.0, team="vision", waits=NOW - 600.0, stop=Stop.SAVED)
    return replace(base, **over)


def granted(job: str, machines: int) -> tuple[Grant, ...]:
    return tuple(Grant(job, node, 1, "slot:workers", NOW - 2 * HOUR) for node in range(machines))


def a_queue(*claims: Claim, stack: StackState | None = None, more: tuple[Grant, ...] = (), **over: object) -> Queue:
    """A queue in which each running job has the machines that are reserved for it."""
    grants = tuple(grant for claim in claims for grant in granted(claim.job, claim.reserved))
    allocation = Allocation(1, "n", (*grants, *more), claims, **over)
    return Queue(allocation, stack or a_stack(), NOW)


def places(view: QueueView) -> list[tuple[int, str, str, float | None]]:
    return [(one.position, one.name, one.reason, one.starts_in_s) for one in view.waiting]


def test_waiting_jobs_have_a_place_a_reason_and_an_expected_start() -> None:
    """Once `big` ends, `wide` starts beside `small`; nobody knows when these end, so `late` has no start."""
    queue = a_queue(
        running("big", 3),
        waiting("wide", 2, priority=2),
        waiting("late", 3, since=NOW - 300.0, waits=NOW - 300.0, team="nlp", priority=0),
        waiting("small", 2, since=NOW - 200.0, waits=NOW - 200.0),
    )
    queue.names = {"wide": "gpt"}
    assert places(queue.view()) == [
        (1, "gpt", "needs 2 machines, 1 is free; big is protected to its end (a stop would lose work)", HOUR),
        (2, "small", "behind gpt", None),
        (3, "late", "behind gpt", None),
    ]
    first = queue.view().waiting[0]
    assert (first.team, first.priority, first.raised, first.machines, first.waited_s) == ("vision", "high", 0, 2, 600.0)


def test_a_job_behind_the_first_starts_with_it_where_both_fit() -> None:
    queue = a_queue(running("big", 4), waiting("wide", 2), waiting("small", 1, since=NOW - 200.0, waits=NOW - 200.0))
    assert [one.starts_in_s for one in queue.view().waiting] == [HOUR, HOUR]


def test_without_a_measured_end_the_start_is_unknown_and_an_overdue_end_is_near() -> None:
    assert a_queue(running("big", 4, ends=None), waiting("wide", 2)).view().waiting[0].starts_in_s is None
    assert a_queue(running("big", 4, ends=NOW - 5.0), waiting("wide", 2)).view().waiting[0].starts_in_s == 60.0


def test_the_end_of_a_victims_protection_is_an_expected_start() -> None:
    victim = running("big", 4, stop=Stop.SAVED, started=NOW - 600.0, reserved_at=NOW - 700.0, priority=0, ends=None)
    assert a_queue(victim, waiting("wide", 2, priority=2)).view().waiting[0].starts_in_s == 300.0


RUNS = {"stop": Stop.SAVED, "priority": 0, "ends": None}


@pytest.mark.parametrize(
    ("over", "why", "left_s"),
    [
        ({"started": NOW - 600.0}, "just started", 300.0),
        ({"reserved_at": NOW - 60.0}, "just started", 840.0),  # it has more machines since
        ({"started": None, "reserved_at": NOW - 600.0}, "no checkpoint yet", 3000.0),
        ({"stop": Stop.EARLY, "reserved_at": NOW - 600.0}, "no checkpoint yet", 3000.0),
        ({"recalls": (NOW - 3000.0, NOW - 2000.0)}, "made room 2 times within the hour", 600.0),
        ({"recalls": tuple(NOW - hours * HOUR for hours in (20, 9, 8, 7, 6, 5))}, "made room 6 times within the day",
         4 * HOUR),
        ({"started": NOW - 600.0, "recalls": (NOW - 3000.0, NOW - 2000.0)}, "made room 2 times within the hour", 600.0),
        ({"stop": Stop.NEVER, "started": NOW - 600.0}, "a stop would lose work", None),
        ({"ends": NOW + 599.0, "ending": NOW - 600.0}, "about to end", 3000.0),
        ({"stop": Stop.NEVER, "ending": NOW - HOUR}, "a stop would lose work", 5 * HOUR),
    ],
)  # fmt: skip
def test_a_protected_job_and_who_waits_for_it_say_until_when(
    over: dict[str, object], why: str, left_s: float | None
) -> None:
    queue = a_queue(running("big", 4, **RUNS | over), waiting("wide", 2))
    queue.names = {"wide": "gpt", "big": "long"}
    view = queue.view()
    (one,) = view.running
    assert (one.protected, one.protected_s, one.spared_for) == (why, left_s, "gpt")
    reason = f"needs 2 machines, none is free; long is {protected_word(why, left_s)}"
    assert view.waiting[0].reason == reason and protected_word(why, left_s) in running_row(one)["notes"]
    assert queue.mentioned(["wide"]) == {"big", "wide"}
    ahead = scheduler.schedule(queue.allocation, a_stack(), NOW)
    assert ahead is queue.allocation, "the scheduler takes nothing"


def test_a_job_is_spared_only_where_it_would_give_up_machines() -> None:
    """Once its time is over machines are taken; and its class, not its protection, spares a job of higher priority."""
    assert protected_word("just started", 300.0) == "protected for 5m00s (just started)"
    (one,) = a_queue(running("big", 4, **RUNS | {"started": NOW - 900.0}), waiting("wide", 2)).view().running
    assert (one.protected, one.protected_s, one.spared_for) == ("", None, "")
    view = a_queue(running("big", 4, **RUNS | {"started": NOW - 60.0, "priority": 2}), waiting("wide", 2)).view()
    assert (view.running[0].protected, view.running[0].spared_for) == ("just started", "")
    assert view.waiting[0].reason == "needs 2 machines, none is free"


def test_a_job_keeps_the_machines_that_it_took_from_the_waiting_one() -> None:
    # More used than a team with three times its share: only the bar keeps the machines from being taken.
    took = running("big", 4, team="vision", stop=Stop.SAVED, ends=None)
    lost = waiting("wide", 2, team="nlp", barred=("big",))
    view = (queue := a_queue(took, lost)).view()
    assert scheduler.schedule(queue.allocation, a_stack(), NOW) is queue.allocation
    told = "(it took its machines before: two jobs never take turns)"
    assert view.waiting[0].reason == f"needs 2 machines, none is free; big is protected from it {told}"
    assert f"protected from wide {told}" in running_row(view.running[0])["notes"]
    (free,) = a_queue(took, replace(lost, barred=())).view().running
    assert not free.protected


def test_of_many_protected_jobs_the_reason_names_some() -> None:
    jobs = [running(f"r{number}", 1, **RUNS | {"started": NOW - 60.0}) for number in range(4)]
    reason = a_queue(*jobs, waiting("wide", 4, team="nlp")).view().waiting[0].reason
    assert reason.count("protected for 14m00s") == 3 and reason.endswith("; so is 1 more")


def test_a_limit_of_the_team_is_the_reason_and_holds_up_no_other_job() -> None:
    queue = a_queue(
        running("big", 3, team="vision"), waiting("wide", 2), waiting("tall", 2, team="nlp", since=NOW, waits=NOW)
    )
    told = {name: reason for _, name, reason, _ in places(queue.view())}
    assert told["wide"] == "team vision is at its max_machines of 3"
    assert told["tall"].startswith("needs 2 machines"), "it is the first that only lacks machines"


def test_a_job_whose_machines_went_to_another_says_to_whom() -> None:
    queue = a_queue(running("big", 4), waiting("wide", 2), waiting("lost", 1, whom="big", since=NOW, waits=NOW))
    queue.names = {"big": "gpt"}
    assert queue.view().waiting[1].reason == "behind wide; its machines went to gpt"


def test_a_job_that_found_no_machine_says_why_others_come_first() -> None:
    queue = a_queue(running("big", 4), waiting("wide", 2, lapsed=NOW - 60.0), waiting("next", 2, since=NOW, waits=NOW))
    assert [(name, reason[:10]) for _, name, reason, _ in places(queue.view())] == [
        ("next", "needs 2 ma"),
        ("wide", "no machine"),
    ]


def test_reserved_machines_that_have_yet_to_leave_others_are_told() -> None:
    """Nothing else is said of such a job: it has a reservation, and no grant as long as the others have theirs."""
    victim = running("b1", 2, reserved=1, whom="urgent")
    urgent = waiting("urgent", 2, reserved=2, reserved_at=NOW - 30.0, waited_s=120.0, waits=None)
    allocation = Allocation(1, "n", granted("b1", 3), (victim, urgent))
    view = Queue(allocation, a_stack(), NOW).view()
    assert places(view) == [(0, "urgent", "takes the room of b1, whose machines leave", None)]
    assert view.waiting[0].waited_s == 150.0
    assert [(one.name, one.machines, one.granted, one.whom) for one in view.running] == [("b1", 1, 3, "urgent")]


@pytest.mark.parametrize(("victims", "own"), [(1, 0), (3, 2)], ids=["none leaves", "it has its machines"])
def test_without_machines_that_leave_for_it_a_reserved_job_runs(victims: int, own: int) -> None:
    victim = running("b1", 2, reserved=1, whom="urgent")
    urgent = waiting("urgent", 2, reserved=2, reserved_at=NOW - 30.0, waits=None)
    allocation = Allocation(1, "n", (*granted("b1", victims), *granted("urgent", own)), (victim, urgent))
    view = Queue(allocation, a_stack(), NOW).view()
    assert view.waiting == () and {one.name for one in view.running} == {"b1", "urgent"}


def test_the_next_end_serves_the_team_that_will_have_used_less() -> None:
    """When `big` ends, all that it has cost counts against nlp, whose other job is older."""
    queue = a_queue(running("big", 4), waiting("older", 3, team="nlp", since=0.0), waiting("newer", 3))
    starts = {one.name: one.starts_in_s for one in queue.view().waiting}
    assert starts == {"newer": HOUR, "older": None}


def test_a_higher_class_by_waiting_is_an_expected_start() -> None:
    victim = running("big", 4, stop=Stop.SAVED, priority=0)
    queue = a_queue(victim, waiting("wide", 2, team="nlp", priority=0, waits=NOW - DAY + 600.0))
    assert queue.view().waiting[0].starts_in_s == 600.0


def test_a_higher_class_is_no_expected_start_while_a_running_job_may_end_at_any_time() -> None:
    victim = running("big", 4, stop=Stop.SAVED, priority=0, ends=None)
    queue = a_queue(victim, waiting("wide", 2, team="nlp", priority=0))
    assert queue.view().waiting[0].starts_in_s is None, "not the day that it waits at most"


@pytest.mark.parametrize(("waited", "raised"), [(DAY - 1.0, 0), (DAY, 1)])
def test_a_day_of_waiting_raises_a_job(waited: float, raised: int) -> None:
    queue = a_queue(running("big", 4), waiting("wide", 2, waits=NOW - waited))
    assert queue.view().waiting[0].raised == raised


def test_running_jobs_tell_whose_gap_they_fill_and_what_was_taken_from_them() -> None:
    filler = running("fill", 1, gap="wide", recalls=(NOW - DAY, NOW - 60.0), team="vision")
    queue = a_queue(filler, running("big", 3, ends=None), waiting("wide", 2))
    queue.names = {"wide": "gpt"}
    found = {one.name: one for one in queue.view().running}
    assert (found["fill"].gap, found["fill"].recalls, found["fill"].ends_in_s) == ("gpt", 1, HOUR)
    assert (found["big"].gap, found["big"].recalls, found["big"].ends_in_s) == ("", 0, None)


def test_a_team_beyond_its_entitlement_borrows_from_those_that_have_less() -> None:
    """Of 4 machines, nlp with three times vision's share is entitled to 3, and has none."""
    queue = a_queue(running("big", 3, team="vision"), waiting("wide", 3, team="nlp"))
    teams = {one.name: one for one in queue.view().teams}
    assert (teams["nlp"].entitled, teams["nlp"].machines, teams["nlp"].waiting) == (3.0, 0, 1)
    assert teams["nlp"].borrows_from == ()
    assert (teams["vision"].entitled, teams["vision"].machines, teams["vision"].borrows_from) == (1.0, 3, ("nlp",))
    assert queue.view().running[0].borrows_from == ("nlp",)
    alone = a_queue(running("big", 3, team="vision")).view()
    assert alone.running[0].borrows_from == () and alone.teams[1].entitled == 3.0, "idle shares are nobody's"


def test_teams_show_their_use_and_limits() -> None:
    spent = TeamUse("vision", 8.0, NOW - DAY, "1970-01", 20.0)
    queue = a_queue(use=(spent,))
    nlp, vision = queue.view().teams
    assert (vision.use_usd, vision.month_usd) == (pytest.approx(4.0), 20.0), "the former halves each day"
    assert (vision.share, vision.max_machines, vision.max_usd_month) == (1.0, 3, 90.0)
    assert (nlp.use_usd, nlp.max_machines, queue.view().machines) == (0.0, None, 4)


def test_a_job_without_a_claim_is_shown_with_what_it_was_granted() -> None:
    view = Queue(Allocation(1, "n", granted("alone", 2)), a_stack(), NOW).view()
    assert [(one.name, one.team, one.machines) for one in view.running] == [("alone", "default", 2)]
    assert (view.waiting, [one.name for one in view.teams]) == ((), ["default", "nlp", "vision"])


def test_one_teams_part_keeps_the_places_in_the_whole_queue() -> None:
    queue = a_queue(running("big", 4), waiting("wide", 2), waiting("tall", 2, team="nlp", since=NOW, waits=NOW))
    view = queue.view("nlp")
    assert ([one.position for one in view.waiting], [one.name for one in view.teams]) == ([2], ["nlp"])
    assert (view.all_waiting, view.all_running) == (1, 1)


def test_of_many_jobs_the_first_are_shown_and_foreseen() -> None:
    many = [waiting(f"w{number:03}", 1, since=NOW - number, waits=NOW - number) for number in range(200)]
    queue = a_queue(running("big", 4), *many)
    view = queue.view()
    assert (len(view.waiting), view.all_waiting, view.waiting[0].job) == (SHOWN, 200, "w199")
    assert queue.mentioned(queue.shown()) == {*(one.job for one in view.waiting), "big"}
    whole = queue.view(most=None)
    assert len(whole.waiting) == 200
    soon = {one.position for one in whole.waiting if one.starts_in_s is not None and one.starts_in_s < 80_000}
    assert soon == {1, 2, 3}, "vision may have 3, until others have waited for a day"
    assert queue.waiting("w000") is not None and FORESEEN < 200


@pytest.mark.parametrize("width", [90, 100, 160])
def test_on_a_narrow_terminal_reasons_are_wrapped_before_columns_go(width: int) -> None:
    queue = a_queue(
        running("big", 4, recalls=(NOW - 60.0,), team="vision", gap="wide"),
        waiting("wide", 2, team="nlp"),
        waiting("lost", 1, whom="big", waits=NOW - DAY),
    )
    queue.names = {"wide": "a-model-with-a-long-name", "big": "the-job-before-it-that-runs"}
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(tables(queue.view()))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width and "…" not in capture.get()
    first = lines[1].replace("starts in", "start").split()
    gone = {90: {"team", "priority", "waits"}, 100: {"priority"}, 160: set[str]()}[width]
    assert {"team", "priority", "waits", "start"} - set(first) == gone and first[-1] == "why"
    assert any(line.startswith("no room here for") for line in lines) == bool(gone)
    assert any(line.split()[-1] == "the-job-before-it-that-runs" for line in lines), "the last word of a reason"


@pytest.mark.parametrize(
    ("position", "word"),
    [(0, "next"), (1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (121, "121st")],
)
def test_places_are_ordinal_numbers(position: int, word: str) -> None:
    assert place(position) == word


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({}, "has waited 10m00s for 2 machines (team nlp, priority normal); expected start: unknown"),
        (
            {"machines": 1, "max_machines": 4, "raised": 1, "starts_in_s": 7500.0},
            "has waited 10m00s for 1 to 4 machines (team nlp, priority high (was normal)); "
            "expected start: in about 2h05m",
        ),
        (
            {"machines": 1, "max_machines": 1, "starts_in_s": 0.0},
            "has waited 10m00s for 1 machine (team nlp, priority normal); expected start: now",
        ),
        (
            {"position": 0, "reason": "takes the room of b1, whose machines leave"},
            "has waited 10m00s for 2 machines (team nlp, priority normal); "
            "expected start: once those machines have left",
        ),
    ],
)
def test_what_a_job_waits_for_is_one_line(over: dict[str, object], words: str) -> None:
    view = WaitingView("a", "gpt", 3, "nlp", "normal", 0, 2, 2, 600.0, "behind first")
    assert waiting_line(replace(view, **over)) == words


def test_an_expected_end_that_has_passed_is_unknown() -> None:
    (view,) = a_queue(running("big", 3, ends=NOW - 1.0)).view().running
    assert view.ends_in_s is None


def test_a_job_whose_team_has_spent_its_month_is_expected_to_start_in_the_next_one() -> None:
    spent = TeamUse("vision", 0.0, NOW, "1970-01", 90.0)
    (waits,) = a_queue(waiting("w", 2, team="vision", waits=NOW), use=(spent,)).view().waiting
    assert waits.reason == "team vision has spent its max_usd_per_month of $90, so it waits until 1970-02-01 (UTC)"
    assert waits.starts_in_s == 31 * DAY - NOW
    (waits,) = a_queue(waiting("w", 2, team="vision", priority=2, waits=NOW), use=(spent,)).view().waiting
    assert waits.starts_in_s == 31 * DAY - NOW
