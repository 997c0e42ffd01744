"""`sweep status`, `stop` and `rerun` on searches in several states."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotkeeper.client.sweep_status import find_sweep, read_facts
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.metrics import object_name
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.sweep import TrialReport
from spotkeeper.contract.sweepfile import SweepStop
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import a_job
from tests.contract.samples import STACK


def put_metrics(store: Store, job: str, **curves: dict[int, float]) -> None:
    def column(kind: Any, values: Any) -> str:
        return base64.b64encode(array(kind, values).tobytes()).decode()

    metrics = {
        name: {"steps": column("q", curve), "seconds": column("f", curve), "values": column("d", curve.values())}
        for name, curve in curves.items()
    }
    store.put(object_name(job, 1), json.dumps({"gen": 1, "ancestors": [], "began": 0.0, "metrics": metrics}).encode())


Over = Callable[..., None]
Tell = Callable[[dict[int, TrialReport]], None]


def view(cli: Cli, *more: str) -> Any:
    done = cli("sweep", "status", "lr", "--json", *more)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture
def halved(store: Store, jobs: dict[int, str], over: Over, tell: Tell) -> dict[int, str]:
    """Nine trials: six stopped at step 10, two at step 30, and one has ended."""
    values = [0.9, 0.1, 0.8, None, 0.2, 0.7, 0.3, 0.6, 0.5]
    reports = {number: TrialReport(number, (value,), over=True) for number, value in enumerate(values)}
    reports[1] = TrialReport(1, (0.1, 0.95), over=True)
    reports[4] = TrialReport(4, (0.2, 0.05), final=0.04, over=True)
    reports[6] = TrialReport(6, (0.3, 0.3), over=True)
    for number, job in jobs.items():
        hours = {1: 3.0, 4: 9.0, 6: 3.0}.get(number, 1.0)
        over(job, Outcome.SUCCEEDED if number == 4 else Outcome.STOPPED, hours)
    tell(reports)
    return jobs


def test_trials_that_got_further_come_first(cli: Cli, halved: dict[int, str]) -> None:
    told = view(cli)
    assert [row["number"] for row in told["rows"]] == [4, 6, 1, 8, 7, 5, 2, 0, 3]
    assert [row["place"] for row in told["rows"]] == [1, 2, 3, 4, 5, 6, 7, 8, None]
    assert told["best"] == 4 and told["states"] == {"succeeded": 1, "stopped": 8}
    assert [(rung["step"], rung["trials"], rung["reached"], rung["best"]) for rung in told["rungs"]] == [
        (10, 9, 9, 0.1),
        (30, 3, 3, 0.05),
    ]
    first, second = told["rows"][:2]
    assert (first["value"], first["rungs"], first["rung"]) == (0.04, 3, 30)
    assert (second["value"], second["rungs"], second["job"]) == (0.3, 2, halved[6])


def test_a_trial_that_stopped_at_no_further_rung_got_furthest(
    cli: Cli, store: Store, halved: dict[int, str], tell: Tell
) -> None:
    """It is the last one of its cohort, since the others have ended; one of them was compared at more rungs."""
    reports = {number: TrialReport(number, over=True) for number in halved}
    reports[4] = TrialReport(4, (0.9,), final=0.8, over=True)
    tell({**reports, 6: TrialReport(6, (0.3, 0.3), over=True)})
    put_metrics(store, halved[4], loss=dict.fromkeys(range(1, 90), 0.9))
    told = view(cli)
    first = told["rows"][0]
    assert (first["number"], first["rungs"], first["value"]) == (4, 3, 0.8)
    assert [(rung["trials"], rung["reached"], rung["lost"]) for rung in told["rungs"]] == [(9, 2, 7), (2, 2, 0)]


def test_money_is_compared_with_on_demand_and_with_all_trials_to_their_ends(cli: Cli, halved: dict[int, str]) -> None:
    told = view(cli)
    hours = 6 * 1.0 + 2 * 3.0 + 9.0
    assert told["spent"] == pytest.approx(hours * 1.0)
    assert told["on_demand_only"] == pytest.approx(hours * 3.0)
    assert told["whole_saved"] == pytest.approx(6 * 0.5 * (90 / 10 - 1) + 2 * 2.5 * (90 / 30 - 1)), "no further starts"
    lines = cli("sweep", "status", "lr").out.splitlines()
    assert lines[0] == "lr: 9 trials: 8 stopped, 1 succeeded"
    assert lines[1:3] == [
        "step 10: 9 of 9 have reported, best loss 0.1000",
        "step 30: 3 of 3 have reported, best loss 0.05",
    ]
    assert lines[3].startswith("best: lr-0004 (loss 0.04): lr 0.")
    assert lines[4] == (
        "spent: $21.00 of $50.00, on-demand the same machines would cost $63.00; by halving it saves about $34.00 (the "
        "stopped trials to their ends)"
    )


def test_rerun_trains_with_the_best_values_again(cli: Cli, store: Store, halved: dict[int, str]) -> None:
    done = cli("sweep", "rerun", "lr", "--seed", "7", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    best, spec = store.read_spec(halved[4]), store.read_spec(told["job"])
    assert best is not None and spec is not None
    assert (spec.name, spec.seed, spec.trial) == ("lr-0004-s7", 7, None)
    assert spec.params == best.params and spec.command == best.command
    again = cli("sweep", "rerun", "lr", "--seed", "7")
    assert again.code == 0 and f"lr-0004-s7: runs already, job {told['job']}" in again.out
    other = cli("sweep", "rerun", "lr", "--seed", "7", "--trial", "2", "--name", "final")
    assert other.code == 0 and other.out.startswith("final: submitted, job ")


def test_a_new_search_has_no_best_trial(cli: Cli, jobs: dict[int, str]) -> None:
    told = view(cli)
    assert told["best"] is None and told["states"] == {"starting": 9} and told["spent"] == 0.0
    assert [row["number"] for row in told["rows"]] == list(range(9))
    assert {row["place"] for row in told["rows"]} == {None}
    done = cli("sweep", "rerun", "lr", "--seed", "7")
    assert done.code == 4 and "no trial has reported loss yet" in done.err


def test_trials_without_a_report_are_compared_by_their_newest_point(
    cli: Cli, store: Store, jobs: dict[int, str]
) -> None:
    for number, curve in ((2, {1: 3.0, 2: 0.5, 3: 0.7}), (5, {1: 0.1, 2: 0.6}), (7, {1: 0.5, 2: float("nan")})):
        put_metrics(store, jobs[number], loss=curve)
    told = view(cli)
    assert [row["number"] for row in told["rows"][:2]] == [5, 2] and told["best"] == 5
    first = told["rows"][0]
    assert (first["value"], first["step"], first["rungs"], first["curve"]) == (0.6, 2, 0, "▁█")
    values = {row["number"]: row["value"] for row in told["rows"]}
    assert values[7] is None and values[0] is None
    done = cli("sweep", "rerun", "lr", "--seed", "7")
    assert done.code == 0 and done.out.startswith("lr-0005-s7: submitted")


def test_wrong_trials_and_names_of_a_rerun(cli: Cli, store: Store, jobs: dict[int, str]) -> None:
    before = store.list("")
    done = cli("sweep", "rerun", "lr", "--seed", "1", "--trial", "9")
    assert done.code == 3 and "--trial 9: no such trial" in done.err and "lr has 0 to 8" in done.err
    done = cli("sweep", "rerun", "lr", "--seed", "1", "--trial", "1", "--name", "No")
    assert done.code == 2 and "No: no name of a job" in done.err
    assert store.list("") == before


def test_reports_in_any_state_are_shown(cli: Cli, store: Store, jobs: dict[int, str], over: Over, tell: Tell) -> None:
    """A trial without a number, one that failed, one with another goal's better value, one that was never submitted."""
    tell({0: TrialReport(0, (None,)), 1: TrialReport(1, (0.5,)), 2: TrialReport(2, (float("nan"),))})
    over(jobs[3], Outcome.FAILED)
    over(jobs[5], Outcome.CANCELLED)
    store.delete("sweeps/lr/trials/000008")
    told = view(cli)
    assert told["missing"] == 1 and told["best"] == 1
    states = {row["number"]: row["state"] for row in told["rows"]}
    assert (states[3], states[5], states[8]) == ("failed", "cancelled", "not submitted")
    assert told["states"] == {"starting": 6, "failed": 1, "cancelled": 1, "not submitted": 1}
    assert "1 trial not submitted" in cli("sweep", "status", "lr").out


def test_csv_has_a_line_for_each_trial(cli: Cli, store: Store, jobs: dict[int, str]) -> None:
    done = cli("sweep", "status", "lr", "--csv")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert len(rows) == 9 and [row["trial"] for row in rows] == [f"lr-000{number}" for number in range(9)]
    (cohort,) = store.list_cohorts("lr")
    for row, values in zip(rows, cohort.values, strict=True):
        assert float(row["lr"]) == values["lr"] and row["state (param)"] == values["state"]
        assert row["state"] == "starting" and row["place"] == ""


def test_a_trial_that_has_ended_is_not_read_again(
    store: Store, jobs: dict[int, str], over: Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(jobs[4], Outcome.SUCCEEDED)
    sweep = find_sweep(store, "lr")
    found = read_facts(store, sweep, STACK, 9e3)
    over(jobs[5], Outcome.FAILED)
    read: list[str] = []
    real = Store.read_record
    monkeypatch.setattr(Store, "read_record", lambda self, job: (read.append(job), real(self, job))[1])
    again = read_facts(store, sweep, STACK, 9e3, known=found)
    assert sorted(read) == sorted(job for number, job in jobs.items() if number != 4)
    assert again[4] is found[4] and set(again) == set(jobs)
    assert again[5].view.outcome is Outcome.FAILED, "what had not ended is read"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("rl",), 3, "rl: no such search"),
        (("lr", "--csv", "--json"), 2, "--csv, --json and --watch exclude each other"),
        (("lr", "--watch"), 2, "--watch needs a terminal"),
    ],
)
def test_wrong_options(cli: Cli, jobs: dict[int, str], argv: tuple[str, ...], code: int, message: str) -> None:
    done = cli("sweep", "status", *argv)
    assert (done.code, done.out) == (code, "") and message in done.err


def test_without_a_name_all_searches_are_listed(cli: Cli, store: Store) -> None:
    assert cli("sweep", "status").out == "the stack prod has no searches\n"
    assert json.loads(cli("sweep", "status", "--json").out) == []


def test_the_names_of_searches(cli: Cli, jobs: dict[int, str]) -> None:
    assert cli("sweep", "status").out == "lr\n"


def test_a_trial_at_a_rung_waits(cli: Cli, store: Store, jobs: dict[int, str], tell: Tell) -> None:
    read = store.read_record(jobs[2])
    assert read is not None
    held = msgspec.structs.replace(read.value, phase=Phase.HOLD, hold=Hold.RUNG, hold_ends=9e9, nonce="n")
    assert store.cas_record(held, read.token)
    assert [row["state"] for row in view(cli)["rows"]].count("waiting") == 1, "its report is under way"
    tell({2: TrialReport(2, (0.5,))})
    told = view(cli)
    assert told["rows"][0]["state"] == "waiting at step 10" and told["states"] == {"waiting": 1, "starting": 8}
    assert cli("status").out.startswith("search lr: 9 trials (8 starting, 1 waiting), spent $0.00: ")


def on_hold(store: Store, job: str) -> None:
    read = store.read_record(job)
    assert read is not None
    held = msgspec.structs.replace(read.value, phase=Phase.HOLD, hold=Hold.PAUSE, nonce="n")
    assert store.cas_record(held, read.token)


def test_a_rung_says_for_whom_it_waits_and_what_to_do(
    cli: Cli, store: Store, jobs: dict[int, str], over: Over, tell: Tell
) -> None:
    assert "waits for" not in cli("sweep", "status", "lr").out, "nobody waits yet"
    for number in (1, 4):
        on_hold(store, jobs[number])
    held = {number: TrialReport(number, held=True, job=jobs[number]) for number in (1, 4)}
    there = {
        number: TrialReport(number, (0.1 * number,), job=jobs[number]) for number in range(9) if number not in held
    }
    tell({**held, **{number: there[number] for number in (0, 2)}})
    told = view(cli)["rungs"]
    assert told[0]["waits_for"] == [f"lr-000{number}" for number in (3, 5, 6, 7, 8)] and told[1]["waits_for"] == []
    lines = cli("sweep", "status", "lr").out.splitlines()
    assert lines[1:4] == [
        "step 10: 2 of 9 have reported, best loss 0",
        "step 10 waits for lr-0003, lr-0005, lr-0006, lr-0007, lr-0008",
        "step 10 does not wait for lr-0001, lr-0004, on hold: resume in time, or cancel",
    ]
    for number in (0, 2, 3, 5, 6):
        held[number] = TrialReport(number, held=True, job=jobs[number])
    tell({**held, **{number: there[number] for number in (7, 8)}})
    few = "waits for lr-0000, lr-0001, lr-0002, lr-0003, lr-0004 and 2 more, on hold, since too few others have a value"
    assert cli("sweep", "status", "lr").out.splitlines()[2] == f"step 10 {few}: resume or cancel"
    tell({**there, **{number: held[number] for number in (1, 4)}})
    assert "waits for" not in cli("sweep", "status", "lr").out, "it is decided without them"


def test_a_trial_whose_record_was_deleted_has_none(cli: Cli, store: Store, jobs: dict[int, str], tell: Tell) -> None:
    tell({3: TrialReport(3, over=True, job=jobs[3])})
    store.delete(f"jobs/{jobs[3]}/rec")
    told = view(cli)
    assert told["states"] == {"starting": 8, "no record": 1} and told["missing"] == 0


# -- stop


def test_stop_cancels_the_unfinished_trials(cli: Cli, store: Store, jobs: dict[int, str], over: Over) -> None:
    over(jobs[0], Outcome.SUCCEEDED)
    refused = cli("sweep", "stop", "lr")
    assert refused.code == 4 and "lr: this ends 8 trials" in refused.err and "sweep stop lr --yes" in refused.err
    assert not any(store.list_requests(job) for job in jobs.values())
    done = cli("sweep", "stop", "lr", "--yes", "--json")
    assert done.code == 0
    assert json.loads(done.out)["cancelled"] == {str(at): job for at, job in jobs.items() if at}
    asked = {at: [request.kind for request in store.list_requests(job)] for at, job in jobs.items()}
    assert asked == {at: [RequestKind.CANCEL] if at else [] for at in jobs}


def test_a_search_without_unfinished_trials_has_nothing_to_stop(
    cli: Cli, store: Store, jobs: dict[int, str], over: Over
) -> None:
    for job in jobs.values():
        over(job, Outcome.FAILED)
    done = cli("sweep", "stop", "lr")
    assert (done.code, done.out) == (0, "lr: no trial is unfinished\n")


def test_a_stopped_search_submits_no_more_of_its_trials(
    cli: Cli, store: Store, jobs: dict[int, str], tmp_path: Path
) -> None:
    store.delete(paths.sweep_trial("lr", 8))
    store.delete(f"jobs/{jobs[8]}/rec")
    store.delete(paths.sweep_trial("lr", 7))  # its submission was cut off after its job was there
    done = cli("sweep", "stop", "lr", "--yes")
    assert done.code == 0 and done.out == "lr: requested to cancel 8 trials\n"
    assert "2 trials not submitted yet: these are not submitted any more" in done.err
    assert [request.kind for request in store.list_requests(jobs[7])] == [RequestKind.CANCEL]
    (stop,) = store.list_stops("lr")
    told = view(cli)
    assert (stop.below, told["stops"], told["missing"]) == (9, [{"below": 9, "at": stop.at, "by": stop.by}], 0)
    lines = cli("sweep", "status", "lr").out.splitlines()
    assert any(
        re.fullmatch(r"stopped by \S+ at [-0-9]+ [:0-9]+ UTC: cancelled those of the first 9 trials .*", line)
        for line in lines
    )
    assert "further trials: spotkeeper sweep extend lr --trials +20" in lines
    again = cli("sweep", tmp_path / "sweep.yaml")
    assert again.code == 4 and "extend lr" in again.err
    assert re.search(r"lr: the search was stopped by \S+ at [-0-9]+ [:0-9]+ UTC", again.err)
    assert store.list_trials("lr").keys() == set(range(7))
    more = cli("sweep", "extend", "lr", "--trials", "+2")
    assert more.code == 0 and "submitted 2 trials, 11 in all" in more.out, more.err
    assert more.err.startswith("note: 2 trials, fewer than eta (3): only one of them trains to its end\n")
    assert store.list_trials("lr").keys() == {*range(7), 9, 10}
    assert cli("sweep", "extend", "lr", "--trials", "1").code == 0
    assert comparisons(cli)[-1] == "trial 11, step 30: 0 of 1 have reported"
    assert "further trials" not in cli("sweep", "status", "lr").out
    assert cli("sweep", "stop", "lr", "--yes").code == 0
    assert [stop.below for stop in store.list_stops("lr")] == [9, 12]


def comparisons(cli: Cli) -> list[str]:
    lines: list[str] = cli("sweep", "status", "lr").out.splitlines()
    return [line for line in lines if re.match(r"(trials? [\d to]+, )?step \d", line)]


def test_each_cohort_of_an_extended_search_is_counted_by_itself(
    cli: Cli, store: Store, halved: dict[int, str], tell: Tell
) -> None:
    assert cli("sweep", "extend", "lr", "--trials", "+4").code == 0
    first = {report.number: report for report in store.read_sweep("lr").value.trials}
    second = {number: TrialReport(number, (0.1 * number,), first=9) for number in range(9, 12)}
    tell(first | second)
    told = [(rung["first"], rung["last"], rung["step"], rung["trials"], rung["reached"]) for rung in view(cli)["rungs"]]
    assert told == [(0, 8, 10, 9, 9), (0, 8, 30, 3, 3), (9, 12, 10, 4, 3), (9, 12, 30, 1, 0)]
    assert comparisons(cli) == [
        "trials 0 to 8, step 10: 9 of 9 have reported, best loss 0.1000",
        "trials 0 to 8, step 30: 3 of 3 have reported, best loss 0.05",
        "trials 9 to 12, step 10: 3 of 4 have reported, best loss 0.9000",
        "trials 9 to 12, step 10 waits for lr-0012",
        "trials 9 to 12, step 30: 0 of 1 have reported",
    ]


def test_a_stopped_search_waits_for_no_further_report(cli: Cli, store: Store, jobs: dict[int, str], tell: Tell) -> None:
    store.delete(paths.sweep_trial("lr", 8))
    store.delete(f"jobs/{jobs[8]}/rec")
    there = {number: TrialReport(number, (0.5,), job=jobs[number]) for number in (0, 1)}
    tell(there)
    assert comparisons(cli)[::2] == ["step 10: 2 of 9 have reported, best loss 0.5000", "step 30: 0 of 3 have reported"]
    assert cli("sweep", "stop", "lr", "--yes").code == 0
    assert comparisons(cli)[0] == "step 10: 2 of 9 have reported, 1 will not, best loss 0.5000"
    ended = {number: TrialReport(number, over=True, job=jobs[number]) for number in range(2, 8)}
    tell(ended | {number: msgspec.structs.replace(report, over=True) for number, report in there.items()})
    assert comparisons(cli) == [
        "step 10: 2 of 9 have reported, 7 will not, best loss 0.5000",
        "step 30: no trial continues to it",
    ]


def test_no_more_trials_report_a_rung_than_are_to(cli: Cli, store: Store, jobs: dict[int, str], tell: Tell) -> None:
    """A script may end before the first rung, and a resumed trial continues beside those that were compared."""
    reports = {number: TrialReport(number, (0.1 * number,)) for number in range(2, 9)}
    tell(reports | {0: TrialReport(0, final=5.0, over=True), 1: TrialReport(1, held=True)})
    assert comparisons(cli) == [
        "step 10: 8 of 9 have reported, best loss 0.2000",
        "step 30: 0 of 3 have reported",
    ]
    read = store.read_sweep("lr")
    state = read.value.told(TrialReport(1, (0.1, 0.05))).told(TrialReport(2, (0.2,), over=True))
    assert store.cas_sweep(msgspec.structs.replace(state, nonce="m"), read.token)
    assert comparisons(cli)[-1] == "step 30: 1 of 4 have reported, 1 will not, best loss 0.05"
    assert comparisons(cli)[0] == "step 10: 9 of 9 have reported, best loss 0.1000"


def test_stop_cancels_what_is_submitted_until_its_mark_is_there(
    cli: Cli, store: Store, jobs: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    late, real = store.read_record(jobs[8]), Store.create_stop
    assert late is not None
    store.delete(f"jobs/{jobs[8]}/rec")

    def submitted_first(self: Store, name: str, stop: SweepStop) -> bool:
        assert self.create_record(late.value)
        return real(self, name, stop)

    monkeypatch.setattr(Store, "create_stop", submitted_first)
    assert cli("sweep", "stop", "lr", "--yes").code == 0
    assert [request.kind for request in store.list_requests(jobs[8])] == [RequestKind.CANCEL]


def test_stop_marks_a_search_of_which_trials_are_missing(
    cli: Cli, store: Store, jobs: dict[int, str], over: Over
) -> None:
    for number in range(8):
        over(jobs[number], Outcome.FAILED)
    store.delete(f"jobs/{jobs[8]}/rec")
    store.delete(paths.sweep_trial("lr", 8))
    assert cli("sweep", "stop", "lr").code == 0
    assert [stop.below for stop in store.list_stops("lr")] == [9]


def test_a_stopped_search_can_be_rerun(cli: Cli, jobs: dict[int, str], tell: Tell) -> None:
    tell({3: TrialReport(3, (0.5,), job=jobs[3])})
    assert cli("sweep", "stop", "lr", "--yes").code == 0
    done = cli("sweep", "rerun", "lr", "--seed", "7")
    assert done.code == 0 and done.out.startswith("lr-0003-s7: submitted")


# -- trials among the jobs


def test_the_list_of_jobs_has_one_line_for_a_search(cli: Cli, store: Store, jobs: dict[int, str]) -> None:
    a_job(store)
    a_job(store, job="zzzzzzzz", name="lr-0042")  # a job with such a name that is no trial
    lines = cli("status").out.splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["first", "lr-0042"] and len(lines) == 4
    assert lines[3] == "search lr: 9 trials (9 starting), spent $0.00: spotkeeper sweep status lr"
    listed = cli("status", "--filter", "lr-000").out
    assert sum(f"lr-000{number}" in listed for number in jobs) == 9, "whoever looks for trials gets them"
    assert len(json.loads(cli("status", "--json").out)) == 11


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_trial_names_its_search_and_what_it_waits_for(
    cli: Cli, jobs: dict[int, str], tell: Tell, command: str
) -> None:
    first = cli(command, "lr-0003").out.splitlines()
    assert "trial 3 of a search:  spotkeeper sweep status lr" in first and "waits at" not in "".join(first)
    tell({number: TrialReport(number, (0.1 * number,)) for number in (0, 3, 5)})
    assert (
        "waits at step 10: 6 of 9 trials have not reported: lr-0001, lr-0002, lr-0004, lr-0006, lr-0007 and 1 more"
        in cli(command, "lr-0003").out.splitlines()
    )
    tell({number: TrialReport(number, (0.1 * number,)) for number in range(9)})
    assert "waits at" not in cli(command, "lr-0003").out, "its own round continues or ends it"
    second = {2: (0.2, 0.9), 1: (0.1, 0.8)}
    tell({number: TrialReport(number, second.get(number, (0.1 * number,))) for number in range(9)})
    assert "waits at step 30: 1 of 3 trials has not reported: lr-0000" in cli(command, "lr-0001").out


def test_a_job_that_is_no_trial_names_no_search(cli: Cli, store: Store) -> None:
    a_job(store)
    assert "search" not in cli("status", "first").out and "search" not in cli("report", "first").out


def test_a_search_whose_limit_is_spent_is_not_extended(
    cli: Cli, store: Store, jobs: dict[int, str], over: Callable[..., None]
) -> None:
    over(jobs[0], Outcome.SUCCEEDED, hours=2.0)
    spent = view(cli)["spent"]
    refused = cli("sweep", "extend", "lr", "--trials", "+3", "--max-usd", spent)
    assert (refused.code, store.list_trials("lr").keys()) == (4, set(range(9)))
    assert f"lr: max_usd is ${spent:.2f}, and its trials have spent ${spent:.2f}" in refused.err
    assert f"spotkeeper sweep extend lr --trials +3 --max-usd USD, with more than ${spent:.2f}" in refused.err
    assert cli("sweep", "extend", "lr", "--trials", "+3", "--max-usd", spent + 0.01).code == 0
