"""Ends and resumes of runs: failing jobs, cancellations, full disks."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from spotkeeper.cli.jobs.download import download, summary
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.logs import log_data
from spotkeeper.client.pack import pack
from spotkeeper.contract.job import Checkpoint, RequestKind, Retry
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome, SlotState
from spotkeeper.report.job.events import describe
from spotkeeper.report.text import render
from spotkeeper.train.checkpoint.store import COMMIT
from spotkeeper_agent.job.launcher_client import saver_pid
from tests.lifecycle.stage import GPT, STEPS, Run, Stage, script, tiny

pytestmark = pytest.mark.lifecycle

FAILS = """
import sys
print("reading the data")
raise ValueError("the column 'label' is missing")
"""
HAS_A_BUG = """
import time
import train
from torch.optim.optimizer import register_optimizer_step_post_hook

taken = 0


def log(*_):
    global taken
    taken += 1
    time.sleep(0.03)
    if taken == 150:
        print(f"loss {los}")


register_optimizer_step_post_hook(log)
train.main()
"""
GIVES_UP = """
import sys, time
from pathlib import Path
import train
from torch.optim.optimizer import register_optimizer_step_post_hook


def give_up(*_):
    time.sleep(0.03)
    if Path("hopeless").exists():
        print("this model does not fit any machine", flush=True)
        sys.exit(93)


register_optimizer_step_post_hook(give_up)
train.main()
"""

HANGS = """
import ctypes, os, time
import train
from torch.optim.optimizer import register_optimizer_step_post_hook

taken = 0


def deadlocks():
    lock = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(lock)
    ctypes.PyDLL(None).pthread_mutex_lock(lock)


def after_step(*_):
    global taken
    taken += 1
    time.sleep(0.03)
    if taken == 120 and os.environ["SPOTKEEPER_GEN"] == "1" and os.environ["RANK"] == "1":
        deadlocks()


register_optimizer_step_post_hook(after_step)
train.main()
"""


def shown(run: Run) -> str:
    """The output of ``spotkeeper status NAME``."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render.status(run.view()))
    return capture.get()


@pytest.mark.matrix  # exit 93 holds a job in `make test`, and tests/reconcile/decide counts crashes
def test_a_command_that_fails_at_once_uses_up_the_crash_budget_and_shows_why(stage: Stage, tmp_path: Path) -> None:
    spec, source = script(tmp_path, "broken", FAILS, retry=Retry(crashes=1))
    with Run(stage, spec, source) as run:
        record = run.holds(disks=1)
        assert (record.gen, record.budget.crashes) == (2, 2)
        assert record.reason == "node 0 exited with 1; the crash budget of 1 is used up"
        assert run.view().crash_log[-1] == "ValueError: the column 'label' is missing", run.view().crash_log
        told = shown(run)
        for text in (record.reason, "the column 'label' is missing", "spotkeeper resume broken", "1 disk of"):
            assert text in told
        again = stage.submit(spec, source)
        assert (again.job, again.new, again.on_hold) == (run.job, False, record.reason)

        run.request(RequestKind.RESUME)
        run.until("the fresh budget to be used up as well", lambda: run.record().gen == 4)
        assert run.holds(disks=1).budget.crashes == 2
        assert run.cancel().gen == 4
    assert [entry.cause for entry in run.ledger(Event.GENERATION)] == ["start", "crash", "resume", "crash"]


@pytest.mark.matrix
def test_a_corrected_script_continues_from_its_checkpoint(stage: Stage, tmp_path: Path) -> None:
    """The machines of the hold are gone; the static machine of the first generation is the second's as well."""
    home = tmp_path / "corrected"
    home.mkdir()
    (home / "train.py").write_bytes((GPT / "train.py").read_bytes())
    (home / "main.py").write_text(HAS_A_BUG)
    spec = tiny("corrected", STEPS, nodes=2, checkpoint=Checkpoint(interval_s=1.0), retry=Retry(crashes=0))
    spec = replace(spec, command=("main.py", *spec.command[1:]))
    with Run(stage, spec, pack(home)) as run:
        run.holds(disks=1)
        told = shown(run)
        for text in (
            "name 'los' is not defined",
            "a corrected script, or a corrected job file:  spotkeeper resume corrected JOB.YAML",
        ):
            assert text in told
        (home / "main.py").write_text(HAS_A_BUG.replace("{los}", "{taken}"))
        with pytest.raises(CliError, match="nodes: cannot change, since the job has a disk for each present node"):
            run.resume_with_files(replace(spec, nodes=3), pack(home))
        corrected = pack(home)
        run.resume_with_files(replace(spec, env={**spec.env, "CORRECTED": "1"}), corrected)
        record = run.over()
        restored = run.watcher.traces()[2].restored
    assert (record.outcome, record.gen, record.spec_replaced) == (Outcome.SUCCEEDED, 2, True)
    assert restored is not None and 0 < restored.step < 150
    (resumed,) = run.ledger(Event.RESUME)
    assert resumed.detail.startswith("with other files: job file ") and corrected.sha256[:12] in resumed.detail
    assert run.weights() == run.weights_left_alone(2)
    left = summary(stage.store, record)
    assert left is not None and left.files == 2
    got = download(stage.store, record, tmp_path / "got", None, quiet=True)
    assert [(file.node, file.path) for file in got.files] == [(0, "model.pt"), (0, "model.sha256")]
    assert (tmp_path / "got/0/model.sha256").read_text().strip() == run.weights()


def test_a_job_cancelled_while_it_recovers_leaves_nothing(stage: Stage) -> None:
    spec = tiny("regretted", 2000, nodes=2)
    with Run(stage, spec) as run:
        assert stage.submit(spec).job == run.job, "the same content again is the same job"
        with pytest.raises(CliError, match=r"runs already .* with other content: command") as refused:
            stage.submit(tiny("regretted", 2001, nodes=2))
        assert refused.value.code is Exit.REFUSED
        run.steady("before a machine is taken")
        node, slot = run.chaos.spot_members(1)[0]
        run.chaos.preempt(node, slot, announced=False)

        def replacing() -> bool:
            cur = run.record().nodes[node].cur
            return cur is not None and cur.attempt > slot.attempt and cur.state is SlotState.INTENT

        run.until("a replacement to be on its way", replacing)
        run.request(RequestKind.CANCEL)
        record = run.over()
    assert (record.outcome, record.reason) == (Outcome.CANCELLED, "cancelled by tests")
    assert len(run.ledger(Event.GENERATION)) == 1, "it was cancelled before it had recovered"


@pytest.fixture(scope="module")
def lone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A job of one spot machine that ends only when it is cancelled."""
    home = tmp_path_factory.mktemp("lone")
    (home / "train.py").write_bytes((GPT / "train.py").read_bytes())
    (home / "main.py").write_text(GIVES_UP)
    spec = tiny("lone", 100_000, nodes=1, static="never", checkpoint=Checkpoint(interval_s=1.0), retry=Retry(crashes=5))
    spec = replace(spec, command=("main.py", *spec.command[1:]))
    with Run(stage, spec, pack(home)) as run:
        run.steady("at first")
        yield run
        if not run.record().over:
            run.cancel()


def root_of(run: Run) -> Path:
    """The file system of the job's only machine."""
    (slot,) = (node.cur for node in run.record().nodes)
    return Path(next(vm.root for vm in run.stage.cloud.status().vms if slot is not None and vm.id == slot.uid))


def test_a_full_disk_is_reported_and_stops_no_training(lone: Run) -> None:
    """The disk of a machine here is a folder: a limit on the size of files stands for its end (EFBIG, as ENOSPC)."""
    run, root = lone, root_of(lone)
    folder = root / "mnt" / "sk-data" / run.job / "ckpt"
    run.until("a checkpoint", lambda: commits(folder))
    saver = saver_pid(root / "run" / "spotkeeper" / "node")
    assert saver is not None
    _, hard = resource.prlimit(saver, resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    run.until("the user to be told", lambda: run.ledger(Event.FULL))
    before, step = commits(folder), run.watcher.step()
    assert before, "the older checkpoint stays"
    run.until("training to go on", lambda: run.watcher.step() > step + 60)
    assert commits(folder) == before and run.record().gen == 1
    told = "node 0: its disk has no space for a checkpoint; training continues, the older checkpoint stays"
    assert told in run.view().warnings and told in shown(run)
    assert [line.text for line in run.view().events if line.event is Event.FULL] == [told]

    resource.prlimit(saver, resource.RLIMIT_FSIZE, (hard, hard))
    run.until("a checkpoint, now that there is room", lambda: commits(folder) - before)
    run.until("the warning to be taken back", lambda: not run.view().warnings)
    assert not run.view().over() and told not in shown(run) and run.ledger(Event.SAVED)
    assert run.record().gen == 1 and run.record().budget.crashes == 0


def test_exit_93_holds_the_job_and_resume_continues_from_the_newest_checkpoint(lone: Run) -> None:
    run, root = lone, root_of(lone)
    folder = root / "mnt" / "sk-data" / run.job / "ckpt"
    run.until("a checkpoint", lambda: commits(folder))
    (main,) = root.rglob("main.py")
    (main.parent / "hopeless").touch()
    record = run.holds(disks=1)
    assert record.gen == 1 and not run.ledger(Event.CRASH)
    assert record.reason == "node 0 exited with 93: a restart cannot help"
    run.until("the script's last words in the status", lambda: "this model does not fit any machine" in shown(run))
    last = run.watcher.traces()[1].last_step
    run.request(RequestKind.RESUME)
    run.steady("after the resume")
    assert run.record().gen == 2
    restored = run.watcher.traces()[2].restored
    assert restored is not None and 0 < restored.step <= last
    run.cancel()


def commits(folder: Path) -> set[str]:
    """Complete checkpoints in this folder."""
    return {path.parent.name for path in folder.glob(f"*/{COMMIT}") if path.parent.name.replace("-", "").isdigit()}


@pytest.mark.matrix
def test_a_rank_that_hangs_in_c_is_detected_and_restarted(stage: Stage, tmp_path: Path) -> None:
    """With the interpreter's lock in its hands; the other one only waits for it."""
    home = tmp_path / "hangs"
    home.mkdir()
    (home / "train.py").write_bytes((GPT / "train.py").read_bytes())
    (home / "main.py").write_text(HANGS)
    fields = {"checkpoint": Checkpoint(interval_s=1.0), "retry": Retry(crashes=1), "static": "never"}
    spec = tiny("hangs", STEPS, nodes=2, **fields)
    spec = replace(spec, command=("main.py", *spec.command[1:]))
    with Run(stage, spec, pack(home)) as run:
        run.until("the hang to be found", lambda: run.ledger(Event.CRASH), 240)
        (crash,) = run.ledger(Event.CRASH)
        assert (crash.node, crash.cause, crash.gen) == (1, "hang", 1)
        told = describe(crash)
        assert told.startswith("node 1 hangs: no step after ") and ", and the others wait for it. " in told
        assert told.endswith("Stack traces: spotkeeper logs hangs --generation 1 --node 1")
        run.until("what hung to be shown", lambda: any("main.py:12 in deadlocks" in line for line in run.view().failed))
        record = run.over()
        restored = run.watcher.traces()[2].restored
        for node, frame in ((0, "train.py"), (1, 'main.py", line 12 in deadlocks')):
            text = log_data(stage.store, record, node, 1)[1].decode()
            assert "stack traces, each thread's innermost call first" in text, node
            assert frame in text, node
    assert (record.outcome, record.gen, record.budget.crashes) == (Outcome.SUCCEEDED, 2, 1)
    assert restored is not None and 0 < restored.step < 120
    assert run.weights() == run.weights_left_alone(2)
