"""The agent as a process, against a scripted cloud: boot, membership, stop, notice, lease, restart."""

from __future__ import annotations

import time
from collections.abc import Callable

from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import DocState, JobRun, Role, SyncReply

from tests.vm.fakes import JOB, Fake, Machine, document, source, wait_until
from tests.vm.jobs import OBEDIENT

Make = Callable[..., Machine]


def obedient(fake: Fake, *args: str, **fields: object) -> JobRun:
    sha256 = source(fake, {"train.py": OBEDIENT})
    return JobRun(name="job", command=("train.py", *args), source_sha256=sha256, **fields)  # type: ignore[arg-type]


def begin(fake: Fake, vm: Machine, run: JobRun, gen: int = 1, **fields: object) -> None:
    """Boot, and become the only member of a generation."""
    vm.start()
    fake.wait_fact(vm.uid, Kind.HELLO)
    vm.serve(document(gen, gen, (vm.member(),), **fields), run)  # type: ignore[arg-type]
    wait_until(lambda: step_of(vm, gen) > 0, 40)


def step_of(vm: Machine, gen: int) -> int:
    from spotkeeper.train.control import Control, ControlError

    try:
        with Control.open(vm.run_folder / JOB / str(gen) / "ctl") as control:
            return control.step
    except ControlError:
        return 0


def test_hello_is_repeated_until_known_then_runs_saves_and_powers_off(fake: Fake, machine: Make) -> None:
    vm = machine()
    vm.start()
    fake.wait(lambda: len([1 for uid, fact in fake.facts if fact.kind is Kind.HELLO]) >= 3)
    run = obedient(fake)
    doc = document(1, 1, (vm.member(),))
    vm.serve(doc, run)
    wait_until(lambda: step_of(vm, 1) > 3, 40)
    vm.serve(document(2, 1, doc.members, DocState.SAVE_STOP, port=doc.port, deadline=time.time() + 20), run)
    released = fake.wait_fact(vm.uid, Kind.RELEASED, 1)
    assert int(released.value) == step_of(vm, 1) > 3
    fake.reply(vm.uid, SyncReply(Role.SUPERSEDED, JOB, 0, 1))
    fake.wait_fact(vm.uid, Kind.FREED)
    assert vm.init is not None and vm.agent is not None
    assert vm.init.wait(10) == -15  # powered off
    assert vm.agent.wait(10) == 0
    assert vm.processes() == [], vm.processes()
    assert "hello from 0 of 1" in fake.objects[f"jobs/{JOB}/logs/0/1.log"].decode()
