"""Who is told what, and what a machine may say: pure views of the record, and the intake of facts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Grant
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.generation import DocState, FactIn, MirrorRun, Progress, Role, Sync
from spotkeeper.contract.job import Checkpoint, JobSpec, MachineGroup, Mirror, Nodes
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import Network
from spotkeeper.contract.record import Budget, Mirrored, Move, Node, Outcome, Phase, Record, Roll, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.controller.bursts import BURST, to_come
from spotkeeper.reconcile.controller.document import Speaker, at_rest, generation, job_run, reply
from spotkeeper.reconcile.controller.intake import MAX_FACTS, WHY, Accepted, accept, ended
from spotkeeper.reconcile.store.documents import CorruptError, Versioned
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.report.job.view import job_view
from tests.reconcile.memory import MemoryStore
from tests.reconcile.world import JOB, stack

STACK = stack(static=1)
SPEC = JobSpec("job", ("train.py", "--lr=1"), nodes=3, source_sha256="s" * 64)
NODE = "sk-t-fix-s0"


def slot(node: int, attempt: int = 1, state: SlotState = SlotState.MEMBER, **more: object) -> Slot:
    base = Slot(
        attempt, state, "pool", "z-a", Model.SPOT, 0.0, None, f"u{node}", f"b{node}", f"10.0.0.{node}", disk=True
    )
    return replace(base, **more)


def record(**more: object) -> Record:
    nodes = (
        Node(top=1, cur=slot(0)),
        Node(top=2, cur=slot(1), next=Slot(2, SlotState.INTENT, "pool", "z-a", Model.SPOT, 0.0)),
        Node(top=4, cur=slot(2, 4, machine=NODE, pool="fix", model=Model.STATIC)),
    )
    base = Record(
        job=JOB,
        uid="uid",
        name="job",
        spec_sha256="",
        created=0.0,
        ver=7,
        gen=66,
        nodes=nodes,
        members=(0, 1, 2),
        port_base=20032,
    )
    return replace(base, **more)


def dynamic(node: int, attempt: int, uid: str | None = None, zone: str = "z-a") -> Speaker:
    return Speaker(uid or f"u{node}", f"sk-t-{JOB}-n{node:04d}-a{attempt}", zone)


def say(*facts: FactIn, boot: str = "b0", ver: int = 0, **more: object) -> Sync:
    return Sync(boot, ver, None, facts, **more)  # type: ignore[arg-type]


# -- the document


def test_the_document_is_a_view_of_the_record() -> None:
    doc = generation(record(), SPEC, STACK)
    assert (doc.ver, doc.gen, doc.state, doc.master) == (7, 66, DocState.RUN, "10.0.0.0")
    assert doc.port == 20032 + 66 % 64
    assert doc.run_id == "uid-66"
    assert [(m.node, m.attempt, m.uid, m.boot, m.nproc, m.disk) for m in doc.members] == [
        (0, 1, "u0", "b0", 1, True),
        (1, 1, "u1", "b1", 1, True),
        (2, 4, "u2", "b2", 1, True),
    ]


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, DocState.RUN),
        ({"stop": True, "stop_deadline": 5.0}, DocState.SAVE_STOP),
        ({"roll": Roll(7, 0.0, "exit")}, DocState.ROLL_CALL),
        ({"phase": Phase.HOLD}, DocState.DONE),
        ({"phase": Phase.END}, DocState.DONE),
    ],
)
def test_states(more: dict[str, object], state: DocState) -> None:
    doc = generation(record(**more), SPEC, STACK)
    assert doc.state is state
    assert doc.deadline == (5.0 if state is DocState.SAVE_STOP else None)


def test_a_lost_members_place_is_empty_and_the_next_leads() -> None:
    nodes = (Node(top=2, cur=slot(0, 2, SlotState.ADMITTED)), *record().nodes[1:])
    doc = generation(record(nodes=nodes, stop=True), SPEC, STACK)
    assert [m.node for m in doc.members] == [1, 2]
    assert doc.master == "10.0.0.1"


def test_mean_life_is_none_before_the_first_loss() -> None:
    assert generation(record(), SPEC, STACK).mean_life_s is None
    lossy = record(budget=Budget(preemptions=2, loss_times=(100.0, 300.0)))
    assert generation(lossy, SPEC, STACK).mean_life_s == 150.0


def test_the_document_of_a_version_is_made_once() -> None:
    made = generation(record(nonce="n"), SPEC, STACK)
    assert generation(record(nonce="n"), SPEC, STACK) is made
    assert generation(record(nonce="other"), SPEC, STACK) is not made
    assert generation(record(nonce="other"), None, STACK).replicated


# -- roles


@pytest.mark.parametrize(
    ("who", "boot", "role", "disk"),
    [
        (dynamic(0, 1), "b0", Role.MEMBER, 0),
        (dynamic(0, 1), "b9", Role.STANDBY, 0),  # it rebooted: a member again with a new generation
        (dynamic(0, 1, uid="other"), "b0", Role.SUPERSEDED, None),
        (dynamic(0, 1, zone="z-b"), "b0", Role.SUPERSEDED, None),
        (dynamic(1, 2, uid="new"), "b0", Role.STANDBY, None),  # next: the disk only ever goes to cur
        (dynamic(2, 3, uid="old"), "b0", Role.SUPERSEDED, None),
        (dynamic(1, 3, uid="x"), "b0", Role.UNKNOWN, None),
        (dynamic(9, 1, uid="x"), "b0", Role.SUPERSEDED, None),
        (Speaker("x", "sk-other-abcd2345-n0000-a1", "z-a"), "b0", Role.UNKNOWN, None),
    ],
)
def test_roles_of_dynamic_machines(who: Speaker, boot: str, role: Role, disk: int | None) -> None:
    answer = reply(record(), SPEC, STACK, who, say(boot=boot))
    assert (answer.role, answer.disk) == (role, disk)


def test_a_static_machines_role_comes_from_its_grant() -> None:
    machine = Speaker("u2", NODE, "z-a")
    grant = Grant(JOB, 2, 4, f"machine:{NODE}")
    assert reply(record(), SPEC, STACK, machine, say(boot="b2"), grant).role is Role.MEMBER
    older = Grant(JOB, 2, 3, f"machine:{NODE}")
    gone = reply(record(), SPEC, STACK, machine, say(boot="b2"), older)
    assert (gone.role, gone.node, gone.attempt) == (Role.SUPERSEDED, 2, 3)
    assert reply(None, None, STACK, machine, say()).role is Role.IDLE
    assert reply(None, None, STACK, dynamic(0, 1), say()).role is Role.UNKNOWN


def test_a_static_machine_mounts_its_own_disk() -> None:
    """Whatever disks its node has had on others."""
    *others, last = record().nodes
    machine, grant = Speaker("u2", NODE, "z-a"), Grant(JOB, 2, 4, f"machine:{NODE}")
    answer = reply(record(nodes=(*others, replace(last, disk=3))), SPEC, STACK, machine, say(boot="b2"), grant)
    assert (answer.role, answer.disk) == (Role.MEMBER, 0)


def test_an_ended_job_supersedes_every_machine() -> None:
    ended = record(phase=Phase.END, nodes=(Node(top=1), Node(top=2), Node(top=4)))
    answer = reply(ended, None, STACK, dynamic(0, 1), say())
    assert (answer.role, answer.over) == (Role.SUPERSEDED, True)
    kept = reply(replace(ended, keep_disks=True), None, STACK, dynamic(0, 1), say())
    assert (kept.role, kept.over) == (Role.SUPERSEDED, False)
    holds = reply(replace(ended, phase=Phase.HOLD), None, STACK, dynamic(0, 1), say())
    assert (holds.role, holds.over) == (Role.SUPERSEDED, False)


def test_a_machine_learns_that_its_disk_is_about_to_be_copied() -> None:
    moving = record(move=Move("z-b", 1.0))
    assert not reply(moving, SPEC, STACK, dynamic(0, 1), say(boot="b0")).moves, "it may still train"
    left = replace(moving, nodes=(Node(top=1), Node(top=2), Node(top=4)))
    assert reply(left, SPEC, STACK, dynamic(0, 1), say()).moves
    assert not reply(replace(left, move=None), SPEC, STACK, dynamic(0, 1), say()).moves


def test_the_document_comes_only_when_it_is_newer_and_the_run_with_it() -> None:
    fresh = reply(record(), SPEC, STACK, dynamic(0, 1), say(ver=6))
    assert fresh.doc is not None and fresh.run is not None
    assert fresh.run.command == ("train.py", "--lr=1")
    known = reply(record(), SPEC, STACK, dynamic(0, 1), say(ver=7))
    assert known.doc is None and known.run is None
    standby = reply(record(), SPEC, STACK, dynamic(1, 2, uid="new"), say(ver=7))
    assert standby.doc is None and standby.run is not None


def test_every_reply_names_the_stacks_bundle() -> None:
    stack = replace(STACK, bundle_sha256="b" * 64)
    for the_record, who in ((None, dynamic(0, 1)), (record(), dynamic(9, 9)), (record(), dynamic(0, 1))):
        assert reply(the_record, SPEC, stack, who, say()).bundle == "b" * 64


# -- intake


def store(the_record: Record | None = None) -> MemoryStore:
    out = MemoryStore(STACK)
    assert out.create_record(the_record or record())
    return out


def kinds(out: MemoryStore) -> list[Kind]:
    return [fact.kind for fact in out.list_facts(JOB)]


def test_node_and_attempt_come_from_name_and_record() -> None:
    out = store()
    took = accept(out, STACK, dynamic(0, 1), say(FactIn(Kind.NOTICE, 66, "900", attempt=77)), 1.0)
    assert took.new
    assert out.list_facts(JOB) == (Fact("u0", "b0", 0, 1, 66, Kind.NOTICE, "900"),)


def test_a_repeated_fact_is_new_only_with_again() -> None:
    """Whoever stored it may have died before its round."""
    out = store()
    for kind in (Kind.EXIT, Kind.NOTICE):
        assert accept(out, STACK, dynamic(0, 1), say(FactIn(kind, 66, "9")), 1.0).new
        assert not accept(out, STACK, dynamic(0, 1), say(FactIn(kind, 66, "9")), 1.0).new
        assert accept(out, STACK, dynamic(0, 1), say(FactIn(kind, 66, "9"), again=True), 1.0).new


def test_an_intended_machine_may_only_report_hello() -> None:
    out = store()
    accept(out, STACK, dynamic(1, 2, uid="new"), say(FactIn(Kind.HELLO), FactIn(Kind.EXIT, 66, "0")), 1.0)
    assert kinds(out) == [Kind.HELLO]


def test_a_superseded_attempt_may_only_report_freed() -> None:
    out = store()
    sync = say(FactIn(Kind.HELLO), FactIn(Kind.RELEASED, 66, "5"), FactIn(Kind.FREED, 0, "0"))
    accept(out, STACK, dynamic(2, 3, uid="old"), sync, 1.0)
    assert kinds(out) == [Kind.FREED]


def test_an_unknown_machines_facts_are_refused() -> None:
    out = store()
    accept(out, STACK, dynamic(0, 1, uid="other"), say(FactIn(Kind.EXIT, 66, "93")), 1.0)
    assert kinds(out) == []


@pytest.mark.parametrize(
    "fact",
    [
        FactIn(Kind.EXIT, 67, "1"),  # of a generation to come
        FactIn(Kind.NOTICE, 66, "soon"),
        FactIn(Kind.EXIT, 66, "1; rm"),
        FactIn(Kind.RELEASED, 66, "../x"),
        FactIn(Kind.HERE, 66, "9" * 30),
        FactIn(Kind.PREFLIGHT_FAILED, 66, "gremlins"),
        FactIn(Kind.HERE, 66, str(record().ver + 1)),  # it would answer a roll call that nobody has called yet
    ],
)
def test_invalid_reports_go_to_quarantine(fact: FactIn) -> None:
    out = store()
    assert not accept(out, STACK, dynamic(0, 1), say(fact), 1.0).new
    assert kinds(out) == []
    assert len(out.quarantined) == 1


def test_too_many_facts_are_cut() -> None:
    out = store()
    facts = tuple(FactIn(Kind.ATTACHED, 66, str(n)) for n in range(500))
    accept(out, STACK, dynamic(0, 1), say(*facts), 1.0)
    assert len(out.list_facts(JOB)) == MAX_FACTS


@pytest.mark.parametrize(
    ("fact", "event", "detail"),
    [
        (FactIn(Kind.FULL, 66), Event.FULL, ""),
        (FactIn(Kind.UNSAVED, 66, "write-failed"), Event.UNSAVED, "its disk refused the write"),
        (FactIn(Kind.UNSAVED, 66, "saver-lost"), Event.UNSAVED, "no saver process answered"),
        (FactIn(Kind.UNSAVED, 66, "no-memory"), Event.UNSAVED, WHY["no-memory"]),
    ],
)
def test_a_failed_save_is_logged_once_per_generation(fact: FactIn, event: Event, detail: str) -> None:
    out = store()
    for now in (5.0, 6.0):
        accept(out, STACK, dynamic(0, 1), say(fact), now)
    (entry,) = out.list_ledger(JOB)
    assert (entry.event, entry.node, entry.gen, entry.at, entry.detail) == (event, 0, 66, 5.0, detail)
    view = job_view(record(), None, [entry], STACK, 7.0)
    assert detail in view.warnings[0] and "training continues, the older checkpoint stays" in view.warnings[0]
    assert [line.text for line in view.events] == list(view.warnings)


def test_a_job_that_saved_nothing_is_warned_about_at_its_end() -> None:
    out = store()
    accept(out, STACK, dynamic(0, 1), say(FactIn(Kind.UNLOOPED, 66, "0")), 5.0)
    (entry,) = out.list_ledger(JOB)
    assert entry.event is Event.UNLOOPED
    over = replace(record(), phase=Phase.DONE, outcome=Outcome.SUCCEEDED)
    end = Entry(at=6.0, id="end", event=Event.END, gen=66)
    (warning,) = job_view(over, None, [entry, end], STACK, 7.0).warnings
    assert "nothing was saved, because the script called attach() without a loop over run.steps()" in warning


def test_saves_that_work_again_end_the_warning() -> None:
    out = store()
    accept(out, STACK, dynamic(0, 1), say(FactIn(Kind.UNSAVED, 66, "write-failed"), FactIn(Kind.SAVED, 66)), 5.0)
    accept(out, STACK, dynamic(0, 1), say(FactIn(Kind.SAVED, 66)), 6.0)
    assert [entry.event for entry in out.list_ledger(JOB)] == [Event.UNSAVED, Event.SAVED]
    assert job_view(record(), None, out.list_ledger(JOB), STACK, 7.0).warnings == ()
    accept(out, STACK, dynamic(0, 1), say(FactIn(Kind.UNSAVED, 66, "write-failed-1")), 8.0)
    (warning,) = job_view(record(), None, out.list_ledger(JOB), STACK, 9.0).warnings
    assert warning.endswith("its disk refused the write")


def test_a_failed_health_check_stays_a_warning() -> None:
    out = store()
    accept(
        out,
        STACK,
        dynamic(0, 1),
        say(FactIn(Kind.UNSAVED, 66, "write-failed"), FactIn(Kind.PREFLIGHT_FAILED, 66, "driver")),
        5.0,
    )
    accept(out, STACK, dynamic(0, 1), say(FactIn(Kind.PREFLIGHT_FAILED, 66, "driver"), FactIn(Kind.SAVED, 66)), 6.0)
    assert [entry.event for entry in out.list_ledger(JOB)] == [Event.UNSAVED, Event.PREFLIGHT_FAILED, Event.SAVED]
    (warning,) = job_view(record(), None, out.list_ledger(JOB), STACK, 7.0).warnings
    assert "agent's log" in warning and warning.endswith("a GPU or its driver does not work")


def test_the_newest_boots_hello_deletes_older_ones() -> None:
    out = store()
    new = dynamic(1, 2, uid="new")
    for boot in ("one", "two"):
        accept(out, STACK, new, say(FactIn(Kind.HELLO), boot=boot), 1.0)
    assert [fact.boot for fact in out.list_facts(JOB)] == ["two"]


def test_progress_is_timed_by_the_first_report_of_a_step() -> None:
    out = store()
    told = Progress(gen=66, step=5, at=1e12)
    accept(out, STACK, dynamic(1, 2, uid="new"), say(progress=told), 10.0)
    assert out.read_progress(JOB) is None
    for now, step in ((10.0, 5), (70.0, 5), (130.0, 6)):
        accept(out, STACK, dynamic(0, 1), say(progress=replace(told, step=step)), now)
        stored = out.read_progress(JOB)
        assert stored is not None
        assert stored.at == (10.0 if step == 5 else 130.0)
    accept(out, STACK, dynamic(0, 1), say(progress=replace(told, gen=65, step=9)), 200.0)
    assert out.read_progress(JOB).step == 6  # type: ignore[union-attr]


def test_measured_bandwidth_is_stored_by_type_and_zone() -> None:
    out = store()
    told = Progress(gen=66, step=5, at=0.0, gbit_s=17.5)
    spot, static = STACK.pools
    out.stack = replace(STACK, pools=(spot, replace(static, machine_type="other")))
    accept(out, STACK, dynamic(0, 1), say(progress=told), 5.0)
    assert out.read_networks() == (), "its machines are of several types"
    out.stack = STACK
    out.put_progress(JOB, replace(told, gbit_s=None))
    for now, gbit_s in ((10.0, 17.5), (20.0, 17.5), (30.0, None)):
        accept(out, STACK, dynamic(0, 1), say(progress=replace(told, gbit_s=gbit_s)), now)
    assert out.read_networks() == (Network(spot.machine_type, "z-a", 17.5, 10.0),), "of two pools, written once"
    stored = out.read_progress(JOB)
    assert stored is not None and stored.gbit_s == 17.5, "a later report does not take it away"
    out.stack = None  # destroyed meanwhile: nobody knows the machines' type
    out.put_progress(JOB, replace(told, gbit_s=None))
    accept(out, STACK, dynamic(0, 1), say(progress=replace(told, gbit_s=9.0)), 40.0)
    assert [network.gbit_s for network in out.read_networks()] == [17.5]


def test_a_gang_that_uploads_output_is_not_silent() -> None:
    """Its nodes that have ended already would make a roll call a crash, and the upload may take an hour."""
    out = store()
    told = Progress(gen=66, step=5, at=0.0)
    accept(out, STACK, dynamic(0, 1), say(progress=told), 10.0)
    for now in (70.0, 130.0):
        accept(out, STACK, dynamic(0, 1), say(progress=replace(told, uploading_s=now)), now)
        stored = out.read_progress(JOB)
        assert stored is not None and (stored.at, stored.uploading_s) == (now, now)


def test_the_start_time_is_measured_at_the_first_step() -> None:
    """From the generation to the first report of a step in it, and kept until the next generation's."""
    out = store()
    record = out.read_record(JOB)
    assert record is not None
    since = record.value.gen_since
    told = Progress(gen=66, step=0, at=0.0, begin_s=1e9)
    measured = []
    for now, step in ((since + 5.0, 0), (since + 45.0, 1), (since + 105.0, 60)):
        accept(out, STACK, dynamic(0, 1), say(progress=replace(told, step=step)), now)
        stored = out.read_progress(JOB)
        assert stored is not None
        measured.append(stored.begin_s)
    assert measured == [None, 45.0, 45.0]
    out.cas_record(replace(record.value, gen=67, gen_since=since + 200.0), record.token)
    for now, step in ((since + 201.0, 60), (since + 230.0, 61)):
        resumed = replace(told, gen=67, step=step, commit_gen=66, commit_step=60)
        accept(out, STACK, dynamic(0, 1), say(progress=resumed), now)
        stored = out.read_progress(JOB)
        assert stored is not None
        measured.append(stored.begin_s)
    assert measured[3:] == [45.0, 30.0]


@pytest.mark.parametrize(
    ("more", "stepped"),
    [
        ({}, True),  # a script without the library
        ({"restore_s": 0.9, "restored_bytes": 37_716}, False),  # from an image that is newer than the last commit
        ({"restored_bytes": 37_716}, False),
        ({"restore_s": 0.9, "first_s": 0.1}, True),
        ({"restore_s": 0.9, "step_s": 0.1}, True),
        ({"restore_s": 0.9, "commit_gen": 66}, True),
    ],
)
def test_a_state_restored_from_memory_is_no_step_of_the_generation(more: dict[str, float], stepped: bool) -> None:
    out = store()
    accept(out, STACK, dynamic(0, 1), say(progress=Progress(66, 632, 0.0, **{"commit_step": 600, **more})), 1e9)  # type: ignore[arg-type]
    assert (Event.FIRST in [entry.event for entry in out.list_ledger(JOB)]) is stepped
    assert (out.read_progress(JOB).begin_s is not None) is stepped  # type: ignore[union-attr]


def test_the_newest_commit_is_remembered_until_the_next_generation_has_one() -> None:
    out = store()
    for step, commit in ((5, 3), (6, None)):
        told = Progress(gen=66, step=step, at=0.0, commit_gen=65 if commit else None, commit_step=commit)
        accept(out, STACK, dynamic(0, 1), say(progress=told), 1.0)
    stored = out.read_progress(JOB)
    assert stored is not None
    assert (stored.step, stored.commit_gen, stored.commit_step) == (6, 65, 3)


def test_an_idle_static_machine_says_hello_without_a_job() -> None:
    out = store()
    machine = Speaker("u2", NODE, "z-a")
    took = accept(out, STACK, machine, say(FactIn(Kind.HELLO), boot="b2"), 5.0)
    assert (took.job, took.new) == (None, True)
    assert [hello.machine for hello in out.list_static_hellos()] == [NODE]
    assert not accept(out, STACK, machine, say(FactIn(Kind.HELLO), boot="b2"), 6.0).new
    assert accept(out, STACK, Speaker("x", "somebody", "z-a"), say(), 6.0).job is None


def test_a_granted_static_machine_reports_for_its_grant_until_dropped() -> None:
    out = store()
    allocation = out.read_allocation()
    grant = Grant(JOB, 2, 3, f"machine:{NODE}")
    out.cas_allocation(replace(allocation.value, grants=(grant,)), allocation.token)
    machine = Speaker("u2", NODE, "z-a")
    took = accept(out, STACK, machine, say(FactIn(Kind.DROPPED, 0, "0", attempt=9), boot="b2"), 5.0)
    assert (took.grant, took.new) == (grant, False), "a word for another attempt releases nothing"
    took = accept(out, STACK, machine, say(FactIn(Kind.DROPPED, 0, "0", attempt=3), boot="b2"), 5.0)
    assert took.new
    assert out.list_facts(JOB) == (Fact("u2", "b2", 2, 3, 0, Kind.DROPPED, "0"),)


def test_a_static_machine_whose_jobs_record_is_missing_keeps_its_grant() -> None:
    out = MemoryStore(STACK)
    grant = Grant(JOB, 2, 3, f"machine:{NODE}")
    out.cas_allocation(replace(out.read_allocation().value, grants=(grant,)), "")
    assert accept(out, STACK, Speaker("u2", NODE, "z-a"), say(boot="b2"), 5.0) == Accepted(JOB, None, grant)


def test_any_sync_of_a_granted_static_machine_counts_as_hello() -> None:
    wanted = Slot(5, SlotState.INTENT, "fix", "z-a", Model.STATIC, 0.0, machine=NODE)
    out = store(record(nodes=(*record().nodes[:2], Node(top=5, cur=wanted))))
    out.cas_allocation(replace(out.read_allocation().value, grants=(Grant(JOB, 2, 5, f"machine:{NODE}"),)), "")
    assert accept(out, STACK, Speaker("u2", NODE, "z-a"), say(boot="b2"), 5.0).new
    assert out.list_facts(JOB) == (Fact("u2", "b2", 2, 5, 0, Kind.HELLO, "0"),)


class Damaged(MemoryStore):
    """Some of its records cannot be read."""

    def read_record(self, job: str) -> Versioned[Record] | None:
        if job == "damaged2":
            raise CorruptError("jobs/damaged2/rec: no record")
        if job == "outage22":
            raise StoreError("HTTP 503")
        return super().read_record(job)


def test_a_static_machine_deletes_only_files_of_provably_ended_jobs() -> None:
    """Whatever else is answered here destroys checkpoints that somebody may still want."""
    out = Damaged(STACK)
    jobs = {
        "done2222": record(phase=Phase.DONE),
        "keeps222": record(phase=Phase.DONE, keep_disks=True),
        "ending22": record(phase=Phase.END),
        "onhold22": record(phase=Phase.HOLD),
        "running2": record(),
    }
    for job, one in jobs.items():
        out.create_record(replace(one, job=job, nonce=job))
    out.put_tomb("deleted2", 1.0)  # by hand, and to delete a record is to keep its disks
    asked = (*jobs, "deleted2", "nobody22", "damaged2", "outage22")
    assert ended(out, STACK, Speaker("u2", NODE, "z-a"), asked) == ("done2222",)
    assert ended(out, STACK, Speaker("u2", "sk-t-fix-s9", "z-a"), asked) == ()
    assert ended(out, STACK, dynamic(0, 1), asked) == (), "its disk goes as a whole"


def test_all_processes_of_a_mix_of_machines_divide_the_work() -> None:
    """Two machines of one process and one of eight."""
    base = STACK.pools[0]
    on = replace(STACK, pools=(replace(base, name="l4"), replace(base, name="a3", nproc=8)))
    mix = replace(SPEC, nodes=1, machines=(MachineGroup("l4", 2), MachineGroup("a3", 1)))
    answer = reply(record(), mix, on, dynamic(0, 1), say(boot="b0"))
    assert answer.run is not None and answer.run.max_world == 10
    plain = reply(record(), SPEC, STACK, dynamic(0, 1), say(boot="b0"))
    assert plain.run is not None and plain.run.max_world is None


def test_only_an_elastic_job_has_a_largest_world() -> None:
    assert job_run(SPEC, 4).max_world is None
    assert job_run(replace(SPEC, nodes=Nodes(2, 2)), 4).max_world is None
    assert job_run(replace(SPEC, nodes=Nodes(1, 3)), 4).max_world == 12


def test_machines_get_the_settings_of_a_jobs_copies_in_seconds_and_bytes() -> None:
    assert job_run(SPEC, 1).mirror is None
    mirror = Mirror(every_min=1.5, mb_s=20.0)
    assert job_run(replace(SPEC, checkpoint=Checkpoint(mirror=mirror)), 1).mirror == MirrorRun(90.0, 20e6)


def test_a_reply_names_the_newest_copy_and_when_it_was_reported() -> None:
    copies = (Mirrored("3-90", 1, 77.0), Mirrored("3-80", 0, 66.0))
    found = reply(record(mirror=copies), SPEC, STACK, dynamic(0, 1), say())
    assert (found.mirrored, found.mirrored_at) == ("3-90", 77.0)
    found = reply(record(), SPEC, STACK, dynamic(0, 1), say())
    assert (found.mirrored, found.mirrored_at) == (None, None)


def test_machines_keep_as_many_checkpoints_as_the_job_file_says() -> None:
    assert job_run(replace(SPEC, checkpoint=Checkpoint(keep=7)), 1).keep == 7


def test_machines_take_snapshots_unless_the_job_file_says_no() -> None:
    assert job_run(SPEC, 1).snapshots
    assert not job_run(replace(SPEC, checkpoint=Checkpoint(snapshots=False)), 1).snapshots


def test_machines_run_the_job_files_image() -> None:
    assert job_run(SPEC, 1).image == ""
    assert job_run(replace(SPEC, image="r@sha256:0"), 1).image == "r@sha256:0"


def test_machines_keep_copies_for_neighbours_only_if_the_job_file_says_so() -> None:
    sharded = Checkpoint(replicated=False, peers_mb_s=80.0)
    assert job_run(replace(SPEC, checkpoint=sharded), 1).peers_mb_s is None
    assert job_run(replace(SPEC, checkpoint=replace(sharded, peers=1)), 1).peers_mb_s == 80.0


def test_a_cached_document_is_not_used_for_another_spec_or_stack() -> None:
    """The answer is kept; it was made from more than the record."""
    job = record(nonce="n")
    assert generation(job, None, STACK).replicated
    sharded = replace(SPEC, checkpoint=replace(SPEC.checkpoint, replicated=False), nproc=2)
    assert not generation(job, sharded, STACK).replicated
    assert [member.nproc for member in generation(job, sharded, STACK).members] == [2, 2, 2]
    pools = tuple(replace(pool, nproc=8) for pool in STACK.pools)
    assert {member.nproc for member in generation(job, SPEC, replace(STACK, pools=pools)).members} == {8}
    assert {member.nproc for member in generation(job, SPEC, STACK).members} == {1}


# -- at rest


def at(index: int, **changes: object) -> dict[str, object]:
    """A gang without anything pending, but for this change of a node."""
    nodes = [replace(node, next=None) for node in record().nodes]
    nodes[index] = replace(nodes[index], **changes)
    return {"nodes": tuple(nodes)}


@pytest.mark.parametrize(
    ("more", "rests"),
    [
        ({}, True),
        ({"phase": Phase.DONE}, True),
        ({"phase": Phase.END}, False),
        ({"phase": Phase.HOLD}, False),
        ({"stop": True}, False),
        ({"roll": Roll(7, 0.0, "exit")}, False),
        ({"move": Move("z-b", 0.0)}, False),
        ({"pause": "limit"}, False),
        (at(1, next=slot(1, 2)), False),
        (at(1, cur=None), False),
        (at(1, cur=slot(1, state=SlotState.ADMITTED)), False),
        (at(1, cur=slot(1, notice=5.0)), False),
        (at(1, cur=slot(1, ends=5.0)), False),
        ({**at(2, cur=None), "size": 2}, True),  # a parked node needs no machine
    ],
)
def test_a_record_rests_only_if_nothing_is_pending(more: dict[str, object], rests: bool) -> None:
    assert at_rest(record(**{**at(0), **more})) is rests


# -- whom a large gang still waits for


@pytest.mark.parametrize(
    ("more", "waits_for"),
    [
        ({}, 3),
        ({"phase": Phase.HOLD}, 0),
        ({"gen": 4}, 0),
        ({"gen": 4, "stop": True}, 3),
        ({"size": BURST - 1}, 0),
    ],
)
def test_a_large_gang_waits_for_its_vacant_nodes_and_intents(more: dict[str, object], waits_for: int) -> None:
    nodes = [Node(cur=slot(index)) for index in range(BURST - 3)]
    nodes += [Node(), Node(cur=slot(BURST - 2, state=SlotState.INTENT)), Node(cur=None)]
    many = replace(record(), gen=0, nodes=tuple(nodes), members=())
    assert to_come(replace(many, **more)) == waits_for
    assert to_come(None) == 0
