"""How long training pauses when machines come and go: real agents, launchers and library, 2 and 4 nodes.

The bench plays the function's part, without delay; the function's decisions have their own figures (``round``,
``soak``). Times are those of the control files, from the last step of one generation to the first of the next, over
all members.

* pause after a notice: a warm replacement stands by. All nodes save and stop after one step, and the next generation
  begins without waiting for a disk: the replacement gets the state from a peer.
* the same with sharded state (FSDP2), whose next generation waits for the disk. The disk's move, from the save's end
  until it is mounted on the replacement, is given separately. Here a folder moves; in a cloud, an attached disk.
* shrink: a machine vanishes. From the decision to continue without it to the first step of all survivors, which then
  split the same global batch.

Polls are as in a real cloud (0.5 s while an agent waits for something) and are part of both figures.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, Generation, JobRun, Role, SyncReply
from spotkeeper.train.agent_link.control import Commit, Control, ControlError
from tests.agent.fakes import JOB, Fake, Machine, document, fake_cloud, source, wait_until

NODES = (2, 4)
TIMES = 3
GOAL_S = 2.0  # the pause: beside the save
PATIENCE_S = 180.0
STEADY = 30  # steps before a notice or a loss

# 12 MB of state; the same global batch in every world; a step takes 20 ms at least.
SCRIPT = """
import time
import spotkeeper, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1000, 1000))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = spotkeeper.attach(model, optimizer, global_batch=12)
for batch in run.steps(torch.utils.data.DataLoader(torch.ones(4800, 1000), 1), epochs=10_000):
    run.backward(model(batch).square().mean())
    if run.step():
        time.sleep(0.02)
"""


# 12 MB of state as well, a half of it on each of two machines.
SHARDED = """
import time
import spotkeeper, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(1000, 1000))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = spotkeeper.attach(model, optimizer)
for batch in run.steps(torch.utils.data.DataLoader(torch.ones(4800, 1000), 6), epochs=10_000):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class GangStep:
    """What a control file says of a generation; times in unix seconds."""

    step: int
    step_at: float
    first_step_at: float
    restored: Commit | None
    commit: Commit | None
    save_s: float

    @classmethod
    def of(cls, vm: Machine, gen: int) -> GangStep | None:
        """Read a control file; None if the generation has not begun."""
        try:
            with Control.open(vm.run_folder / JOB / str(gen) / "ctl") as control:
                if not control.first_step_at:
                    return None
                words = control.restored, control.commit, control.save_s
                return cls(control.step, control.step_at, control.first_step_at, *words)
        except ControlError:
            return None


@dataclass
class Gang:
    """Machines with warm launchers; ``members`` train in generation ``gen``."""

    fake: Fake
    run: JobRun
    members: list[Machine]
    gen: int = 0
    ver: int = 0
    doc: Generation | None = None
    disks: set[str] = field(default_factory=set)
    replicated: bool = True

    def begin(self) -> None:
        """Start another generation of these members."""
        self.gen += 1
        listed = tuple(vm.member(vm.uid in self.disks) for vm in self.members)
        self.doc = document(0, self.gen, listed, replicated=self.replicated)
        self.tell(DocState.RUN)

    def tell(self, state: DocState) -> None:
        assert self.doc is not None
        self.ver += 1
        deadline = time.time() + 60 if state is DocState.SAVE_STOP else None
        doc = replace(self.doc, ver=self.ver, state=state, deadline=deadline)
        for vm in self.members:
            vm.serve(doc, self.run, disk=0 if vm.uid in self.disks else None)

    def began(self) -> list[GangStep]:
        """The members' control files, once each has done a step."""

        def found() -> list[GangStep] | None:
            seen = [one for vm in self.members if (one := GangStep.of(vm, self.gen)) is not None]
            return seen if len(seen) == len(self.members) else None

        seen: list[GangStep] = wait_until(found, PATIENCE_S)
        return seen

    def steady(self) -> None:
        """Wait until each has done some steps, and saved if it has a disk."""
        start = max(seen.step for seen in self.began())

        def well() -> bool:
            seen = [(vm, GangStep.of(vm, self.gen)) for vm in self.members]
            saved = any(one is not None and one.commit is not None for vm, one in seen if vm.uid in self.disks)
            return saved and all(one is not None and one.step > start + STEADY for _, one in seen)

        wait_until(well, PATIENCE_S)


@contextmanager
def gang(nodes: int, machines: int, script: str = SCRIPT) -> Iterator[tuple[Gang, list[Machine]]]:
    """Warm machines, and a gang of the first ones, each with its disk; the others are spares."""
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as name, fake_cloud() as fake:
        made: list[Machine] = []
        try:
            for number in range(machines):
                node = min(number, nodes - 1)
                named, address = f"sk-test-{JOB}-n{node:04}-a{1 + number - node}", f"127.0.1.{number + 1}"
                home, uid = Path(name) / f"vm{number}", f"{1001 + number}"
                made.append(Machine(fake, home, node=node, address=address, uid=uid, name=named))
            sent = source(fake, {"train.py": script})
            most = nodes if script is SCRIPT else None  # sharded state has one number of ranks
            run = JobRun("bench", ("train.py",), sent, interval_s=2.0, max_world=most)
            for vm in made:
                vm.stand_by(run)
                vm.start()
            for vm in made:
                fake.wait_fact(vm.uid, Kind.HELLO, timeout_s=PATIENCE_S)
            one = Gang(fake, run, made[:nodes], replicated=script is SCRIPT)
            for vm in one.members:
                vm.attach_disk()
                one.disks.add(vm.uid)
            one.begin()
            one.steady()
            yield one, made[nodes:]
        finally:
            for vm in made:
                vm.end()


def pauses(nodes: int, times: int = TIMES) -> tuple[list[float], list[float]]:
    """Seconds of pause after a notice, and of the last save in each."""
    with gang(nodes, nodes + 1) as (one, spares):
        return tuple(zip(*(_pause(one, spares) for _ in range(times)), strict=True))  # type: ignore[return-value]


def _pause(one: Gang, spares: list[Machine]) -> tuple[float, float]:
    """The spare replaces the last member, which becomes the next spare."""
    victim, spare = one.members[-1], spares.pop()
    before = _stopped(one)
    one.members[-1] = spare
    victim.stand_by(one.run)
    one.begin()
    after = one.began()
    one.fake.instance(victim.uid, victim.name, preempted="FALSE")
    spares.append(victim)
    pause = _pause_s(before, after)
    one.steady()
    return pause, max(seen.save_s for seen in before)


def sharded_pauses(nodes: int, times: int = TIMES) -> tuple[list[float], list[float], list[float]]:
    """The same with sharded state, and the seconds of the disk's move."""
    with gang(nodes, nodes + times, SHARDED) as (one, spares):
        return tuple(zip(*(_sharded_pause(one, spares) for _ in range(times)), strict=True))  # type: ignore[return-value]


def _sharded_pause(one: Gang, spares: list[Machine]) -> tuple[float, float, float]:
    """A spare replaces the last member and takes its disk."""
    victim, spare = one.members[-1], spares.pop(0)
    before, saved = _stopped(one), time.time()
    one.fake.reply(victim.uid, SyncReply(Role.SUPERSEDED, JOB, victim.node, 1))
    one.fake.wait_fact(victim.uid, Kind.FREED, timeout_s=PATIENCE_S)
    shutil.move(victim.root / "disk", spare.root / "disk")
    spare.attach_disk()
    spare.stand_by(one.run, disk=0)
    one.fake.wait_fact(spare.uid, Kind.ATTACHED, timeout_s=PATIENCE_S)
    moved = time.time() - saved
    one.members[-1] = spare
    one.disks.add(spare.uid)
    one.begin()
    pause = _pause_s(before, one.began())
    one.steady()
    return pause, max(seen.save_s for seen in before), moved


def _stopped(one: Gang) -> list[GangStep]:
    """Give the last member a notice; all save and stop."""
    victim = one.members[-1]
    one.fake.instance(victim.uid, victim.name, preempted="TRUE")
    one.fake.wait_fact(victim.uid, Kind.NOTICE, one.gen, PATIENCE_S)
    one.tell(DocState.SAVE_STOP)
    for vm in one.members:
        one.fake.wait_fact(vm.uid, Kind.RELEASED, one.gen, PATIENCE_S)
    seen = [GangStep.of(vm, one.gen) for vm in one.members]
    return [each for each in seen if each is not None]


def _pause_s(before: list[GangStep], after: list[GangStep]) -> float:
    """Seconds of the pause.

    Raises:
        RuntimeError: a step was lost.
    """
    last = max(seen.step for seen in before)
    if any(seen.restored is None or seen.restored.step != last for seen in after):
        raise RuntimeError(f"step {last} was the last one, taken up again: {[seen.restored for seen in after]}")
    return max(seen.first_step_at for seen in after) - max(seen.step_at for seen in before)


def shrinks(nodes: int, times: int = TIMES) -> list[float]:
    """Seconds from the decision to continue with one node fewer to the first step of all survivors."""
    return [_shrink(nodes) for _ in range(times)]


def _shrink(nodes: int) -> float:
    with gang(nodes, nodes) as (one, _):
        one.members.pop().end()
        for vm in one.members:  # its peers' jobs fail with it and report, which triggers the deciding round
            one.fake.wait_fact(vm.uid, Kind.EXIT, one.gen, PATIENCE_S)
        decided = time.time()
        one.begin()
        after = one.began()
        if any(seen.restored is None for seen in after):
            raise RuntimeError("it began anew")
        return max(seen.first_step_at for seen in after) - decided


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    found = []
    for nodes in NODES:
        taken, saves = pauses(nodes)
        beside = statistics.median(pause - save for pause, save in zip(taken, saves, strict=True))
        name = "recovery.pause_after_notice_s" + _of(nodes)
        what = f"{nodes} nodes, median of {TIMES}; the save, {statistics.median(saves):.2f} s, is not counted"
        found.append(_figure(name, beside, what))
    taken, saves, moves = sharded_pauses(NODES[0])
    beside = statistics.median(all_of - save - move for all_of, save, move in zip(taken, saves, moves, strict=True))
    parts = f"the save, {statistics.median(saves):.2f} s, and the disk's move, {statistics.median(moves):.2f} s"
    what = f"{NODES[0]} nodes, median of {TIMES}; {parts}, are not counted"
    found.append(_figure("recovery.pause_after_notice_s.sharded", beside, what))
    for nodes in NODES:
        name = "recovery.shrink_s" + _of(nodes)
        taken = shrinks(nodes)
        found.append(_figure(name, statistics.median(taken), f"{nodes} nodes to {nodes - 1}, median of {TIMES}"))
    return found


def _of(nodes: int) -> str:
    return "" if nodes == NODES[0] else f".{nodes}_nodes"


def _figure(name: str, value: float, against: str) -> dict[str, object]:
    goal = {"goal": f"<= {GOAL_S:g}", "holds": value <= GOAL_S}
    return {"name": name, "value": round(value, 2), "unit": "s", **goal, "against": against}
