"""A script without the library survives preemptions with and without a notice."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from spotkeeper.client.log_lines import NodeLines, in_order
from spotkeeper.client.logs import log_data
from spotkeeper.client.pack import pack
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.record import Outcome, SlotState
from spotkeeper.local.demo import proof
from tests.lifecycle.stage import Run, Stage
from tests.no_dynamo import NO_DYNAMO

pytestmark = pytest.mark.lifecycle

PLAIN = Path(__file__).resolve().parents[2] / "examples" / "plain"
STEPS = 400


def said(run: Run, gen: int) -> str:
    """What the nodes' machines have of the script's words in a generation; each node has the same to say."""
    folders = (run.stage.cloud.folder / "vms").glob(f"*/root/run/spotkeeper/{run.job}/{gen}/logs")
    return "\n".join(path.read_text(errors="replace") for folder in folders for path in folder.rglob("*.log"))


def trains(run: Run, gen: int) -> bool:
    """Whether all nodes are members, and the script has continued."""
    record = run.record()
    members = [node.cur for node in record.nodes if node.cur is not None and node.cur.state is SlotState.MEMBER]
    return record.gen == gen and len(members) == 2 and said(run, gen).count("going on after step") >= 2


def left_alone() -> str:
    """The hash of the weights of an undisturbed run of two nodes, in this process."""
    script = SimpleNamespace(**runpy.run_path(str(PLAIN / "train.py"), run_name="plain"))
    net = script.network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        for node in (0, 1):
            x, y = script.batch_of(step, node)
            (torch.nn.functional.mse_loss(net(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return str(script.weights(net))


@pytest.mark.matrix  # tests/agent/agent/test_script_without_library.py has its agent in `make test`
def test_a_script_that_saves_on_sigterm_survives_a_notice_and_a_loss(stage: Stage) -> None:
    spec = read_job(PLAIN / "job.yaml", None, 0.0)
    spec = replace(spec, command=("train.py", "--steps", str(STEPS), "--step-s", "0.05"), env=spec.env | NO_DYNAMO)
    with Run(stage, spec, pack(PLAIN)) as run:
        run.until("the first generation to train", lambda: trains(run, 1))
        node, slot = run.chaos.on_spot()[1]
        run.chaos.preempt(node, slot, announced=True)
        run.until("the second generation to train", lambda: trains(run, 2))
        stopped = {int(step) for step in re.findall(r"told to stop: saved step (\d+)", said(run, 1))}
        went_on = {int(step) for step in re.findall(r"going on after step (\d+)", said(run, 2))}
        assert stopped and went_on == stopped, "both nodes, at the very step"

        node, slot = run.chaos.on_spot()[0]
        run.chaos.preempt(node, slot, announced=False)
        run.until("the third generation to train", lambda: trains(run, 3))
        (again,) = {int(step) for step in re.findall(r"going on after step (\d+)", said(run, 3))}
        assert again in stopped or (again > max(stopped) and again % 25 == 0), "from the newest that both have"
        record = run.over()
        lines = list(in_order([NodeLines(stage.store, record.job, node) for node in (0, 1)]))
        weights = proof.weights_in(log_data(stage.store, record, 0)[1].decode(errors="replace"))
    assert record.outcome is Outcome.SUCCEEDED and record.gen == 3, run.story()
    assert [line.at for line in lines] == sorted(line.at for line in lines)
    for gen, phrase in ((1, "told to stop: saved step"), (3, "going on after step"), (3, weights)):
        assert {line.node for line in lines if line.gen == gen and phrase in line.text} == {0, 1}, (
            "on machines now gone"
        )
    assert not run.ledger(Event.CRASH), run.story()
    assert weights == left_alone()
