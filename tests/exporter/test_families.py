"""Metrics of a stack: their values, names and labels, and that their number is bounded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import typer
import yaml
from msgspec.structs import replace
from prometheus_client.core import Metric

from spotkeeper.cli import main
from spotkeeper.client.target import Target
from spotkeeper.contract.allocation import Allocation, Claim, TeamUse
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Mirrored, Node, Phase
from spotkeeper.contract.stack import TeamState
from spotkeeper.contract.usage import BYTES, DeviceUsage, HostUsage, NodeUsage, object_name
from spotkeeper.exporter import families as made
from spotkeeper.exporter import reading as reads
from spotkeeper.exporter.reading import StackReader, StackReading
from spotkeeper.reconcile.controller import cleanup
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.lines import phase_word
from tests.cli.records import JOB, a_job
from tests.contract.samples import STACK
from tests.exporter.conftest import ENDED, HELD, NOW, STARTING, StillClock
from tests.report.ledgers import entry, generation, intent, lost

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"


@pytest.fixture
def reading(target: Target, store: Store) -> StackReading:
    return StackReader(target).read()


def values(reading: StackReading, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of one name by some of their labels."""
    samples = [sample for family in made.families(reading) for sample in family.samples if sample.name == name]
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in samples}


def test_jobs_are_counted_by_state_and_reason(reading: StackReading) -> None:
    found = values(reading, "spotkeeper_jobs", "state")
    assert {state: count for (state,), count in found.items() if count} == {
        **{"training": 1.0, "hold": 1.0},
        **{"starting": 1.0, "done": 1.0},
    }
    assert set(found) == {(state,) for state in made.STATES}, "a state without jobs is 0, and no hole"
    assert values(reading, "spotkeeper_jobs_on_hold", "reason")["capacity",] == 1.0
    assert values(reading, "spotkeeper_job_on_hold", "job_name", "reason") == {("held", "capacity"): 1.0}


def test_a_running_jobs_state_is_the_word_of_status(target: Target, store: Store) -> None:
    read = store.read_record(JOB)
    assert read is not None and store.cas_record(replace(read.value, nonce="other", ver=7, stop=True), read.token)
    found = {one.record.name: (made.state_of(one), phase_word(one.view)) for one in StackReader(target).read().jobs}
    assert found["first"] == ("regrouping", "regrouping") and found["starting"] == ("starting", "starting")


def test_a_jobs_training_and_money(reading: StackReading) -> None:
    view = next(one.view for one in reading.jobs if one.record.job == JOB)
    key = ("first",)
    assert values(reading, "spotkeeper_job_step", "job_name") == {key: 40.0}
    assert values(reading, "spotkeeper_job_loss", "job_name") == {key: 2.25}
    assert values(reading, "spotkeeper_job_checkpoint_age_seconds", "job_name") == {key: 60.0}
    assert values(reading, "spotkeeper_job_image_steps", "job_name") == {key: 12.0}
    assert values(reading, "spotkeeper_job_image_cost_ratio", "job_name") == {key: 0.006}
    assert values(reading, "spotkeeper_job_spent_usd", "job_name")[key] == view.money.spent > 0
    assert values(reading, "spotkeeper_job_egress_usd", "job_name")[key] == view.money.egress == 0.0
    assert values(reading, "spotkeeper_job_on_demand_usd", "job_name")[key] == view.money.on_demand_only
    assert values(reading, "spotkeeper_job_usd_per_hour", "job_name")[key] == 1.0 + 0.5
    assert values(reading, "spotkeeper_usd_per_hour") == {(): 1.0 + 0.5 + 3.0}, "and a static machine"
    assert values(reading, "spotkeeper_max_usd_per_hour") == {(): 50.0}
    machines = values(reading, "spotkeeper_job_machines", "job_name", "model", "state")
    assert machines["first", "spot", "training"] == machines["first", "on-demand", "training"] == 1.0
    assert ("held", "spot", "ready") not in machines


def test_losses_crashes_and_copies_of_a_job_that_ends(target: Target, store: Store) -> None:
    copies = (Mirrored("2-40", 0, NOW - 300), Mirrored("2-20", 0, NOW - 600))
    a_job(store, job="lost0000", name="lost", mirror=copies)
    before = (intent(0.0, 1, 1), entry(Event.ADMITTED, 60.0, 1, 1))
    after = (replace(generation(550.0, 2), again=7), entry(Event.CRASH, 800.0, 0))
    for told in (*before, *lost(1)[:-1], *after):
        store.append_ledger("lost0000", told)
    store.put_progress("lost0000", Progress(2, 40, 990.0, commit_at=940.0))
    key, reading = ("lost",), StackReader(target).read()
    assert values(reading, "spotkeeper_job_preemptions_total", "job_name", "notice")["lost", "no"] == 1.0
    assert values(reading, "spotkeeper_job_crashes_total", "job_name")[key] == 1.0
    assert values(reading, "spotkeeper_job_repeated_steps_total", "job_name")[key] == 7.0
    assert values(reading, "spotkeeper_job_checkpoint_copy_age_seconds", "job_name") == {key: 300.0}, "the newest"
    read = store.read_record("lost0000")
    assert read is not None and store.cas_record(replace(read.value, phase=Phase.END, ver=7), read.token)
    ending = StackReader(target).read()
    assert values(ending, "spotkeeper_jobs", "state")["ending",] == 1.0
    assert values(ending, "spotkeeper_job_checkpoint_copy_age_seconds", "job_name") == {}, "none is made any more"
    assert key in values(reading, age := "spotkeeper_job_checkpoint_age_seconds", "job_name")
    assert key not in values(ending, age, "job_name")


def test_a_job_that_stops_regroups(reading: StackReading) -> None:
    (first,) = (one for one in reading.jobs if one.record.job == JOB)
    assert made.state_of(replace(first, record=replace(first.record, stop=True))) == "regrouping"


CLAIMS = (
    Claim(JOB, 2, 4, 0.0, team="nlp", reserved=2, recalls=(NOW - 60.0, NOW - 30.0)),
    Claim(STARTING, 1, 1, 0.0, team="vision", priority=2, waits=NOW - 90.0),
    Claim("other000", 1, 1, 0.0, team="vision", waits=NOW - 20.0),
)


@pytest.fixture
def queued(store: Store) -> Store:
    """Two jobs wait: one that never had machines, and one that has the queue's hold."""
    stack = replace(STACK, teams=(TeamState("nlp"), TeamState("vision", share=3.0), TeamState("idle")))
    store.put("stack/pools.json", msgspec.json.encode(stack))
    a_job(store, job="other000", name="other", phase=Phase.HOLD, hold=Hold.QUEUE, members=())
    read = store.read_record(STARTING)
    assert read is not None and store.cas_record(replace(read.value, nonce="m", ver=7, nodes=(Node(),)), read.token)
    use = (TeamUse("nlp", 3.0, NOW, "1970-01", 5.0),)
    assert store.cas_allocation(Allocation(1, "n", (), CLAIMS, use), "")
    return store


def test_the_queue_by_team_and_priority(target: Target, queued: Store) -> None:
    reading = StackReader(target).read()
    waiting = values(reading, "spotkeeper_queue_waiting", "team", "priority")
    assert {key: count for key, count in waiting.items() if count} == {("vision", "high"): 1.0, ("vision", "normal"): 1}
    assert len(waiting) == 9, "three teams, three priorities: none is a hole"
    assert values(reading, "spotkeeper_queue_oldest_wait_seconds") == {(): 90.0}
    machines = values(reading, "spotkeeper_team_machines", "team")
    assert machines == {("idle",): 0.0, ("nlp",): 2.0, ("vision",): 0.0}
    assert values(reading, "spotkeeper_team_entitled", "team")["vision",] == 2.0, "it wants no more"
    assert values(reading, "spotkeeper_team_use_usd", "team")["nlp",] == 3.0
    assert values(reading, "spotkeeper_team_month_usd", "team")["nlp",] == 5.0


def test_jobs_in_the_queue_are_not_on_hold(target: Target, queued: Store) -> None:
    reading = StackReader(target).read()
    found = values(reading, "spotkeeper_jobs", "state")
    assert (found["queued",], found["hold",], found["starting",]) == (2.0, 1.0, 0.0)
    assert ("queue",) not in values(reading, "spotkeeper_jobs_on_hold", "reason")
    assert set(values(reading, "spotkeeper_job_on_hold", "job_name", "reason")) == {("held", "capacity")}
    assert values(reading, "spotkeeper_job_state", "job_name", "state")["other", "queued"] == 1.0


def test_recalls_are_counted_once_though_claims_forget_them(target: Target, queued: Store) -> None:
    reader = StackReader(target)

    def recalls() -> float:
        return values(reader.read(), "spotkeeper_recalls_total")[()]

    def write(*claims: Claim) -> None:
        old = queued.read_allocation()
        assert queued.cas_allocation(Allocation(old.value.ver + 1, f"n{old.value.ver}", (), claims), old.token)

    assert recalls() == recalls() == 2.0
    write(replace(CLAIMS[0], recalls=(NOW - 30.0, NOW)), *CLAIMS[1:])
    assert recalls() == 3.0, "one more; the oldest is forgotten after a day"
    before = queued.get(paths.ALLOCATION)
    queued.put(paths.ALLOCATION, b"{")
    assert recalls() == 3.0
    queued.put(paths.ALLOCATION, before or b"")
    assert recalls() == 3.0, "an unreadable allocation forgets nothing"
    write()
    assert recalls() == 3.0 and values(reader.read(), "spotkeeper_queue_oldest_wait_seconds") == {(): 0.0}


def test_on_demand_machines_are_no_spot_machines(reading: StackReading) -> None:
    pools = tuple(replace(pool, used=3, used_on_demand=1) for pool in reading.view.pools if pool.kind != "static")
    used = replace(reading, view=replace(reading.view, pools=pools), site=replace(reading.site, no_tick="no tick"))
    found = values(used, "spotkeeper_pool_machines", "pool", "model")
    assert (found["workers", "spot"], found["workers", "on-demand"]) == (2.0, 1.0)
    assert ("workers", "reserved") not in found, "the pool has none"
    some = tuple(replace(pool, used_reserved=2, reserved=4) for pool in pools)
    found = values(replace(used, view=replace(used.view, pools=some)), "spotkeeper_pool_machines", "pool", "model")
    assert (found["workers", "spot"], found["workers", "reserved"]) == (0.0, 2.0)
    assert values(used, "spotkeeper_ticks_failing") == {(): 1.0}


def test_recoveries_count_from_the_stop_to_the_first_step(reading: StackReading) -> None:
    labels = ("job_name", "cause")
    assert values(reading, "spotkeeper_job_recovery_seconds_count", *labels) == {("first", "notice"): 1.0}
    assert values(reading, "spotkeeper_job_recovery_seconds_sum", *labels) == {("first", "notice"): 40.0}
    assert values(reading, "spotkeeper_job_preemptions_total", "job_name", "notice")["first", "yes"] == 1.0


def test_prices_and_machines_of_pools(reading: StackReading) -> None:
    price = values(reading, "spotkeeper_machine_price_usd_per_hour", "pool", "zone", "model")
    assert price["workers", "us-central1-a", "spot"] == 1.0 and price["workers", "us-central1-a", "on-demand"] == 3.0
    assert ("always", "us-central1-a", "spot") not in price, "a static pool has no spot machines"
    assert values(reading, "spotkeeper_pool_machines_max", "pool")["workers",] == 4.0


def test_texts_of_people_become_plain_labels(reading: StackReading) -> None:
    assert ("first", 'a"da  [31m') in values(reading, "spotkeeper_job_info", "job_name", "user")
    assert len(made.plain("x" * 1000)) == made.MOST_TEXT


@pytest.mark.parametrize(
    ("cause", "label"),
    [("loss of 2", "loss"), ("swap to spot", "swap"), ("notice", "notice"), ("something new", "other")],
)
def test_causes_are_a_fixed_set(reading: StackReading, cause: str, label: str) -> None:
    recovery = next(one for job in reading.jobs for one in job.view.recoveries)
    assert made.cause_of(replace(recovery, cause=cause)) == label


def test_a_finished_job_leaves_after_an_hour(target: Target, store: Store, clock: StillClock) -> None:
    reader = StackReader(target)
    assert ENDED in [one.record.job for one in reader.read().jobs]
    clock.at = 930.0 + reads.LEAVES_S - 1.0
    assert ENDED in [one.record.job for one in reader.read().jobs]
    clock.at += 1.0
    assert ENDED in reader._done and ENDED in reader._known
    assert ENDED not in [one.record.job for one in reader.read().jobs]
    assert ENDED not in reader._done and ENDED not in reader._known, "and takes no memory any more"
    assert ENDED not in [one.record.job for one in StackReader(target).read().jobs], "nor does a new exporter show it"


def test_a_withdrawn_submission_which_has_no_ledger_also_leaves_after_an_hour(
    target: Target, store: Store, clock: StillClock
) -> None:
    assert cleanup.withdraw(store, "gone0000", "gone", 9990.0, "cancelled before its submission was complete")
    store.put_tomb("gone0000", 9990.0)
    reader, clock.at = StackReader(target), 9990.0 + reads.LEAVES_S - 1.0
    assert "gone0000" in [one.record.job for one in reader.read().jobs]
    clock.at += 1.0
    assert "gone0000" not in [one.record.job for one in reader.read().jobs]


def test_the_number_of_jobs_is_bounded(target: Target, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    a_job(store, job="newest00", name="newest", created=500.0)
    monkeypatch.setattr(reads, "MOST_JOBS", 2)
    reading = StackReader(target).read()
    assert [one.record.job for one in reading.jobs][-1] == "newest00" and len(reading.jobs) == 2
    assert values(reading, "spotkeeper_jobs_left_out") == {(): 3.0}


def test_an_unreadable_job_is_counted_and_stops_nothing(target: Target, store: Store) -> None:
    store.put("jobs/held0000/rec", b"{")
    store.put(paths.ALLOCATION, b"{")
    reading = StackReader(target).read()
    assert reading.unreadable == 1 and len(reading.jobs) == 3


def test_later_reads_list_no_ledger_that_did_not_change(
    target: Target, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append_ledger(JOB, Entry(at=700.0, id="gone.r0.a2", event=Event.GONE, node=0, attempt=2))
    reader, listed, records = StackReader(target), list[str](), list[str]()
    reader.read()
    whole, record = Store.list_ledger, Store.read_record
    monkeypatch.setattr(Store, "list_ledger", lambda self, job: listed.append(job) or whole(self, job))
    monkeypatch.setattr(Store, "read_record", lambda self, job: records.append(job) or record(self, job))
    reader.read()
    assert listed == []
    assert JOB in records and ENDED not in records, "an ended job does not change"
    read = store.read_record(JOB)
    assert read is not None and store.cas_record(replace(read.value, nonce="other", ver=7), read.token)
    reader.read()
    assert listed == [JOB]
    monkeypatch.setattr(reads, "LEDGER_S", 0.0)
    reader.read()
    assert HELD in listed, "a shell or a full disk adds an entry that no round writes"


def test_a_deleted_machine_costs_nothing_more_though_no_record_tells_of_its_end(
    target: Target, store: Store, clock: StillClock
) -> None:
    start = NOW - 100
    intent = Entry(at=start, id="intent.r0.a1", event=Event.INTENT, node=0, attempt=1, price=36.0, started=start)
    store.append_ledger(HELD, intent)
    reader = StackReader(target)
    reader.read()
    gone = Entry(at=NOW, id="gone.r0.a1", event=Event.GONE, node=0, attempt=1, started=start, ended=NOW)
    store.append_ledger(HELD, gone)
    clock.at += 100
    held = next(one for one in reader.read().jobs if one.record.job == HELD)
    assert held.view.money.spent == pytest.approx(1.0)


def names(families: list[Metric]) -> set[str]:
    return {sample.name for family in families for sample in family.samples}


def test_rules_and_dashboard_name_metrics_that_exist(reading: StackReading, target: Target, store: Store) -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    used = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    used += [query["expr"] for panel in panels for query in panel["targets"]]
    told = set(re.findall(r"\bspotkeeper_[a-z_]+", "\n".join(used)))
    rare = {"spotkeeper_job_seconds_without_step", "spotkeeper_job_checkpoint_copy_age_seconds"}  # not of this stack
    families = list(made.families(reading))
    assert told - {name for name in told if name in rare or "_node_" in name or "_device_" in name} <= names(families)
    assert {name.removesuffix("_total") for name in told} <= {
        part for family in families for part in (family.name, f"{family.name}_sum")
    }


def test_what_alerts_tell_people_to_run_are_commands() -> None:
    app = typer.main.get_command(main.app)
    assert isinstance(app, typer.core.TyperGroup)
    rules = [
        rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]
    told = [rule["annotations"]["action"] for rule in rules]
    given = re.sub(
        r"\{\{ \$labels\.(node|job_name) \}\}",
        lambda label: {"node": "1", "job_name": "first"}[label[1]],
        "\n".join(told),
    )
    commands = re.findall(r"spotkeeper ([a-z]+)((?: (?:first|ZONE|--[a-z]+(?: [0-9]\w*)?))*)", given)
    assert len(commands) >= 8
    for verb, words in commands:
        app.commands[verb].make_context(verb, words.split())


def test_how_busy_machines_and_devices_are(
    target: Target, store: Store, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = (DeviceUsage(1, 0.9, 100, 60, 61.0, 400.0, 3),)
    host = HostUsage(4, 0.5, 1000, 600, devices=devices)
    store.put(object_name(JOB, 0), msgspec.json.encode(NodeUsage(990.0, 1, host)))
    store.put(object_name(JOB, 1), b'{"at": "now"}' + b" " * (1 << 20))
    reader, sizes = StackReader(target), []
    part = Store.part
    monkeypatch.setattr(Store, "part", lambda *args: (sizes.append(args[3]), part(*args))[1])
    reading = reader.read()
    assert values(reading, "spotkeeper_node_cpu_usage_ratio", "job_name", "node") == {("first", "0"): 0.5}
    assert values(reading, "spotkeeper_device_temperature_celsius", "node", "device") == {("0", "1"): 61.0}
    assert values(reading, "spotkeeper_device_ecc_errors", "node", "device") == {("0", "1"): 3.0}
    assert values(reading, "spotkeeper_node_disk_bytes", "node") == {}, "no data disk is mounted"
    reader.read()
    assert sizes == [BYTES + 1] * 2, "of an object of any size, no more is read, and that once a minute"
    monkeypatch.setattr(reads, "USAGE_S", 0.0)
    monkeypatch.setattr(reads, "MOST_NODES", 1)
    clock.at = 990.0 + reads.FRESH_S
    assert values(reader.read(), "spotkeeper_node_cpu_usage_ratio", "node") == {}, "its machine has gone"
    assert len(sizes) == 3, "of the most nodes that are read"
    clock.scale = 60.0  # an agent writes every 10 s, here every 600 s
    assert values(reader.read(), "spotkeeper_node_cpu_usage_ratio", "node") == {("0",): 0.5}
