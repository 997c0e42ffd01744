"""A script that saves by itself on SIGTERM, under the agent: told in time, left alone for its grace, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, JobRun
from tests.agent.fakes import JOB, Fake, Machine, document, source, wait_until

Make = Callable[..., Machine]

SAVES = '''
"""Saves where it is told to, once SIGTERM comes, and takes its time. Imports nothing of ours."""
import os, pathlib, signal, sys, time
home, takes_s = pathlib.Path(os.environ["SPOTKEEPER_CKPT"]), float(sys.argv[1])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.time()))
print("up", flush=True)
while not told:
    time.sleep(0.01)
(home / "told").write_text(str(told[0]))
time.sleep(takes_s)
(home / "saved").write_text("all of it")
'''


def begin(fake: Fake, vm: Machine, takes_s: float, grace_s: float) -> JobRun:
    sha256 = source(fake, {"train.py": SAVES})
    words = ("train.py", str(takes_s))
    python = vm.light_python()
    run = JobRun(name="job", command=words, source_sha256=sha256, python=python, stop="signal", grace_s=grace_s)
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.attach_disk()
    vm.serve(document(1, 1, (vm.member(disk=True),)), run, disk=4)
    wait_until(lambda: b"up" in fake.objects.get(f"jobs/{JOB}/logs/0/1.log", b""), 40)
    return run


def home(vm: Machine) -> Path:
    (found,) = {path.parent for path in vm.root.rglob("told")}
    return found


def test_a_script_without_the_library_saves_within_its_grace_period(fake: Fake, machine: Make) -> None:
    vm = machine()
    run = begin(fake, vm, takes_s=1.5, grace_s=30)
    doc = document(1, 1, (vm.member(disk=True),))
    vm.serve(document(2, 1, doc.members, DocState.SAVE_STOP, port=doc.port, deadline=time.time() + 60), run, disk=4)
    fake.wait_fact(vm.uid, Kind.RELEASED, 1)
    assert (home(vm) / "saved").read_text() == "all of it"


def test_the_grace_period_ends_at_the_deadline(fake: Fake, machine: Make) -> None:
    vm = machine()
    run = begin(fake, vm, takes_s=600, grace_s=600)
    doc = document(1, 1, (vm.member(disk=True),))
    deadline = time.time() + 15  # the agent asks every 10 s
    vm.serve(document(2, 1, doc.members, DocState.SAVE_STOP, port=doc.port, deadline=deadline), run, disk=4)
    fake.wait_fact(vm.uid, Kind.RELEASED, 1)
    assert not (home(vm) / "saved").exists()
    assert '"job.kill"' in vm.log()


def test_a_notice_sends_sigterm_in_time_for_the_grace_period(fake: Fake, machine: Make) -> None:
    vm = machine()
    fake.instance(vm.uid, vm.name, attributes=fake.instances[vm.uid]["attributes"] | {"sk-notice-s": "12"})
    begin(fake, vm, takes_s=0.1, grace_s=6)
    fake.instance(vm.uid, vm.name, preempted="TRUE")
    noticed = fake.wait_fact(vm.uid, Kind.NOTICE, 1)
    fake.wait_fact(vm.uid, Kind.RELEASED, 1, 20)
    told = float((home(vm) / "told").read_text())
    assert int(noticed.value) - told >= 6, "all of its grace was left"
    assert '"job.save_stop"' in vm.log()
