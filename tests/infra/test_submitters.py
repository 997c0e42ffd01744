"""What submitters do, run against a bucket that refuses all that their declared rights do not allow, on both clouds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from infra.aws.rights import Statement, document, machine_rights, submitter_rights
from infra.gcp.storage import BucketAccess, machine_access, submitter_access
from infra.settings.model import Settings
from infra.settings.read import from_config
from spotkeeper.cli.jobs import verbs
from spotkeeper.client import lookup
from spotkeeper.client.pack import pack
from spotkeeper.client.submit import submit
from spotkeeper.client.sweep import begin, extend, source_of, submit_missing
from spotkeeper.contract.cloud import Listing
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.job import JobSpec, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.sweep import SweepState
from spotkeeper.contract.sweepfile import Cohort, Dimension, SweepFile, SweepSpec, SweepStop
from spotkeeper.integrations.journal import SEGMENT, Journal
from spotkeeper.local.access.iam import holds
from spotkeeper.reconcile.controller import tick as sweep
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import BucketRefusedError, Deadline
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects
from spotkeeper.reconcile.store.store import Store
from tests.contract.samples import STACK
from tests.infra.aws.judge import Ask, allowed
from tests.infra.test_access import AWS, config

Rights = Callable[[str, str], bool]  # "create", "overwrite" or "delete", and the object's name
T0 = 1_000_000.0
GCP_VERBS = {
    "roles/storage.objectViewer": (),
    "roles/storage.objectCreator": ("create",),
    "roles/storage.objectUser": ("create", "overwrite", "delete"),
}


def gcp_rights(access: Callable[[str], tuple[BucketAccess, ...]] = submitter_access) -> Rights:
    held = access("b")

    def may(verb: str, key: str) -> bool:
        name = f"projects/_/buckets/b/objects/{key}"
        return any(
            verb in GCP_VERBS[each.role] and holds(each.condition or "", name) for each in held if each.condition
        )

    return may


def aws_rights(granted: Callable[[Settings], tuple[Statement, ...]] = submitter_rights) -> Rights:
    settings = from_config(config(AWS, []), "demo")
    policy, bucket = document(granted(settings)), f"arn:aws:s3:::{settings.bucket_name()}"

    def may(verb: str, key: str) -> bool:
        context = {"s3:if-none-match": "*"} if verb == "create" else {}
        return allowed(
            policy, Ask("s3:DeleteObject" if verb == "delete" else "s3:PutObject", f"{bucket}/{key}", context)
        )

    return may


class Guarded(SqliteObjects):
    """As strict as either cloud may be: to replace an object takes the right to, whatever the request's condition."""

    def __init__(self, path: Path, may: Rights, replaces: bool) -> None:
        super().__init__(path)
        self._may, self._replaces = may, replaces

    def until(self, deadline: Deadline) -> Guarded:
        return self

    def _check(self, verb: str, key: str) -> None:
        if not self._may(verb, key):
            raise BucketRefusedError(f"{verb} {key}")

    def create(self, key: str, data: bytes) -> str:
        self._check("overwrite" if self._replaces and self.get(key) is not None else "create", key)
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> str:
        self._check("overwrite" if not self._replaces or self.get(key) is not None else "create", key)
        return super().put(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str:
        self._check("overwrite", key)
        return super().replace(key, data, tag)

    def delete(self, key: str) -> None:
        self._check("delete", key)
        super().delete(key)


@pytest.fixture(params=["gcp", "aws"])
def rights(request: pytest.FixtureRequest) -> Rights:
    return gcp_rights() if request.param == "gcp" else aws_rights()


@pytest.fixture
def theirs(tmp_path: Path, rights: Rights, request: pytest.FixtureRequest) -> Store:
    """The bucket as a submitter has it. Google asks for the right to delete where an object is replaced."""
    gcp = "gcp" in request.node.callspec.id
    return Store(Guarded(tmp_path / "b.sqlite", rights, replaces=gcp))


@pytest.fixture
def ours(tmp_path: Path) -> Store:
    """The bucket as the function has it."""
    store = Store(SqliteObjects(tmp_path / "b.sqlite"))
    store.put(paths.STACK, msgspec.json.encode(STACK))
    return store


def spec(**more: object) -> JobSpec:
    return JobSpec(name="vit", command=("train.py",), **more)  # type: ignore[arg-type]


def end(store: Store, job: str, phase: Phase = Phase.END) -> None:
    held = store.read_record(job)
    assert held is not None
    over = msgspec.structs.replace(held.value, phase=phase, outcome=Outcome.SUCCEEDED, ver=1, nonce="n")
    assert store.cas_record(over, held.token)


class Time:
    scale = 1.0

    def now(self) -> float:
        return T0


class NoCloud:
    def list(self, name: str) -> Listing:
        return Listing((), (), (), frozenset(STACK.zones()))

    def price_history(self, pool: str, deadline_s: float) -> None:
        return None


def tick(store: Store) -> None:
    sweep.tick(store, NoCloud(), Time(), RoundOptions(settle_s=0.0))  # type: ignore[arg-type]


def test_submitters_may_submit_resubmit_and_reuse_a_name(theirs: Store, ours: Store, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    source = pack(tmp_path / "code")
    first = submit(theirs, spec(), source, T0, "lee")
    assert first.new and not submit(theirs, spec(), source, T0, "lee").new
    held = ours.read_record(first.job)
    assert held is not None and [entry.by for entry in held.value.outbox] == ["lee"]
    end(ours, first.job)
    again = submit(theirs, spec(), source, T0, "lee")
    assert again.new and again.job != first.job


def test_submitters_may_finish_or_withdraw_a_submission(theirs: Store, ours: Store) -> None:
    theirs.set_active("cutoff00", T0)
    theirs.put_spec("cutoff00", spec())
    assert theirs.put_name("vit", "cutoff00")
    assert submit(theirs, spec(), None, T0).job == "cutoff00", "all of it was there already, but for its record"
    theirs.set_active("givenup0", T0)
    theirs.put_spec("givenup0", msgspec.structs.replace(spec(), name="other"))
    theirs.put_name("other", "givenup0")
    assert lookup.withdraw(theirs, "other", T0) == "givenup0"
    tick(ours)
    assert ours.read_name("other") is None and ours.read_spec("givenup0") is None
    assert "givenup0" not in ours.active_jobs()


def test_a_second_submitter_of_a_name_leaves_nothing_behind(theirs: Store, ours: Store) -> None:
    taken = ours.put_name

    def late(name: str, job: str) -> bool:
        taken(name, "quicker0")
        return False

    theirs.put_name = late  # type: ignore[method-assign]
    with pytest.raises(Exception, match="another submission of this name came first"):
        submit(theirs, spec(), None, T0)
    (job,) = ours.active_jobs()
    tick(ours)
    assert ours.active_jobs() == () and ours.read_spec(job) is None and ours.read_name("vit") == "quicker0"


def test_submitters_may_send_every_request_and_new_files(theirs: Store, ours: Store) -> None:
    job = submit(theirs, spec(), None, T0).job
    held = ours.read_record(job)
    assert held is not None
    for kind in (RequestKind.PAUSE, RequestKind.MOVE, RequestKind.SWAP, RequestKind.RESIZE, RequestKind.CANCEL):
        lookup.send_request(theirs, held.value, lookup.new_request(kind, T0, "lee"))
    holding = msgspec.structs.replace(held.value, phase=Phase.HOLD, hold=Hold.PAUSE, ver=1, nonce="n")
    assert ours.cas_record(holding, held.token)
    changed = spec(max_usd=10.0)
    for _ in range(2):  # the same file twice is the same object
        verbs.resume_with(theirs, holding, changed, None, None, T0, "lee")
    assert sorted(request.kind.value for request in ours.list_requests(job)) == [
        "cancel", "move", "pause", "resize", "resume", "resume", "swap",
    ]  # fmt: skip


def test_submitters_may_write_a_study_and_change_nothing_of_it(theirs: Store, ours: Store, rights: Rights) -> None:
    writers = [Journal(theirs, "lr-search"), Journal(theirs, "lr-search")]
    for number in range(SEGMENT):
        writers[number % 2].append([{"n": number}])
    assert [log["n"] for log in Journal(ours, "lr-search").read(0)] == list(range(SEGMENT))
    assert theirs.get(paths.segment("lr-search", 0)) is not None
    for key in (paths.batch("lr-search", 0), paths.segment("lr-search", 0)):
        assert not rights("overwrite", key) and not rights("delete", key)
    for machine_may in (gcp_rights(machine_access), aws_rights(machine_rights)):
        key = paths.batch("lr-search", SEGMENT)
        assert not any(machine_may(verb, key) for verb in ("create", "overwrite", "delete"))


def test_submitters_cannot_change_the_functions_documents(theirs: Store, ours: Store, rights: Rights) -> None:
    job = submit(theirs, spec(), None, T0).job
    held = theirs.read_record(job)
    assert held is not None
    fact = Fact("u1", "b1", 0, 1, 0, Kind.HELLO, "0")
    sha = "a" * 64
    refused: tuple[Callable[[], object], ...] = (
        lambda: theirs.cas_record(msgspec.structs.replace(held.value, ver=9, nonce="n"), held.token),
        lambda: theirs.put_fact(job, fact),
        lambda: theirs.append_ledger(job, Entry(at=T0, id="gone.r0.a1", event=Event.GONE)),
        lambda: theirs.put_tomb(job, T0),
        lambda: theirs.take_lease(job, "n", T0, 60.0),
        lambda: theirs.clear_active(job),
        lambda: theirs.put(paths.STACK, b"{}"),
        lambda: theirs.put(paths.bundle(sha), b"{}"),
    )
    for attempt in refused:
        with pytest.raises(BucketRefusedError):
            attempt()
    documents = (paths.record(job), paths.lease(job), paths.progress(job), f"{paths.facts(job)}x", paths.STACK)
    logs = (paths.log(job, 0, 1), f"{paths.outputs(job)}0.json", f"{paths.copies(job)}1-2/x", paths.ALLOCATION)
    folders = (paths.ledger(job), paths.facts(job), paths.copies(job), paths.outputs(job), f"jobs/{job}/logs/")
    hidden = [f"{folder}{name}" for folder in folders for name in ("spec", "rec", "requests/x", "source/x")]
    for key in (*documents, *logs, *hidden, paths.market_past("burst"), paths.tomb(job)):
        assert not rights("overwrite", key) and not rights("delete", key), key
        assert not rights("create", key) or key == paths.record(job), key
    assert json.loads(ours.get(paths.active(job)) or b"0") == T0


def test_an_unreadable_document_is_skipped_without_quarantine_rights(theirs: Store, ours: Store) -> None:
    job = submit(theirs, spec(), None, T0).job
    ours.put(f"{paths.ledger(job)}0000000000000001.bad", b"{")
    assert theirs.list_ledger(job) == ()
    assert ours.list(paths.QUARANTINE) == ()


def test_submitters_may_start_and_extend_a_search_but_not_report_for_it(
    theirs: Store, ours: Store, rights: Rights, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    file = SweepFile("lr", "", {"lr": Dimension(uniform=(0.0, 1.0))}, "loss", "min", trials=2)
    job = JobSpec(name="x", command=("train.py",))
    source = pack(tmp_path / "code")
    for nonce in ("a", "b"):  # the second submission finds the first
        found = begin(theirs, SweepSpec(file, job, 1, nonce, T0), source, Cohort(0, ({"lr": 0.1}, {"lr": 0.2}), 0))
        new = list(submit_missing(theirs, found, source, T0, "lee", lambda _: None))
        assert len(new) == (2 if nonce == "a" else 0)
    longer = extend(theirs, found, Cohort(2, ({"lr": 0.3},), 0))
    assert [number for number, _ in submit_missing(theirs, longer, source_of(theirs, longer), T0, "lee", id)] == [2]
    assert len(ours.active_jobs()) == 3
    state = SweepState("lr", 1, "n")
    with pytest.raises(BucketRefusedError):
        theirs.cas_sweep(state, "")
    assert ours.cas_sweep(state, "")
    sha = "a" * 64
    assert theirs.create_stop("lr", SweepStop(2, T0, "lee")) and theirs.list_stops("lr") == ours.list_stops("lr")
    made = (paths.sweep_spec("lr"), paths.sweep_cohort("lr", 0), paths.sweep_trial("lr", 0), paths.sweep_stop("lr", 2))
    for key in made:
        assert rights("create", key) and not rights("overwrite", key) and not rights("delete", key), key
    assert rights("create", paths.sweep_source("lr", sha)) and not rights("delete", paths.sweep_source("lr", sha))
    for verb in ("create", "overwrite", "delete"):
        assert not rights(verb, paths.sweep_state("lr"))
