"""Other files for a job that holds: one write puts them in force, or nothing changes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.codec import decode
from spotkeeper.contract.job import (
    Checkpoint,
    JobRequest,
    JobSpec,
    MachineGroup,
    Nodes,
    RequestKind,
    Retry,
    spec_sha256,
)
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Limits, Phase, Record
from spotkeeper.reconcile.controller.reconcile_job import run_round
from spotkeeper.reconcile.decide.gang.requests import file_refusal
from spotkeeper.reconcile.service.runtime import FunctionSettings, Runtime
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.store import open_store
from tests.reconcile.world import JOB, CrashError, World, stack

OLD, NEW = "0" * 64, "1" * 64


def failed(**spec: object) -> World:
    """A job of two nodes whose own code gave up; it holds with its disks and a checkpoint."""
    world = World(nodes=2, source_sha256=OLD, retry=Retry(0), **spec)  # type: ignore[arg-type]
    world.submit()
    world.until(world.training, 300)
    world.run(60)
    world.crashing = 1
    world.until(lambda: world.record().phase is Phase.HOLD, 120)
    world.run(60)
    return world


def bring(world: World, spec: JobSpec) -> str:
    """Store a job file and request to go on with it; its hash."""
    digest = spec_sha256(spec)
    world.store.put_spec(JOB, spec, digest)
    world.request(RequestKind.RESUME, spec_sha256=digest)
    return digest


def told(world: World) -> str:
    return world.events(Event.REQUEST)[-1].detail


def test_a_resume_with_other_files_runs_them_from_the_checkpoint() -> None:
    world = failed()
    before, newest = world.record(), world.newest
    corrected = replace(
        world.spec, command=("corrected.py",), source_sha256=NEW, env={"A": "1"}, keep_disks=True, hold_days=3.0
    )
    digest = bring(world, corrected)
    record = world.record()
    assert (record.spec_sha256, record.spec_replaced, record.spec_key()) == (digest, True, digest)
    assert (record.phase, record.keep_disks) == (Phase.RUN, True)
    world.until(world.training, 300)
    assert newest is not None and world.started[-1][1] == newest, "no step is lost"
    for agent in world.agents():
        assert agent.run is not None
        assert (agent.run.command, agent.run.source_sha256, agent.run.env) == (("corrected.py",), NEW, {"A": "1"})
    (entry,) = world.events(Event.RESUME)
    short = before.spec_sha256[:12] or "none"
    assert entry.detail == f"with other files: job file {short} -> {digest[:12]}, source {OLD[:12]} -> {NEW[:12]}"
    assert world.store.read_spec(JOB) == world.spec, "what was submitted stays to be read"


def test_a_resume_may_change_priority_and_team() -> None:
    world = failed()
    bring(world, replace(world.spec, priority="low", team="vision"))
    assert world.record().phase is Phase.RUN
    world.until(world.training, 300)


def test_resumed_files_stay_valid_and_can_be_replaced_again() -> None:
    world = failed()
    corrected = replace(world.spec, command=("corrected.py",))
    bring(world, corrected)
    world.until(world.training, 300)
    world.preempt(1)
    world.until(lambda: world.record().gen == 3 and world.training(), 400)
    assert {agent.run.command for agent in world.agents() if agent.run} == {("corrected.py",)}
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD, 120)
    world.request(RequestKind.RESUME)
    assert world.record().spec_key() == spec_sha256(corrected), "a plain resume keeps them"
    world.until(world.training, 300)
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD, 120)
    digest = bring(world, world.spec)
    assert world.record().spec_key() == digest, "and the first ones may come back"
    assert world.record().phase is Phase.RUN


def refused(world: World, before: Record) -> str:
    """Why the last request was refused; nothing but the request is in the record."""
    after = world.record()
    same = {"ver": 0, "nonce": "", "requests_done": (), "outbox": (), "limits": Limits()}  # what was spent goes on
    assert replace(after, **same) == replace(before, **same)
    return told(world)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nodes": 3}, "nodes: cannot change, since the job has a disk for each present node"),
        ({"machines": (MachineGroup("pool", 1), MachineGroup("other", 1))}, "refused: machines: cannot change"),
        ({"machines": (MachineGroup("pool", 1), MachineGroup("other", 2))}, "refused: machines: cannot change"),
        ({"spread": True}, "spread:"),
        ({"name": "other"}, "name: the job's name is job, the file says other"),
        ({"seed": 7}, "seed:"),
        ({"checkpoint": Checkpoint(replicated=False)}, "checkpoint.replicated:"),
        ({"scratch_gb": 10}, "scratch_gb:"),
        ({"stop": "signal"}, "stop: cannot change, since the job's checkpoints were written in the format"),
    ],
)
def test_changes_that_do_not_fit_the_disks_are_refused_with_the_remedy(change: dict[str, object], why: str) -> None:
    world = failed()
    before = world.record()
    bring(world, replace(world.spec, **change))  # type: ignore[arg-type]
    said = refused(world, before)
    assert said.startswith("refused: ") and why in said and "submit the file under another name" in said
    world.request(RequestKind.RESUME)
    assert world.record().phase is Phase.RUN and not world.record().spec_replaced, "with the files it has, it goes on"


def test_the_kinds_of_pools_cannot_change_but_pools_can() -> None:
    both = stack(static=1)
    one = JobSpec("job", ("x",))
    assert file_refusal(one, replace(one, pools=("pool", "fix")), both) == ""
    assert "static machines, since checkpoints stay" in file_refusal(one, replace(one, pools=("pool",)), both)
    assert "static machines, since checkpoints stay" in file_refusal(one, replace(one, static="never"), both)
    assert file_refusal(one, replace(one, static="never"), None) == ""
    assert file_refusal(one, replace(one, static="never"), stack()) == "", "this stack has none"
    sharded = replace(one, checkpoint=Checkpoint(replicated=False), nproc=2)
    why = "nproc: cannot change, since a sharded checkpoint fits only as many processes as wrote it. "
    assert file_refusal(sharded, replace(sharded, nproc=4), both).startswith(why)
    assert file_refusal(one, replace(one, nproc=4), both) == ""
    assert "spotkeeper resize job NODES" in file_refusal(
        replace(one, nodes=Nodes(1, 2)), replace(one, nodes=Nodes(1, 3)), both
    )
    assert file_refusal(replace(one, nodes=2), replace(one, nodes=Nodes(2, 2)), both) == ""


def test_a_running_job_accepts_no_other_files() -> None:
    world = failed()
    world.request(RequestKind.RESUME)
    world.until(world.training, 300)
    bring(world, replace(world.spec, command=("corrected.py",)))
    assert "only a job on hold accepts other files" in told(world)
    assert world.training() and not world.record().spec_replaced


def test_of_two_resumes_at_once_the_first_counts() -> None:
    world = failed()
    digests = []
    for number in (1, 2):
        spec = replace(world.spec, command=(f"{number}.py",))
        digests.append(spec_sha256(spec))
        world.store.put_spec(JOB, spec, digests[-1])
        world.store.put_request(
            JOB, JobRequest(f"resume-{number}", RequestKind.RESUME, world.t, spec_sha256=digests[-1])
        )
    world.round()
    assert world.record().spec_key() == digests[0]
    assert [entry.detail.partition(":")[0] for entry in world.events(Event.REQUEST)] == ["", "refused"]


@pytest.mark.parametrize("harm", ["missing", "corrupt"])
def test_a_missing_job_file_leaves_the_old_one_valid(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = failed()
    before = world.record()
    if harm == "corrupt":
        read = world.memory.read_spec

        def read_spec(job: str, sha256: str = "") -> JobSpec | None:
            if sha256:
                raise CorruptError("not a JobSpec", paths.spec(job, sha256))
            return read(job)

        monkeypatch.setattr(world.memory, "read_spec", read_spec)
    world.request(RequestKind.RESUME, spec_sha256="f" * 64)
    assert "is missing or invalid" in refused(world, before)
    world.request(RequestKind.CANCEL)
    world.until(lambda: world.record().phase is Phase.DONE, 300)


def test_a_request_after_one_with_a_corrupt_job_file_is_met(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = failed()
    corrected = replace(world.spec, command=("corrected.py",))
    good, corrupt, read = spec_sha256(corrected), "f" * 64, world.memory.read_spec
    world.store.put_spec(JOB, corrected, good)

    def read_spec(job: str, sha256: str = "") -> JobSpec | None:
        if sha256 == corrupt:
            raise CorruptError("not a JobSpec", paths.spec(job, sha256))
        return read(job, sha256)

    monkeypatch.setattr(world.memory, "read_spec", read_spec)
    for later, digest in enumerate((corrupt, good)):
        request = JobRequest(f"resume-{later}", RequestKind.RESUME, world.t + later, spec_sha256=digest)
        world.store.put_request(JOB, request)
    world.round()
    assert world.record().spec_key() == good
    assert [entry.detail.partition(":")[0] for entry in world.events(Event.REQUEST)] == ["refused", ""]
    assert "a resume is refused: not a JobSpec" in caplog.messages


def test_a_half_done_resume_changes_nothing() -> None:
    """Source and job file are there, the request is not: rounds and ticks come and go."""
    world = failed()
    before = world.record()
    corrected = replace(world.spec, command=("corrected.py",))
    world.store.put_spec(JOB, corrected, spec_sha256(corrected))
    world.run(300)
    assert world.record() == before
    world.request(RequestKind.RESUME)
    world.until(world.training, 300)
    assert {agent.run.command for agent in world.agents() if agent.run} == {world.spec.command}


def test_a_round_that_dies_in_a_resume_leaves_one_valid_job_file() -> None:
    """Before the write the old one, after it the new one, and the next round goes on; never the request twice."""
    for stop in range(6):
        world = failed()
        corrected = replace(world.spec, command=("corrected.py",))
        left = [stop]

        def dies(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise CrashError

        world.memory.on_write = dies
        bring(world, corrected)
        world.memory.on_write = lambda: None
        record = world.record()
        assert record.spec_replaced is (record.phase is Phase.RUN)
        world.until(world.training, 400)
        assert {agent.run.command for agent in world.agents() if agent.run} == {("corrected.py",)}
        assert len(world.events(Event.RESUME)) == 1


def test_a_resume_allows_the_rest_of_a_higher_cap_or_the_same_again() -> None:
    def spent_up() -> World:
        world = World(nodes=2, max_usd=0.2, max_on_demand=0)
        world.submit()
        world.until(lambda: world.record().phase is Phase.HOLD, 7200)
        assert world.record().hold is Hold.SPEND
        return world

    world = spent_up()
    spent = world.record().limits.spent
    bring(world, replace(world.spec, max_usd=0.5))
    assert world.record().limits.forgiven == 0.0 and world.record().phase is Phase.RUN
    world.until(lambda: world.record().phase is Phase.HOLD, 7200)
    assert 0.5 <= world.record().limits.spent < 0.6 and "$0.50 is spent" in world.record().reason

    world = spent_up()
    bring(world, replace(world.spec, command=("corrected.py",)))
    assert world.record().limits.forgiven == pytest.approx(spent, rel=0.2)


def test_a_request_with_an_invalid_hash_is_ignored() -> None:
    for bad in ("x", "../../x", "A" * 64, "a" * 64 + "\n"):
        text = JobRequest("resume-1", RequestKind.RESUME, 1.0)
        with pytest.raises(Exception, match="spec_sha256"):
            decode(
                b'{"id":"%s","kind":"resume","at":1,"spec_sha256":"%s"}' % (text.id.encode(), _escaped(bad)), JobRequest
            )


def _escaped(text: str) -> bytes:
    return text.replace("\n", "\\n").encode()


def test_a_process_serves_the_job_file_that_the_record_names(tmp_path: object) -> None:
    store = open_store(f"sqlite://{tmp_path}/b.db")
    old, new = JobSpec("job", ("old.py",)), JobSpec("job", ("new.py",))
    digest = spec_sha256(new)
    store.put_spec(JOB, old)
    store.put_spec(JOB, new, digest)
    runtime = Runtime(FunctionSettings("s", "b"), store)
    record = Record(JOB, "u", "job", spec_sha256(old), 0.0)
    assert runtime.spec(record) == old
    assert runtime.spec(replace(record, spec_sha256=digest, spec_replaced=True)) == new
    assert runtime.spec(record) == old


def test_a_missing_job_file_is_reported() -> None:
    world = failed()
    world.memory.specs.pop(JOB)
    bring(world, world.spec)
    run_round(world.store, world, JOB, world, world.options)
    assert "so the new file cannot be checked against the job's disks" in told(world)
