"""A rank hangs in C with the interpreter's lock in its hands: found, its stacks shown, restarted, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from spotkeeper.cli.jobs import log_data
from spotkeeper.cli.pack import pack
from spotkeeper.report.events import describe
from spotkeeper.spec.job import Checkpoint, Hang, Retry
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Outcome

from tests.lifecycle.stage import GPT, Run, Stage, tiny

pytestmark = pytest.mark.lifecycle

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


def test_a_rank_that_hangs_in_c_is_found_shown_and_restarted(stage: Stage, tmp_path: Path) -> None:
    home = tmp_path / "hangs"
    home.mkdir()
    (home / "train.py").write_bytes((GPT / "train.py").read_bytes())
    (home / "main.py").write_text(HANGS)
    fields = {"checkpoint": Checkpoint(interval_s=1.0), "retry": Retry(crashes=1), "static": "never"}
    spec = tiny("hangs", 250, nodes=2, hang=Hang(floor_min=5.0), **fields)
    spec = replace(spec, command=("main.py", *spec.command[1:]))
    with Run(stage, spec, pack(home)) as run:
        run.until("the hang to be found", lambda: run.ledger(Event.CRASH))
        (crash,) = run.ledger(Event.CRASH)
        assert (crash.rank, crash.cause, crash.gen) == (1, "hang", 1)
        told = describe(crash)
        assert told.startswith("rank 1 hangs: no step after ") and ", and the others wait for it. " in told
        assert told.endswith("Stacks: spotkeeper logs hangs --gen 1 --rank 1")
        run.until("what hung to be shown", lambda: any("main.py:12 in deadlocks" in line for line in run.view().failed))
        record = run.over()
        restored = run.watcher.traces()[2].restored
        for rank, frame in ((0, "train.py"), (1, 'main.py", line 12 in deadlocks')):
            text = log_data(stage.store, record, rank, 1)[1].decode()
            assert "stacks, of each thread the innermost call first" in text, rank
            assert frame in text, rank
    assert (record.outcome, record.gen, record.budget.crashes) == (Outcome.SUCCEEDED, 2, 1)
    assert restored is not None and 0 < restored.step < 120
    assert run.weights() == run.weights_left_alone(tmp_path / "alone", nproc=2)
