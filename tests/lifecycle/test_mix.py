"""A job on machines of two pools: work moves to the faster one, and a lost machine comes back from its pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.client.pack import pack
from spotkeeper.client.target import STACK_FILE
from spotkeeper.contract.job import MachineGroup
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.record import Outcome
from tests.lifecycle.stage import Run, Stage
from tests.lifecycle.test_elastic import COMMAND, ELASTIC, curve, left_alone, told, trains

pytestmark = pytest.mark.lifecycle

POOL = """\
    - {name: small, kind: spot, size: 4, machine: {type: g2-standard-4}, disk: {size_gb: 20}}
  spotkeeper:limits:"""
SLOW = """
import os, time
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from spotkeeper.train.loop import lag
import train
lag.WINDOW_S, lag._FIRST = 0.5, 4
if os.environ["SPOTKEEPER_SLOT"] == "1":
    register_module_forward_pre_hook(lambda module, _: time.sleep(0.03 * isinstance(module, DistributedDataParallel)))
train.main()
"""


@pytest.fixture
def two_pools(tmp_path: Path) -> Iterator[Stage]:
    file = tmp_path / "Pulumi.local.yaml"
    file.write_text(STACK_FILE.read_text().replace("  spotkeeper:limits:", POOL, 1))
    with Stage.of_its_own(tmp_path, None, file) as stage:
        yield stage


@pytest.mark.matrix
def test_work_moves_to_the_faster_machine_and_a_lost_one_is_replaced_from_its_pool(
    two_pools: Stage, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_bytes((ELASTIC / "train.py").read_bytes())
    (source / "mixed.py").write_text(SLOW)
    spec = replace(
        read_job(ELASTIC / "job.yaml", None, 0.0),
        nodes=1,
        machines=(MachineGroup("burst", 1), MachineGroup("small", 1)),
        command=("mixed.py", *COMMAND[1:]),
        policy="spot",
    )
    with Run(two_pools, spec, pack(source)) as run:
        run.steady("on both machines")
        assert pools(run) == ["burst", "small"]
        run.until("work to move", lambda: "ranks do 8, 1 micro-batches" in "".join(told(run, 1)))
        victim = run.record().nodes[1].cur
        assert victim is not None
        run.chaos.preempt(1, victim, announced=False)
        run.until("it to train again", lambda: run.record().gen > 1 and trains(run, 2))
        assert pools(run) == ["burst", "small"]
        last = run.record().gen
        run.until("its first losses to be told", lambda: curve(told(run, last)))
        losses = curve("".join(told(run, gen) for gen in range(1, last + 1)))
        record = run.cancel()
    assert record.outcome is Outcome.CANCELLED
    alone = left_alone(tmp_path / "alone", max(losses))
    assert set(losses) == set(alone) == set(range(1, max(losses) + 1)), "every step was done"
    apart = max(abs(loss - other) for step in alone for loss in losses[step] for other in alone[step])
    print(f"{max(losses)} steps, {apart:.3g} apart")
    assert apart <= 1e-6


def pools(run: Run) -> list[str]:
    return [node.cur.pool for node in run.record().nodes if node.cur is not None]
