"""A whole Spotkeeper on this machine, for tests: cloud, stack, jobs, and waits that fail with logs.

``Stage`` is the cloud with the stack ``local`` in it; ``Run`` is one submitted job. What takes
machines away, measures training and proves weights is the demo's own (``spotkeeper.local.demo``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from spotkeeper.cli.jobs.verbs import resume_with
from spotkeeper.client.logs import log_data
from spotkeeper.client.lookup import new_request, send_request, view_of
from spotkeeper.client.pack import Source, pack
from spotkeeper.client.submit import Submitted, submit
from spotkeeper.client.target import STACK, STACK_FILE, local_target, notify
from spotkeeper.contract.job import JobSpec, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.local import deploy
from spotkeeper.local.demo import proof
from spotkeeper.local.demo.chaos import Chaos, ChaosError, ticks
from spotkeeper.local.demo.proof import Watcher
from spotkeeper.local.deploy.config import zones_for
from spotkeeper.local.lifecycle.cloud import LeftOver, LocalCloud
from spotkeeper.local.lifecycle.folder import LocalCloudError
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.events import describe
from spotkeeper.report.job.view import JobView
from tests.no_dynamo import NO_DYNAMO
from tests.train.forks import run_script

T = TypeVar("T")

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt"
SCALE = 20.0  # as the demo's: boots, which are real work, fit their deadlines
ROOM = 8  # machines each zone carries, whatever the recorded market says
STEP_S = 0.03  # real, added to each step
STEPS = 350  # of a story of two machines: one length for several, so that one quiet run serves all of them
SLOW = f"""
import time
import train
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: time.sleep({STEP_S}))
train.main()
"""
PATIENCE_S = 90.0  # real, for one step of a story
TAIL = 25  # lines of each log in a failure


def tiny(name: str, steps: int, step_s: float = 0.0, **fields: object) -> JobSpec:
    """The example's smallest GPT, slowed down, because faults take real time: a step takes ``step_s`` at least."""
    command = (
        "slow.py",
        "--dim",
        "32",
        "--layers",
        "1",
        "--steps",
        str(steps),
        "--nice",
        "10",
        "--step-s",
        f"{step_s}",
    )
    spec = read_job(GPT / "job.yaml", None, 0.0)
    return replace(spec, name=name, command=command, env=spec.env | NO_DYNAMO, **fields)


def slow_gpt(folder: Path) -> Source:
    """The example, with ``slow.py`` beside it."""
    home = folder / "gpt"
    home.mkdir(exist_ok=True)
    (home / "train.py").write_bytes((GPT / "train.py").read_bytes())
    (home / "slow.py").write_text(SLOW)
    return pack(home)


def script(
    folder: Path, name: str, text: str, env: dict[str, str] = NO_DYNAMO, **fields: object
) -> tuple[JobSpec, Source]:
    """A job that runs ``text`` on one spot machine."""
    home = folder / name
    home.mkdir()
    (home / "main.py").write_text(text)
    spec = JobSpec(name=name, command=("main.py",), source=".", static="never", env=NO_DYNAMO | env, **fields)  # type: ignore[arg-type]
    return spec, pack(home)


@dataclass
class Stage:
    """``quiet``: without jobs: static machines, their disks, the function. ``alone``: what runs came to
    that nobody disturbed, in a folder of all this session's test processes."""

    cloud: LocalCloud
    alone: Path
    quiet: LeftOver = field(default_factory=lambda: LeftOver(0, 0, 0))
    stack_file: Path = STACK_FILE

    @classmethod
    def set_up(cls, folder: Path, alone: Path | None = None, stack_file: Path = STACK_FILE) -> Stage:
        """Start cloud and stack, and wait for the idle static machine; a failure stops all."""
        cloud = LocalCloud.up(folder / "cloud", scale=SCALE, seed=1, per_zone=ROOM, zones=zones_for(stack_file))
        stage = cls(cloud, alone or folder / "alone", stack_file=stack_file)
        try:
            stage.fill()
            deploy.up(STACK, stack_file, cloud, cloud.folder / "deploy", engine="in-process")
            stage.until("the static machine to be idle", lambda: bool(stage.store.list_static_hellos()))
            stage.quiet = cloud.left_over()
        except BaseException:
            cloud.down(purge=True)
            raise
        return stage

    @classmethod
    @contextlib.contextmanager
    def of_its_own(cls, folder: Path, alone: Path | None, stack_file: Path) -> Iterator[Stage]:
        """A stage for one test, with a stack file of its own."""
        stage = cls.set_up(folder, alone, stack_file)
        try:
            yield stage
        finally:
            stage.tear_down()

    def tear_down(self) -> None:
        """Destroy the stack; end remaining processes by force. Nothing may be left."""
        try:
            deploy.destroy(STACK, self.stack_file, self.cloud, self.cloud.folder / "deploy", engine="in-process")
        finally:
            left = self.cloud.down(purge=True)
        assert not left, f"left over after destroy: {left}"

    def fill(self, *zones: str) -> None:
        """Give these zones, or all, their whole capacity."""
        for zone in zones or self.cloud.config.zones:
            self.cloud.set_capacity(zone, None, model="on-demand")
            self.cloud.set_capacity(zone, ROOM)

    @cached_property
    def store(self) -> Store:
        return local_target(self.cloud.folder).store()

    def submit(self, spec: JobSpec, source: Source | None = None) -> Submitted:
        done = submit(self.store, spec, source or slow_gpt(self.cloud.folder), self.cloud.clock.now())
        if spec.trial is not None:
            self.store.create_trial(spec.trial.sweep, spec.trial.number, done.job)
        self.notify(done.job)
        return done

    def notify(self, job: str) -> None:
        notify(local_target(self.cloud.folder), self.store, job)

    def until(self, what: str, look: Callable[[], T | None], seconds: float = PATIENCE_S) -> T:
        """
        Raises:
            AssertionError: not within so many real seconds; with the ends of all logs.
        """
        for _ in ticks(seconds):
            if found := look():
                return found
        raise AssertionError(f"waited {seconds:.0f} s for {what}\n{self.last_words()}")

    def last_words(self) -> str:
        """The ends of the logs of machines, function and control plane."""
        logs = [*sorted((self.cloud.folder / "serial").glob("*.log")), self.cloud.folder / "server.log"]
        logs += sorted((self.cloud.folder / "functions").rglob("*.log"))
        return "\n".join(f"--- {path.name}\n{_tail(path)}" for path in logs)

    def is_quiet(self) -> bool:
        """Whether no job has left a machine, disk, snapshot or process."""
        return self.left_over() == self.quiet

    def left_over(self) -> LeftOver | None:
        """Counts of resources; None while the control plane does not answer."""
        try:
            return self.cloud.left_over()
        except LocalCloudError:
            return None


class Run:
    """One job on a stage; a context manager, because a watcher follows its training."""

    def __init__(self, stage: Stage, spec: JobSpec, source: Source | None = None) -> None:
        self.stage, self.spec = stage, spec
        self.job = stage.submit(spec, source).job
        self.watcher = Watcher(stage.cloud.folder / "vms", self.job)
        self.chaos = Chaos(STACK, self.job, stage.cloud, self.watcher, self._read, lambda _: None, random.Random(1))  # noqa: S311

    def __enter__(self) -> Run:
        self.watcher.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.watcher.__exit__(*exc)
        print(self.story())  # shown if the test fails

    def _read(self) -> Record | None:
        held = self.stage.store.read_record(self.job)
        return held.value if held else None

    def record(self) -> Record:
        record = self._read()
        assert record is not None, f"{self.spec.name} has no record"
        return record

    def view(self) -> JobView:
        """The view of ``spotkeeper status``."""
        store = self.stage.store
        return view_of(store, self.record(), store.read_stack(), self.stage.cloud.clock.now())

    def ledger(self, *events: Event) -> list[Entry]:
        """The entries of these kinds, each id once."""
        entries = (*self.stage.store.list_ledger(self.job), *self.record().outbox)
        once = {entry.id: entry for entry in reversed(entries)}
        return sorted((e for e in once.values() if e.event in events or not events), key=lambda e: e.at)

    def until(self, what: str, look: Callable[[], T | None], seconds: float = PATIENCE_S) -> T:
        """Like the stage's; the job's end ends the wait too."""
        try:
            return self.stage.until(what, look, seconds)
        except ChaosError as error:
            raise AssertionError(f"{error}\n{self.stage.last_words()}") from None

    def story(self) -> str:
        start = self.record().created
        lines = [f"{entry.at - start:8.1f} g{entry.gen} {describe(entry)}" for entry in self.ledger()]
        return "\n".join(["", f"--- ledger of {self.spec.name}", *lines, *self._crash_logs()])

    def _crash_logs(self) -> Iterator[str]:
        """The nodes' logs of generations that crashed."""
        for entry in self.ledger(Event.CRASH):
            for node in range(len(self.record().nodes)):
                log = self.stage.store.get(paths.log(self.job, node, entry.gen)) or b""
                tail = log.decode("utf-8", "replace").splitlines()[-TAIL:]
                yield "\n".join([f"--- node {node} in generation {entry.gen}", *tail])

    def steady(self, when: str) -> None:
        """Wait until every node has trained for a while."""
        self.until(f"steady training {when}", self.chaos.is_steady)

    def resume_with_files(self, spec: JobSpec, source: Source) -> None:
        """Resume with other files, as ``spotkeeper resume NAME JOB.YAML``."""
        store, now = self.stage.store, self.stage.cloud.clock.now()
        resume_with(store, self.record(), spec, source, store.read_stack(), now, "tests")
        self.stage.notify(self.job)
        self.until("the resume to be taken in", lambda: self.record().hold is None)  # another round may be under way

    def request(self, kind: RequestKind, **more: str) -> None:
        send_request(self.stage.store, self.record(), new_request(kind, self.stage.cloud.clock.now(), "tests", **more))
        self.stage.notify(self.job)

    def holds(self, disks: int) -> Record:
        """Wait until the job holds after a failure with only this many disks left; the record."""
        self.until("the job to hold", lambda: self.record().hold is Hold.FAILURE)
        only = replace(self.stage.quiet, disks=self.stage.quiet.disks + disks)
        self.until(f"only its disks to be left: {only}", lambda: self.stage.left_over() == only)
        return self.record()

    def cancel(self) -> Record:
        """Wait until the cancelled job's resources are gone; the record."""
        self.request(RequestKind.CANCEL)
        self.until("the job to be cancelled", lambda: self.record().outcome is Outcome.CANCELLED)
        return self.over()

    def over(self, seconds: float = PATIENCE_S) -> Record:
        """Wait until the job has an outcome and its resources are gone; the record."""

        def ended() -> bool:
            record = self.record()
            assert record.hold is not Hold.FAILURE, f"it failed and holds: {record.reason}"
            return record.over

        self.until("the job to be over", ended, seconds)
        self.until("all that the job had to be gone", lambda: self.record().phase is Phase.DONE)
        self.until(f"the cloud to be as before: {self.stage.quiet}", self.stage.is_quiet)
        self.until("it to be buried, its marker last", lambda: self.job not in self.stage.store.active_jobs())
        return self.record()

    def weights(self) -> str | None:
        """The hash that node 0 printed at its end."""
        return proof.weights_in(log_data(self.stage.store, self.record(), 0)[1].decode(errors="replace"))

    def weights_left_alone(self, nproc: int) -> str:
        """The same run without a cloud, at full speed; cached between tests."""
        options = self.spec.command[1:]
        if "--step-s" in options:
            at = options.index("--step-s")
            options = (*options[:at], *options[at + 2 :])
        command, env = (str(GPT / "train.py"), *options), dict(self.spec.env)
        run = hashlib.sha256(repr((command, nproc, sorted(env.items()))).encode()).hexdigest()[:16]
        folder = self.stage.alone / run
        folder.mkdir(parents=True, exist_ok=True)
        told = folder / "weights"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not told.exists():
                ended = run_script(folder, *command, nproc=nproc, **env | {"OMP_NUM_THREADS": "1"})
                weights = proof.weights_in(ended.stdout)
                assert weights is not None, ended
                told.write_text(weights)
        return told.read_text()


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL:])
