"""How a gang of real agents and launchers comes through notices and losses; the test is in the function's place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, Generation, JobRun
from spotkeeper.train.agent_link.control import Commit, Control, ControlError
from tests.agent.agent import nets
from tests.agent.agent.nets import Net
from tests.agent.fakes import JOB, REPO, Fake, Machine, document, environ_of, source, wait_until
from tests.agent.jobs import LAUNCHER, OBEDIENT
from tests.no_dynamo import NO_DYNAMO

Make = Callable[..., Machine]
PROTOCOL = REPO / "docs/protocol.md"
SECTION = "## Faults a job survives, and the tests that prove it"

# Steps with an all-reduce that carries what is wanted, so that all ranks save, and leave, at the same step.
SAVING_GANG = """
import os, time
import torch, torch.distributed as dist
from spotkeeper.train.agent_link.control import Commit, Control, RunResult, RunPhase, AgentRequest, write_result
dist.init_process_group("gloo")
run, gen = os.environ["SPOTKEEPER_RUN"], int(os.environ["SPOTKEEPER_GEN"])
control = Control.open(run + "/ctl")
control.state, control.save_s, control.step_s = RunPhase.TRAINING, 0.05, 0.01
step = 0
while True:
    want = torch.tensor([int(control.requested)])
    dist.all_reduce(want, dist.ReduceOp.MAX)
    step += 1
    control.stepped(step)
    if want.item() >= AgentRequest.SAVE:
        control.committed(Commit(gen, step))
    if want.item() == AgentRequest.SAVE_STOP:
        write_result(run, RunResult("stopped", gen, step, Commit(gen, step)))
        raise SystemExit(0)
    time.sleep(0.01)
"""
SLOW_TO_SAVE = OBEDIENT.replace(
    "    if control.requested is AgentRequest.SAVE_STOP:",
    "    if control.requested is AgentRequest.SAVE_STOP:\n"
    "        open(run + '/saves', 'w').close()\n"
    "        while not os.path.exists(run + '/durable'):\n"
    "            time.sleep(0.01)",
)


def told(vm: Machine, gen: int) -> tuple[int, Commit | None]:
    """The job's step and newest checkpoint in a generation."""
    try:
        with Control.open(vm.run_folder / JOB / str(gen) / "ctl") as control:
            return control.step, control.commit
    except ControlError:
        return 0, None


def trains(vm: Machine, gen: int) -> None:
    """It has made a few more steps."""
    before, _ = told(vm, gen)
    wait_until(lambda: told(vm, gen)[0] > before + 3, 90)


def noticed(vm: Machine, value: str = "TRUE") -> None:
    vm.fake.instance(vm.uid, vm.name, preempted=value)


def notice_s(vm: Machine, seconds: int) -> None:
    """How long a notice of this machine is; before it starts."""
    attributes = vm.fake.instances[vm.uid]["attributes"]
    vm.fake.instance(vm.uid, vm.name, attributes=attributes | {"sk-notice-s": str(seconds)})


def serve(doc: Generation, run: JobRun, *machines: Machine) -> None:
    for vm in machines:
        vm.serve(doc, run)


def words(vm: Machine, gen: int) -> list[str]:
    return [kind for kind, of, _ in vm.fake.kinds(vm.uid) if of == gen and kind in ("exit", "released")]


def pair(fake: Fake, machine: Make, hosts: tuple[Net, Net]) -> tuple[Machine, Machine]:
    """Two machines on two hosts; the first has 8 s from a notice to its end, the second a minute."""
    made = []
    for node, (net, seconds) in enumerate(zip(hosts, (8, 60), strict=True)):
        with net.inside():
            vm = machine(uid=f"{1001 + node}", name=f"sk-test-{JOB}-n000{node}-a1", node=node, address=net.address)
        # What a machine reaches, it reaches on its own loopback: the cable carries the gang's words alone.
        here = f"http://{vm.metadata}"
        attributes = fake.instances[vm.uid]["attributes"] | {"sk-function": f"{here}/fn", "sk-storage": here}
        fake.instance(vm.uid, vm.name, attributes=attributes)
        notice_s(vm, seconds)
        made.append(vm)
    return made[0], made[1]


@pytest.mark.skipif(bool(nets.why_not()), reason=nets.why_not())
@pytest.mark.parametrize("mode", ["zygote", pytest.param("exec", marks=pytest.mark.matrix)])
def test_a_gang_survives_notices_and_a_master_that_vanishes_without_fin(fake: Fake, machine: Make, mode: str) -> None:
    run = JobRun("job", ("train.py",), source(fake, {"train.py": SAVING_GANG}), env=NO_DYNAMO, launcher=mode)
    with nets.two() as hosts:
        first, second = pair(fake, machine, hosts)
        for vm, net in zip((first, second), hosts, strict=True):
            vm.stand_by(run)
            with net.inside():
                vm.start()
        for vm in (first, second):
            fake.wait_fact(vm.uid, Kind.HELLO, timeout_s=90)
        one = document(1, 1, (first.member(), second.member()))
        serve(one, run, first, second)
        notices_with_different_deadlines(fake, first, second)

        two = document(2, 2, one.members)
        serve(two, run, first, second)  # both come again
        for vm in (first, second):
            trains(vm, 2)
        a_master_that_is_gone_without_a_word(fake, (first, second), hosts, two, run)


def notices_with_different_deadlines(fake: Fake, first: Machine, second: Machine) -> None:
    """The second's comes while its job is launched; the first's later, with a nearer end, which is the gang's."""
    wait_until(lambda: '"job.start"' in second.log(), 30)
    assert told(second, 1)[0] == 0
    noticed(second)
    late = fake.wait_fact(second.uid, Kind.NOTICE)
    trains(second, 1)  # a notice keeps nothing from starting
    wait_until(lambda: told(second, 1)[1], 10)  # it is saved for as soon as there is something to save
    assert words(first, 1) == words(second, 1) == []
    noticed(first)
    soon = fake.wait_fact(first.uid, Kind.NOTICE, 1)
    assert int(soon.value) < int(late.value)
    steps = {int(fake.wait_fact(vm.uid, Kind.RELEASED, 1).value) for vm in (first, second)}
    assert len(steps) == 1 and time.time() < int(soon.value) + 1, "both stop at one step, by the nearer end"
    assert words(first, 1) == words(second, 1) == ["released"]
    for vm, notice in ((first, soon), (second, late)):
        noticed(vm, "FALSE")
        assert fake.wait_fact(vm.uid, Kind.REPRIEVE).value == notice.value


def a_master_that_is_gone_without_a_word(
    fake: Fake, gang: tuple[Machine, Machine], hosts: tuple[Net, Net], doc: Generation, run: JobRun
) -> None:
    """Its cable is cut first, so that its kernel's FINs and RSTs reach nobody: the other one waits for it."""
    (master, survivor), (dead, here) = gang, hosts
    dead.cut()
    master.end()
    before = len(fake.syncs)
    fake.wait(lambda: any(uid == survivor.uid and said.pending for uid, said in fake.syncs[before:]))
    assert here.connected(dead) > 0, "nothing has told it"
    assert words(survivor, 2) == [], "its job hangs"
    serve(document(3, 2, doc.members, DocState.ROLL_CALL, port=doc.port), run, survivor)
    fake.wait_fact(survivor.uid, Kind.HERE)
    serve(document(4, 3, (survivor.member(),)), run, survivor)  # it goes on alone, as its own master
    trains(survivor, 3)
    assert not [pid for pid in survivor.processes() if b"SPOTKEEPER_GEN=2" in environ_of(pid)]
    assert words(survivor, 2) == [], "given up for a newer one: no crash"


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["zygote", "exec"])
def test_two_of_three_machines_are_lost_at_once_and_then_one_more(fake: Fake, machine: Make, mode: str) -> None:
    """One of the two is the master. Here their kernels do say FIN: the third's job ends with them, and says so."""
    run = JobRun("job", ("train.py",), source(fake, {"train.py": SAVING_GANG}), env=NO_DYNAMO, launcher=mode)
    vms = [
        machine(
            uid=f"{1001 + n}", name=f"sk-test-{JOB}-n000{n % 3}-a{1 + n // 3}", node=n % 3, address=f"127.0.1.{n + 1}"
        )
        for n in range(4)
    ]
    for vm in vms:
        vm.stand_by(run)
        vm.start()
    for vm in vms:
        fake.wait_fact(vm.uid, Kind.HELLO, timeout_s=120)
    one, two, three, spare = vms
    serve(document(1, 1, (one.member(), two.member(), three.member())), run, one, two, three)
    for vm in (one, two, three):
        trains(vm, 1)
    one.end()
    three.end()
    assert fake.wait_fact(two.uid, Kind.EXIT, 1, 60).value != "0"
    serve(document(2, 2, (spare.member(), two.member())), run, spare, two)  # a replacement has the dead one's index
    for vm in (spare, two):
        trains(vm, 2)
    spare.end()
    fake.wait_fact(two.uid, Kind.EXIT, 2, 60)
    serve(document(3, 3, (two.member(),)), run, two)
    trains(two, 3)
    assert not [pid for pid in two.processes() if {b"SPOTKEEPER_GEN=1", b"SPOTKEEPER_GEN=2"} & set(environ_of(pid))]


def test_a_notice_during_the_last_save_does_not_disturb_it(fake: Fake, machine: Make) -> None:
    vm = machine()
    notice_s(vm, 30)
    python, mode = ("python3", LAUNCHER) if LAUNCHER else (vm.light_python(), "zygote")
    run = JobRun("job", ("train.py",), source(fake, {"train.py": SLOW_TO_SAVE}), python=python, launcher=mode)
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    doc = document(1, 1, (vm.member(),))
    vm.serve(doc, run)
    trains(vm, 1)
    vm.serve(document(2, 1, doc.members, DocState.SAVE_STOP, port=doc.port, deadline=time.time() + 25), run)
    folder: Path = vm.run_folder / JOB / "1"
    wait_until((folder / "saves").exists)
    noticed(vm)
    fake.wait_fact(vm.uid, Kind.NOTICE, 1)
    with Control.open(folder / "ctl") as control:
        asked = control.request_number
        (folder / "durable").touch()
        released = fake.wait_fact(vm.uid, Kind.RELEASED, 1)
        assert control.request_number == asked, "it was asked once"
    asked_for = len(fake.syncs)
    fake.wait(lambda: len(fake.syncs) > asked_for + 2)  # the word to stop stands; it is no news to say again
    assert words(vm, 1) == ["released"] and int(released.value) > 0
    assert vm.log().count('"job.save_stop"') == 1


def test_every_test_in_the_table_of_recoveries_exists() -> None:
    text = PROTOCOL.read_text().partition(SECTION)[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 15
    for file, test in named:
        path = REPO / file if "/" in file else next((REPO / "tests/agent").rglob(file))
        assert re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"
