"""Submitting a search: interrupted after any write and repeated, each trial is submitted once, with the same values."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotkeeper.client.errors import CliError
from spotkeeper.client.space import values_of
from spotkeeper.client.sweep import AT_ONCE, begin, submit_missing
from spotkeeper.client.sweep_status import Sweep, find_sweep
from spotkeeper.contract.job import JobSpec, RequestKind
from spotkeeper.contract.parse.typed import load_yaml
from spotkeeper.contract.record import Outcome, Phase, Record
from spotkeeper.contract.sweep import Params, SweepState
from spotkeeper.contract.sweepfile import MOST_S, Cohort, Dimension, SweepFile, SweepSpec, SweepStop
from spotkeeper.reconcile.controller import cleanup
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects
from spotkeeper.reconcile.store.store import Store, open_store
from spotkeeper.report.sweep import sweep_view
from spotkeeper.report.text.sweep import stop_lines
from tests.cli.conftest import Cli

FILE = """
name: lr
job: job.yaml
space:
  lr: {loguniform: [1e-5, 1e-1]}
  o: {choice: [adam, sgd]}
trials: 3
metric: loss
goal: min
stop: {halving: {min: 10, max: 90}}
"""


@pytest.fixture
def sweep_yaml(folder: Path) -> Path:
    (folder / "job.yaml").write_text("name: first\ncommand: [train.py, '{lr}']\nsource: code\nnodes: 2\n")
    (folder / "sweep.yaml").write_text(FILE)
    return folder / "sweep.yaml"


def values(store: Store) -> dict[int, Params]:
    """The parameters of every job in the bucket, by trial; fails if two jobs are the same trial."""
    found = {}
    for job in store.active_jobs():
        spec = store.read_spec(job)
        assert spec is not None and spec.trial is not None and spec.trial.number not in found
        assert store.read_record(job) is not None and spec.command[1] == str(spec.params["lr"])
        found[spec.trial.number] = spec.params
    return found


def end(store: Store, job: str) -> None:
    """A round ends the job and cleans up after it."""
    read = store.read_record(job)
    assert read is not None
    over = msgspec.structs.replace(read.value, phase=Phase.DONE, outcome=Outcome.SUCCEEDED, ver=1, nonce="n")
    assert store.cas_record(over, read.token)
    cleanup.bury(store, over, 0.0)


def test_a_search_submits_a_job_for_each_trial(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    done = cli("sweep", sweep_yaml, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["sweep"], told["trials"]) == ("lr", 3)
    assert told["new"] == {str(number): job for number, job in store.list_trials("lr").items()}
    assert set(values(store)) == {0, 1, 2}
    (cohort,) = store.list_cohorts("lr")
    assert dict(enumerate(cohort.values)) == values(store)
    spec = store.read_spec(told["new"]["2"])
    assert spec is not None and spec.trial is not None and spec.source_sha256 is not None
    assert spec.name == "lr-0002" and spec.trial.rungs == (10, 30) and spec.trial.count == 3
    assert store.get(paths.source(told["new"]["2"], spec.source_sha256)) is not None
    first = {store.read_record(job).value.port_base for job in told["new"].values()}  # type: ignore[union-attr]
    assert len(first) == 3, "each trial has ports of its own"


def test_repeating_a_search_changes_nothing(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    assert cli("sweep", sweep_yaml).code == 0
    before = store.list("")
    done = cli("sweep", sweep_yaml)
    assert done.code == 0 and "all 3 trials are submitted already" in done.out
    assert store.list("") == before


def test_another_search_of_this_name_is_refused(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    assert cli("sweep", sweep_yaml).code == 0
    before = store.list("")
    sweep_yaml.write_text(FILE.replace("trials: 3", "trials: 4").replace("1e-1", "1"))
    (sweep_yaml.parent / "code" / "train.py").write_text("print(2)\n")
    done = cli("sweep", sweep_yaml)
    assert (done.code, done.err.splitlines()) == (
        4,
        [
            "error: lr: a search of this name exists already, with other content: space, trials, job.source",
            "  try: give this search another `name`; more trials of that one: spotkeeper sweep extend lr --trials +20",
        ],
    )
    assert store.list("") == before


WRITES = ("create", "put", "replace")


@contextmanager
def dying_after(writes: int) -> Iterator[None]:
    """The process dies after so many writes to the bucket: later ones fail."""
    left = itertools.count(writes, -1)

    def dying(name: str):  # type: ignore[no-untyped-def]
        real = getattr(SqliteObjects, name)

        def call(self: SqliteObjects, *args: object) -> object:
            if next(left) <= 0:
                raise StoreError("cut off")
            return real(self, *args)

        return call

    with pytest.MonkeyPatch.context() as cut:
        for name in WRITES:
            cut.setattr(SqliteObjects, name, dying(name))
        yield


@pytest.mark.parametrize("ends", [False, True], ids=["", "submitted-trials-end-meanwhile"])
def test_a_search_cut_off_after_any_write_goes_on(cli: Cli, store: Store, sweep_yaml: Path, ends: bool) -> None:
    """Each attempt dies one write later than the one before; what the earlier ones have written is there."""
    seen: dict[int, Params] = {}
    tries, writes = 0, 1
    while True:
        with dying_after(writes):
            done = cli("sweep", sweep_yaml)
        for job in store.active_jobs():
            if store.read_record(job) is not None:
                spec = store.read_spec(job)
                assert spec is not None and spec.trial is not None
                assert spec.trial.number not in seen or not ends, "a trial that has ended runs again"
                seen[spec.trial.number] = spec.params
                if ends:
                    end(store, job)
        if done.code == 0:
            break
        assert done.err.endswith("error: the bucket: cut off\n")
        tries, writes = tries + 1, writes % 7 + 1
    assert tries >= 3
    assert len(store.list_trials("lr")) == len(set(store.list_trials("lr").values())) == 3
    (cohort,) = store.list_cohorts("lr")
    assert seen == dict(enumerate(cohort.values))
    records = [path for path in store.list("jobs/") if path.endswith("/rec")]
    assert len(records) == 3, "no trial has two jobs"


def test_a_search_cut_off_once_at_every_write(
    cli: Cli, tmp_path: Path, store: Store, sweep_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in itertools.count(1):
        url = f"sqlite://{tmp_path}/other-{at}.sqlite"
        monkeypatch.setenv("SPOTKEEPER_BUCKET", url)
        other = open_store(url)
        other.put(paths.STACK, store.get(paths.STACK) or b"")
        with dying_after(at):
            if cli("sweep", sweep_yaml).code == 0:
                break
        done = cli("sweep", sweep_yaml)
        assert done.code == 0, (at, done.err)
        (cohort,) = other.list_cohorts("lr")
        assert values(other) == dict(enumerate(cohort.values)), at
        assert set(other.list_trials("lr").values()) == set(other.active_jobs()), at
    assert at > 3 + 3 * 6, "source, file, cohort; for each trial what submit writes, and its note"


def test_a_trial_whose_submission_was_given_up_gets_another_job(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    """A day after an interrupted submission a tick ends it; the trial can still be submitted."""
    with pytest.MonkeyPatch.context() as cut:
        cut.setattr(Store, "create_record", lambda *_: (_ for _ in ()).throw(StoreError("cut off")))
        assert cli("sweep", sweep_yaml).code == 1
    left = store.active_jobs()
    assert left and not store.list_trials("lr")
    for job in left:
        spec = store.read_spec(job)
        assert spec is not None
        gone = cleanup.withdraw(store, job, spec.name, 0.0, "its submission was never completed")
        assert gone is not None
        cleanup.bury(store, gone, 0.0)
    assert cli("sweep", sweep_yaml).code == 0
    assert set(values(store)) == {0, 1, 2}
    assert not set(left) & set(store.list_trials("lr").values())


def test_two_shells_submit_each_trial_once(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    """Between the second trial's job and its note, another shell submits all trials."""
    real, todo = Store.create_trial, [lambda: cli("sweep", sweep_yaml)]

    def late(self: Store, name: str, number: int, job: str) -> bool:
        if number == 1 and todo:
            assert todo.pop()().code == 0
        return real(self, name, number, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "create_trial", late)
        assert cli("sweep", sweep_yaml).code == 0
    assert set(values(store)) == {0, 1, 2} and set(store.list_trials("lr").values()) == set(store.active_jobs())


def a_search(store: Store, trials: int) -> Sweep:
    file = SweepFile("lr", "", {"lr": Dimension(uniform=(0.0, 1.0))}, "loss", "min", trials=trials)
    spec = SweepSpec(file, JobSpec("x", ("/opt/train.py",)), 4, "nonce", 0.0)
    return begin(store, spec, None, Cohort(0, tuple({"lr": at / 99} for at in range(trials)), 0))


def test_the_function_hears_of_each_trial_unless_it_is_over(store: Store) -> None:
    sweep = a_search(store, 3)
    told: list[str] = []
    first = dict(submit_missing(store, sweep, None, 0.0, "ada", told.append))
    assert sorted(told) == sorted(first.values())
    end(store, first[0])
    for number in (0, 1):  # the note was not written before the shell died
        store.delete(paths.sweep_trial("lr", number))
    told.clear()
    again = dict(submit_missing(store, find_sweep(store, "lr"), None, 0.0, "ada", told.append))
    assert again == {0: first[0], 1: first[1]} and told == [first[1]]


def test_a_search_takes_no_other_job_as_its_trial(store: Store) -> None:
    """Any submitter can write the note of a trial that is not submitted yet."""
    sweep = a_search(store, 2)
    assert store.create_trial("lr", 1, "mallory2")
    assert find_sweep(store, "lr").jobs == {} and find_sweep(store, "lr").missing() == [0, 1]
    with pytest.raises(CliError, match="somebody named job mallory2 as trial 1") as raised:
        list(submit_missing(store, sweep, None, 0.0, "ada", lambda _: None))
    assert f"cancel that job and job {sweep.spec.job_id(1, 0)}" in raised.value.remedy


def test_a_search_that_is_stopped_meanwhile_submits_no_further_trial(store: Store) -> None:
    sweep, told = a_search(store, 40), list[str]()
    store.create_stop("lr", SweepStop(40, 1.0))
    with pytest.raises(CliError, match="stopped meanwhile"):
        list(submit_missing(store, sweep, None, 0.0, "ada", told.append))
    jobs = store.list_trials("lr")
    assert 1 <= len(jobs) <= AT_ONCE and set(told) == set(jobs.values())
    for job in jobs.values():
        assert [request.kind for request in store.list_requests(job)] == [RequestKind.CANCEL]


@pytest.mark.parametrize(
    "odd",
    [
        b'{"below":1,"at":1e300}',
        b'{"below":99999,"at":1}',
        b'{"below":-1,"at":1}',
        b'{"below":1,"at":1,"by":"a\\n"}',
        b"[",
    ],
)
def test_an_odd_note_of_a_stop_stops_nobody(store: Store, odd: bytes) -> None:
    """Any submitter may write one. Dates cannot show times after the year 9999."""
    a_search(store, 3)
    store._objects.put(paths.sweep_stops("lr") + "000001.json", odd)
    store.create_stop("lr", SweepStop(2, MOST_S))
    sweep = find_sweep(store, "lr")
    assert [stop.below for stop in sweep.stops] == [2]
    view = sweep_view(sweep.spec, sweep.cohorts, SweepState("lr"), {}, sweep.stops)
    assert stop_lines(view)[0].startswith("stopped at 9999-01-01 00:00 UTC: ")


def test_after_an_error_no_further_trial_begins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, shut, begun = a_search(store, 40), threading.Event(), list[str]()
    real = ThreadPoolExecutor.shutdown

    def shutdown(self: ThreadPoolExecutor, *args: Any, **named: Any) -> None:
        shut.set()
        real(self, *args, **named)

    def create(self: Store, record: Record) -> bool:
        begun.append(record.name)
        if record.name == "lr-0000":
            raise StoreError("cut off")
        return shut.wait(60)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    monkeypatch.setattr(Store, "create_record", create)
    with pytest.raises(StoreError, match="cut off"):
        list(submit_missing(store, sweep, None, 0.0, "ada", lambda _: None))
    assert len(begun) <= AT_ONCE + 1


def test_trials_share_no_ports_while_there_are_enough(store: Store) -> None:
    sweep = a_search(store, 60)
    records = [store.read_record(job) for _, job in submit_missing(store, sweep, None, 0.0, "ada", lambda _: None)]
    assert len({read.value.port_base for read in records if read}) == 60


# -- extend


def test_extend_continues_the_sequence(cli: Cli, store: Store, sweep_yaml: Path, tmp_path: Path) -> None:
    assert cli("sweep", sweep_yaml).code == 0
    (sweep_yaml.parent / "code" / "train.py").write_text("print('newer, and not sent')\n")
    for job in store.active_jobs():
        end(store, job)
    assert cli("sweep", "extend", "lr", "--trials", "+4", "--max-usd", "5").code == 0
    assert set(values(store)) == {3, 4, 5, 6}
    one, two = store.list_cohorts("lr")
    whole = drawn(7)
    assert one.values + two.values == whole and (two.first, two.drawn, two.max_usd) == (3, 3, 5.0)
    assert cli("sweep", "extend", "lr", "--trials", "2", "--seed", "9").code == 0
    third = store.list_cohorts("lr")[2]
    assert (third.first, third.seed, third.drawn, third.max_usd) == (7, 9, 0, 5.0)
    specs = [store.read_spec(job) for job in store.list_trials("lr").values()]
    assert len({spec.source_sha256 for spec in specs if spec}) == 1
    trial = specs[-1] and specs[-1].trial
    assert trial is not None and (trial.first, trial.count, trial.number) == (7, 2, 8)


def drawn(count: int) -> tuple[Params, ...]:
    return values_of(load_yaml(FILE, SweepFile), 0, 0, count)


def test_extend_completes_an_interrupted_cohort_first(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    assert cli("sweep", sweep_yaml).code == 0
    with dying_after(6):
        assert cli("sweep", "extend", "lr", "--trials", "+4").code == 1
    done = cli("sweep", "extend", "lr", "--trials", "+4")
    assert done.code == 0 and "an earlier submission lacks" in done.err
    assert Counter(len(cohort.values) for cohort in store.list_cohorts("lr")) == {3: 1, 4: 1}
    assert set(values(store)) == set(range(7))


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("lr", "--trials", "many"), 2, "--trials many: want a number of trials to add, such as +20"),
        (("lr", "--trials", "+0"), 2, "--trials +0: want a number"),
        (("lr", "--trials", "+9998"), 2, "a search has at most 10,000 trials, this one 3"),
        (("rl", "--trials", "+1"), 3, "rl: no such search"),
        (("LR", "--trials", "+1"), 3, "LR: no such search (did you mean lr?)"),
    ],
)
def test_wrong_extensions(
    cli: Cli, store: Store, sweep_yaml: Path, argv: tuple[str, ...], code: int, message: str
) -> None:
    assert cli("sweep", sweep_yaml).code == 0
    before = store.list("")
    done = cli("sweep", "extend", *argv)
    assert done.code == code and message in done.err
    assert store.list("") == before


def test_a_grid_cannot_be_extended(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    grid = FILE.replace("trials: 3\n", "sampler: grid\n").replace("1e-1]", "1e-1], points: 2")
    sweep_yaml.write_text(grid)
    assert cli("sweep", sweep_yaml).code == 0
    assert set(values(store)) == {0, 1, 2, 3}
    done = cli("sweep", "extend", "lr", "--trials", "+4")
    assert done.code == 4 and "a grid has every combination already" in done.err


def test_of_two_extensions_at_once_one_is_refused(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    assert cli("sweep", sweep_yaml).code == 0
    real, todo = Store.create_cohort, [Cohort(3, ({"lr": 1.0},), 5)]

    def late(self: Store, name: str, cohort: Cohort) -> bool:
        if todo:
            assert real(self, name, todo.pop())
        return real(self, name, cohort)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "create_cohort", late)
        done = cli("sweep", "extend", "lr", "--trials", "+4")
    assert done.code == 4 and "another `extend` came first" in done.err
    assert [len(cohort.values) for cohort in store.list_cohorts("lr")] == [3, 1]


def test_a_priority_that_the_trials_do_not_get_is_noted(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    with (sweep_yaml.parent / "job.yaml").open("a") as job:
        job.write("priority: high\n")
    note = "note: the function does not know yet whose job it is: it counts for team default, with priority normal"
    assert note in cli("sweep", sweep_yaml).err.splitlines()
    assert note not in cli("sweep", sweep_yaml).err.splitlines(), "nothing was submitted"


def test_a_stack_that_is_destroyed_takes_no_search(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    store.put(paths.DRAIN, b"{}")
    done = cli("sweep", sweep_yaml)
    assert done.code == 4 and "is being destroyed" in done.err and not store.list("sweeps/")
