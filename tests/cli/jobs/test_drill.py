"""``spotkeeper drill``: the machine that it preempts, the calls to each cloud, and a whole recovery in virtual time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.session import Session
from botocore.stub import ANY, Stubber
from msgspec.structs import replace

from spotkeeper.cli.jobs import drill as drilling
from spotkeeper.cli.jobs import preempt as preempting
from spotkeeper.cli.jobs.drill import choose, follow
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import Target
from spotkeeper.clock import Clock
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Node, Outcome, Phase
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.reconcile.clouds.gce.api import Api as GceApi
from spotkeeper.reconcile.clouds.gce.api import GivenToken
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.drill import DrillStep, DrillView, Evidence, Targets, Victim, drill_view, misses
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job, slot
from tests.contract.samples import STACK
from tests.local.client import SPOT, Api, vm_body
from tests.sim.world import World, small_stack

A = "us-central1-a"
MARKED = {"Name": "tag:sk-drill", "Values": ["now"]}


def victim(**over: object) -> Victim:
    found = Victim(JOB, "first", "sk-prod-n0001-a1", "77", A, 1, 1, 2, True, 100.0, (2, 30), ((0, 1), (1, 1)))
    return replace(found, **over)


# -- whom


def test_by_default_the_highest_node_on_spot_is_preempted(store: Store) -> None:
    record = a_job(store)  # node 1 is on demand
    store.put_progress(JOB, Progress(gen=2, step=40, at=1.0, commit_gen=2, commit_step=30))
    found = choose(store, STACK, record, None, announced=True, now=5.0)
    assert (found.node, found.attempt, found.gen, found.commit) == (0, 1, 2, (2, 30))
    assert found.members == ((0, 1), (1, 2))
    assert choose(store, STACK, record, 1, announced=False, now=5.0).attempt == 2


@pytest.mark.parametrize(
    ("over", "node", "word"),
    [
        ({"stop": True}, None, "is not training now"),
        ({"gen": 0}, None, "is not training now"),
        ({"phase": Phase.HOLD}, None, "is not training now"),
        ({"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, None, "is over"),
        ({"nodes": (Node(cur=slot(notice=9.0)), Node(cur=slot()))}, None, "already about to lose a machine"),
        ({"nodes": (Node(cur=slot()), Node(cur=slot(machine="floor-s0")))}, 1, "is a static machine"),
        ({"nodes": (Node(cur=slot(machine="a")), Node(cur=slot(machine="b")))}, None, "has only static machines"),
        ({"nodes": (Node(cur=slot(), next=slot(attempt=2)), Node(cur=slot()))}, 0, "already getting another machine"),
        ({}, 7, "nodes 0 to 1"),
    ],
)
def test_unsuitable_machines_are_not_preempted(
    store: Store, over: dict[str, object], node: int | None, word: str
) -> None:
    record = a_job(store, **over)
    with pytest.raises(CliError, match=word):
        choose(store, STACK, record, node, announced=True, now=5.0)


def test_a_drill_asks_at_the_terminal_before_it_preempts(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Victim] = []
    monkeypatch.setattr(drilling, "preempt", lambda target, state, one: taken.append(one))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("spotkeeper.cli.output.confirm", lambda _: False)
    a_job(store)
    done = cli("drill", "first")
    assert (done.code, taken) == (Exit.REFUSED, [])
    assert "nothing is saved yet" in done.err and "nothing was changed" in done.err


def test_a_missed_target_is_named_and_sets_the_exit_code(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends while it is drilled: phases are missing, whatever else went well."""
    a_job(store)

    def end(target: Target, state: object, one: Victim) -> None:
        held = store.read_record(JOB)
        assert held is not None
        over = replace(held.value, phase=Phase.END, outcome=Outcome.SUCCEEDED, ver=1, nonce="n2")
        assert store.cas_record(over, held.token)

    monkeypatch.setattr(drilling, "preempt", end)
    done = cli("drill", "first", "--yes", "--json")
    assert done.code == Exit.FAILED
    view = json.loads(done.out)
    assert view["over"] and not view["passed"]
    assert "the job ended meanwhile: succeeded" in done.err
    assert done.err.splitlines()[0].endswith(" is preempted; the JSON follows when first trains again")
    assert [phase["step"] for phase in view["phases"]] == [step.value for step in DrillStep]


def test_ctrl_c_says_that_the_machine_is_preempted_anyway(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> DrillView:
        raise KeyboardInterrupt

    a_job(store)
    monkeypatch.setattr(drilling, "preempt", lambda target, state, one: None)
    monkeypatch.setattr(drilling, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drilling.run("first", None, None, notice=True, yes=True, as_json=False)
    assert "is still preempted" in (err := capsys.readouterr().err) and "spotkeeper watch first" in err


def test_without_a_terminal_a_drill_names_its_victim_at_once(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    one = victim()
    view = drill_view(one, Evidence(a_job(store), (), (), None, one.at), {}, Targets())
    with drilling.shown(as_json=False) as show:
        show(view)
        show(view)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and one.vm in out[0] and f"node {one.node}" in out[0]
    assert out[1].startswith("after: time since the preemption; took: time since ")


# -- the recovery


@contextlib.contextmanager
def kept(views: list[DrillView]) -> Iterator[drilling.Show]:
    yield views.append


def drilled(announced: bool, *, broken: bool = False) -> tuple[DrillView, list[DrillView]]:
    """A gang of the simulator loses node 1; ``broken``: the cloud has no machine for it any more."""
    world = World(stack=small_stack(3))
    world.meter.counts = world.function.counts
    job = world.submit(JOB, nodes=2, steps=100_000)
    assert world.until(lambda: job.training, 900.0)
    world.run(90.0)
    now = world.engine.now()
    one = choose(world.store, world.stack, world.record(JOB), 1, announced=announced, now=now)  # type: ignore[arg-type]
    machine = world.cloud.machines[one.uid]
    if broken:
        world.cloud.limits = {(zone, model): 0 for zone in world.stack.zones() for model in type(machine.vm.model)}
    world.preempt(machine, 120.0 if announced else -1.0)
    views: list[DrillView] = []

    def see() -> Evidence:
        record, told = world.record(JOB), world.store.read_progress(JOB)
        ledger = (*world.store.list_ledger(JOB), *record.outbox)
        if told is not None and told.gen > one.gen:  # the door writes it, which the simulated agents do not pass
            ledger = (*ledger, Entry(at=told.at, id=f"first.g{told.gen}", event=Event.FIRST, gen=told.gen))
        return Evidence(record, ledger, world.store.list_facts(JOB), told, world.engine.now())

    view = follow(see, one, Targets(), kept(views), wait=lambda _: world.run(1.0))
    return view, views


@pytest.mark.parametrize("announced", [True, False])
def test_every_phase_of_a_recovery_is_shown_in_order_within_its_target(announced: bool) -> None:
    view, views = drilled(announced)
    assert view.over and view.passed, [(phase.step, phase.took_s, phase.limit_s) for phase in view.phases]
    at = {phase.step: phase.at_s for phase in view.phases}
    assert all(moment is not None for moment in at.values())
    assert (DrillStep.SAVED in at) is announced
    assert (
        at[DrillStep.HEARD]
        <= at[DrillStep.ASKED]
        <= at[DrillStep.BOOTED]
        <= at[DrillStep.HELLO]
        <= at[DrillStep.STARTED]
        <= at[DrillStep.FIRST]
    )  # type: ignore[operator]
    assert view.steps_lost is not None and (view.lost_s == 0.0 or not announced)
    reached = [sum(phase.at_s is not None for phase in each.phases) for each in views]
    assert reached == sorted(reached) and reached[0] == 0, "followed live, and nothing is taken back"


def test_an_unreplaced_machine_misses_its_target_and_ends_the_drill() -> None:
    view, _ = drilled(announced=True, broken=True)
    assert not view.passed
    assert any("was not reached" in line for line in misses(view))


# -- how: Compute Engine, against the one-machine control plane


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    found = LocalCloud.up(tmp_path_factory.mktemp("cloud"), scale=100)
    found.set_capacity(A, 4)
    yield found
    found.down(purge=True)


def machine(cloud: LocalCloud, name: str) -> Victim:
    api = Api.of(cloud)
    api.ok(api.post(f"zones/{A}/instances", vm_body(name) | {"scheduling": SPOT}))
    uid = api.get(f"zones/{A}/instances/{name}")["id"]
    return victim(vm=name, uid=uid)


def test_a_notice_of_compute_engine_preempts(cloud: LocalCloud) -> None:
    one = machine(cloud, "noticed")
    preempting.simulate(GceApi(cloud.compute_endpoint, GivenToken(cloud.token)), "local", one)
    api = Api.of(cloud)
    assert api.gone(f"zones/{A}/instances/noticed")
    kinds = {operation["operationType"] for operation in api.get(f"zones/{A}/operations")["items"]}
    assert "compute.instances.preempted" in kinds


def test_a_machine_of_compute_engine_is_deleted_by_its_unique_id(cloud: LocalCloud) -> None:
    one = machine(cloud, "deleted")
    target = Target("prod", "", cloud.clock, compute_endpoint=cloud.compute_endpoint, compute_token=cloud.token)
    preempting.preempt(target, replace(STACK, project="local"), replace(one, announced=False))
    assert Api.of(cloud).gone(f"zones/{A}/instances/deleted")


def test_a_refusal_of_compute_engine_is_shown(cloud: LocalCloud) -> None:
    with pytest.raises(CliError, match="gets no notice"):
        preempting.simulate(
            GceApi(cloud.compute_endpoint, GivenToken(cloud.token)), "local", victim(vm="nosuch", uid="4711")
        )


def test_the_local_cloud_preempts_with_and_without_notice(cloud: LocalCloud) -> None:
    target = Target("local", "", cloud.clock, local=cloud.folder)
    for announced in (True, False):
        one = machine(cloud, f"local-{announced}".lower())
        preempting.preempt(target, STACK, replace(one, announced=announced))
        assert Api.of(cloud).gone(f"zones/{A}/instances/{one.vm}")


# -- how: AWS, against botocore's own service models


@pytest.fixture
def clients() -> tuple[Any, Any]:
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    return Session().create_client("ec2", **keys), Session().create_client("fis", **keys)


def test_on_aws_a_notice_is_an_experiment_on_the_tagged_machine(clients: tuple[Any, Any]) -> None:
    ec2, fis = clients
    one = victim(uid="i-0123456789abcdef0")
    with Stubber(ec2) as marks, Stubber(fis) as starts:
        tags = [{"Key": "sk-drill", "Value": "now"}]
        marks.add_response("describe_instances", {"Reservations": []}, {"Filters": [MARKED, ANY]})
        marks.add_response("create_tags", {}, {"Resources": [one.uid], "Tags": tags})
        marks.add_response("delete_tags", {}, {"Resources": [one.uid], "Tags": tags})
        known = {"sk-job": JOB, "sk-drill": one.vm}
        asked = {"experimentTemplateId": "EXT1", "clientToken": ANY, "tags": known}
        starts.add_response("start_experiment", {"experiment": {"id": "EXP1"}}, asked)
        for status in ("pending", "initiating", "running", "completed"):
            starts.add_response("get_experiment", {"experiment": {"state": {"status": status}}}, {"id": "EXP1"})
        preempting.experiment(ec2, fis, "EXT1", one, wait=lambda _: None)
        marks.assert_no_pending_responses()
        starts.assert_no_pending_responses()


def test_a_refused_experiment_removes_the_tag(clients: tuple[Any, Any]) -> None:
    ec2, fis = clients
    with Stubber(ec2) as marks, Stubber(fis) as starts:
        marks.add_response("describe_instances", {"Reservations": []})
        marks.add_response("create_tags", {})
        marks.add_response("delete_tags", {})
        starts.add_client_error("start_experiment", "ResourceNotFoundException", "no such template")
        with pytest.raises(CliError, match="no such template"):
            preempting.experiment(ec2, fis, "EXT1", victim(uid="i-0123456789abcdef0"))
        marks.assert_no_pending_responses()


def test_a_failed_experiment_is_explained_and_removes_the_tag(clients: tuple[Any, Any]) -> None:
    """With the mark left on it, the next drill would preempt two machines."""
    ec2, fis = clients
    with Stubber(ec2) as marks, Stubber(fis) as starts:
        marks.add_response("describe_instances", {"Reservations": []})
        marks.add_response("create_tags", {})
        marks.add_response("delete_tags", {})
        starts.add_response("start_experiment", {"experiment": {"id": "EXP1"}})
        starts.add_response("get_experiment", {"experiment": {"state": {"status": "running"}}})
        state = {"status": "failed", "reason": "Target resolution returned empty set"}
        starts.add_response("get_experiment", {"experiment": {"state": state}})
        with pytest.raises(CliError, match="EXP1 failed: Target resolution returned empty set"):
            preempting.experiment(ec2, fis, "EXT1", victim(uid="i-0123456789abcdef0"), wait=lambda _: None)
        marks.assert_no_pending_responses()


def test_the_drill_waits_for_an_experiments_start_and_not_for_its_end(
    clients: tuple[Any, Any],
) -> None:
    """Its action takes the two minutes of the notice, and the job gets over it meanwhile."""
    ec2, fis = clients
    for status, asked in (("running", 11), ("pending", 60)):
        with Stubber(ec2) as marks, Stubber(fis) as starts:
            marks.add_response("describe_instances", {"Reservations": []})
            marks.add_response("create_tags", {})
            marks.add_response("delete_tags", {})
            starts.add_response("start_experiment", {"experiment": {"id": "EXP1"}})
            for _ in range(asked):
                starts.add_response("get_experiment", {"experiment": {"state": {"status": status}}})
            with (
                contextlib.nullcontext() if status == "running" else pytest.raises(CliError, match="not started after")
            ):
                preempting.experiment(ec2, fis, "EXT1", victim(uid="i-0123456789abcdef0"), wait=lambda _: None)
            starts.assert_no_pending_responses()
            marks.assert_no_pending_responses()


def test_another_drills_tagged_machine_is_not_interrupted(clients: tuple[Any, Any]) -> None:
    ec2, fis = clients
    with Stubber(ec2) as marks, Stubber(fis):
        other = {"Reservations": [{"Instances": [{"InstanceId": "i-0fedcba9876543210"}]}]}
        marks.add_response("describe_instances", other)
        with pytest.raises(CliError, match="would also interrupt i-0fedcba9876543210") as refused:
            preempting.experiment(ec2, fis, "EXT1", victim(uid="i-0123456789abcdef0"))
        assert "delete-tags --tags Key=sk-drill --resources i-0fedcba9876543210" in refused.value.remedy


def test_a_missing_fis_template_is_reported_before_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTKEEPER_FIS_TEMPLATE", raising=False)
    target, state = Target("prod", "", Clock()), replace(STACK, cloud="aws")
    with pytest.raises(CliError, match="a notice on AWS needs a template"):
        preempting.check(target, state, announced=True)
    preempting.check(target, state, announced=False)
