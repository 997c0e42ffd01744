"""The agent as a process, against a scripted cloud: boot, membership, stop, notice, lease, restart."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as changed

from spotkeeper.contract.facts import Kind, Rung
from spotkeeper.contract.generation import DocState, JobRun, Role, SyncReply
from spotkeeper.train.agent_link.control import Control, ControlError
from tests.agent.chunks import complete_log
from tests.agent.fakes import JOB, Fake, Machine, command_of, document, environ_of, source, wait_until
from tests.agent.jobs import GANG, LAUNCHER, OBEDIENT, SPOILS
from tests.no_dynamo import NO_DYNAMO

Make = Callable[..., Machine]


def obedient(vm: Machine, *args: str, real: bool = False, **fields: Any) -> JobRun:
    """A job that minds its control file; under the light launcher unless a test needs the ``real`` one."""
    sha256 = source(vm.fake, {"train.py": OBEDIENT})
    python = "python3" if real or LAUNCHER else vm.light_python()
    mode = LAUNCHER or "zygote"
    return JobRun("job", ("train.py", *args), sha256, env=NO_DYNAMO, python=python, launcher=mode, **fields)


def begin(fake: Fake, vm: Machine, run: JobRun, gen: int = 1) -> None:
    """Boot, and become the only member of a generation."""
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(gen, gen, (vm.member(),)), run)
    wait_until(lambda: step_of(vm, gen) > 0)


def step_of(vm: Machine, gen: int) -> int:
    try:
        with Control.open(vm.run_folder / JOB / str(gen) / "ctl") as control:
            return control.step
    except ControlError:
        return 0


def test_hello_waits_for_a_warm_launcher_then_runs_saves_and_powers_off(fake: Fake, machine: Make) -> None:
    vm = machine()
    vm.start()
    fake.wait(lambda: len(fake.syncs) >= 3)
    assert fake.facts == [], "nobody expects it yet"
    run = obedient(vm, real=True)
    vm.stand_by(run)
    fake.wait_fact(vm.uid, Kind.HELLO, timeout_s=60)
    assert '"launcher.up"' in vm.log(), "admitted means ready to train"
    doc = document(1, 1, (vm.member(),))
    vm.serve(doc, run)
    wait_until(lambda: step_of(vm, 1) > 3)
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
    said = complete_log(fake.objects, JOB, 0, 1).splitlines()
    assert [line for line in said if "hello from" in line] == ["0o hello from 0 of 1"]


def test_a_new_generation_starts_warm_and_reports_the_disks_checkpoints(fake: Fake, machine: Make) -> None:
    """Disk first: a member with a disk waits for it. Then a higher document replaces the generation.

    Its scratch folder, on the disk, is the same in both.
    """
    vm = machine(clock=f"{time.time()}:{time.time()}:8")
    run = changed(obedient(vm), scratch_gb=1)
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    one = document(1, 1, (vm.member(disk=True),))
    vm.serve(one, run, disk=4)
    wait_until(lambda: "disk.awaited" in vm.log())
    assert step_of(vm, 1) == 0
    vm.attach_disk()
    assert fake.wait_fact(vm.uid, Kind.ATTACHED).value == "4"
    wait_until(lambda: step_of(vm, 1) > 0)
    vm.serve(document(2, 2, one.members), run, disk=4)
    wait_until(lambda: step_of(vm, 2) > 0)
    words = f"the scratch folder is new and empty: {vm.root}/mnt/sk-scratch, 1 GB"
    assert [words in (vm.run_folder / JOB / gen / "torchrun.log").read_text() for gen in ("1", "2")] == [True, False]
    assert not [fact for fact in fake.kinds(vm.uid) if fact[0] in ("exit", "released")], (
        "a kill for a newer one is none"
    )
    vm.serve(document(3, 2, one.members, DocState.ROLL_CALL), run, disk=4)
    assert fake.wait_fact(vm.uid, Kind.HERE).value == "3"
    vm.serve(document(4, 2, one.members, DocState.SAVE_STOP), run, disk=4)
    step = fake.wait_fact(vm.uid, Kind.RELEASED, 2).value
    assert ("checkpoint", 2, f"2-{step}") in fake.kinds(vm.uid)
    fake.wait(lambda: any(told.gen == 2 and told.commit_step == int(step) for told in fake.progress))


REACHES = OBEDIENT.replace(
    "    if control.requested is AgentRequest.SAVE and leader:",
    """    if step == int(os.environ.get("SPOTKEEPER_UNTIL", "0")):
        control.committed(Commit(gen, step))
        value = 0.25 if os.environ["SPOTKEEPER_METRIC"] == "loss" else None
        write_result(run, RunResult("reached", gen, step, Commit(gen, step), value))
        raise SystemExit(0)
    if control.requested is AgentRequest.SAVE and leader:""",
)


def test_a_trial_reports_its_metric_at_its_rung_and_at_its_end(fake: Fake, machine: Make) -> None:
    vm = machine()
    run = changed(obedient(vm, "30"), source_sha256=source(fake, {"train.py": REACHES}), until=12, metric="loss")
    begin(fake, vm, run)
    released = fake.wait_fact(vm.uid, Kind.RELEASED, 1)
    assert released.value == "12"
    rung = next(value for kind, gen, value in fake.kinds(vm.uid) if (kind, gen) == ("rung", 1))
    assert Rung.parse(rung) == Rung(12, 0.25)
    assert not [fact for fact in fake.kinds(vm.uid) if fact[0] == "exit"], "the job is not done"
    vm.serve(document(2, 2, (vm.member(),)), changed(run, until=None))
    assert fake.wait_fact(vm.uid, Kind.EXIT, 2).value == "0"
    last = next(value for kind, gen, value in fake.kinds(vm.uid) if (kind, gen) == ("rung", 2))
    assert Rung.parse(last) == Rung(30, None)


def test_a_job_that_is_no_trial_reports_no_rung(fake: Fake, machine: Make) -> None:
    vm = machine()
    begin(fake, vm, obedient(vm, "30"))
    fake.wait_fact(vm.uid, Kind.EXIT, 1)
    assert not [fact for fact in fake.kinds(vm.uid) if fact[0] == "rung"]


def test_job_that_ends_by_itself_and_one_that_fails(fake: Fake, machine: Make) -> None:
    vm = machine()
    run = obedient(vm, "5")
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    one = document(1, 1, (vm.member(),))
    vm.serve(one, run)
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "0"
    end = next(number for number, (_, sync) in enumerate(fake.syncs) if any(f.kind is Kind.EXIT for f in sync.facts))
    told = [sync.progress.step for _, sync in fake.syncs[: end + 1] if sync.progress is not None]
    assert told[-1:] == [5], "the last step comes with the end at the latest: after it nobody listens"
    vm.serve(document(2, 2, one.members), obedient(vm, "no-number"))
    assert fake.wait_fact(vm.uid, Kind.EXIT, 2).value == "1"
    fake.wait(lambda: b"invalid literal for int()" in fake.objects.get(f"jobs/{JOB}/logs/0/2.log", b""))
    # The same document again does not start it again; only a higher generation does.
    count = vm.log().count('"job.start"')
    vm.serve(document(3, 2, one.members, DocState.ROLL_CALL), run)
    fake.wait_fact(vm.uid, Kind.HERE)
    assert vm.log().count('"job.start"') == count == 2
    # What it printed at last is what broken hardware makes it print: said before its end.
    vm.serve(document(4, 3, one.members), obedient(vm, "CUDA error: uncorrectable ECC error encountered"))
    assert fake.wait_fact(vm.uid, Kind.EXIT, 3).value == "1"
    words = [(kind, gen) for kind, gen, *_ in fake.kinds(vm.uid) if kind in ("exit", "hardware-fault")]
    assert words == [("exit", 1), ("exit", 2), ("hardware-fault", 3), ("exit", 3)]


@pytest.mark.parametrize("saves", [True, False])
def test_exit_93_during_a_save_and_stop_is_reported_as_exit(fake: Fake, machine: Make, saves: bool) -> None:
    """The order to stop came first, but a restart cannot help: the function must hear that."""
    vm = machine()
    give_up = OBEDIENT.replace("raise SystemExit(0)", "raise SystemExit(93)")
    if not saves:
        give_up = give_up.replace(
            "    if control.requested is AgentRequest.SAVE_STOP:",
            "    if control.requested is AgentRequest.SAVE_STOP:\n        raise SystemExit(93)",
        )
    run = msgspec.structs.replace(obedient(vm), source_sha256=source(fake, {"train.py": give_up}))
    begin(fake, vm, run)
    stop = document(2, 1, (vm.member(),), DocState.SAVE_STOP, deadline=time.time() + 20)
    vm.serve(stop, run)
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "93"
    words = [kind for kind, *_ in fake.kinds(vm.uid) if kind in ("exit", "released")]
    assert words[0] == "exit", "a release would let the next generation begin"


def test_a_notice_saves_at_once_then_stops_and_a_reprieve_is_reported(fake: Fake, machine: Make) -> None:
    vm = machine()
    fake.instance(vm.uid, vm.name, attributes=fake.instances[vm.uid]["attributes"] | {"sk-notice-s": "8"})
    begin(fake, vm, obedient(vm))
    fake.instance(vm.uid, vm.name, preempted="TRUE")
    noticed = fake.wait_fact(vm.uid, Kind.NOTICE, 1)
    assert 5 < int(noticed.value) - time.time() <= 8
    wait_until(lambda: commit_of(vm, 1), 3)  # the save at the notice; training goes on
    first = step_of(vm, 1)
    wait_until(lambda: step_of(vm, 1) > first)
    released = fake.wait_fact(vm.uid, Kind.RELEASED, 1)  # nobody told it to stop: its own deadline did
    assert time.time() < int(noticed.value) + 1
    assert int(released.value) > first
    fake.instance(vm.uid, vm.name, preempted="FALSE")
    assert fake.wait_fact(vm.uid, Kind.REPRIEVE).value == noticed.value
    vm.serve(document(2, 2, (vm.member(),)), obedient(vm))
    wait_until(lambda: step_of(vm, 2) > 0)


def commit_of(vm: Machine, gen: int) -> int | None:
    with Control.open(vm.run_folder / JOB / str(gen) / "ctl") as control:
        return control.commit.step if control.commit else None


def test_a_failing_metadata_server_causes_no_notice(fake: Fake, machine: Make) -> None:
    vm = machine()
    begin(fake, vm, obedient(vm))
    fake.metadata_status = 503
    wait_until(lambda: "HTTP 503" in vm.log())
    time.sleep(1.5)  # several retries
    assert vm.log().count("HTTP 503") == 1, "each kind of error is said once"
    fake.metadata_status = 200
    fake.instance(vm.uid, vm.name, maintenanceEvent="TERMINATE_ON_HOST_MAINTENANCE")
    fake.wait_fact(vm.uid, Kind.NOTICE)
    assert [kind for kind, _, _ in fake.kinds(vm.uid)].count("notice") == 1


@pytest.mark.parametrize("spooled", [True, False])
def test_a_restarted_agent_adopts_its_job_and_sends_unsent_facts(fake: Fake, machine: Make, spooled: bool) -> None:
    """Killed before its notice reached the spool, it was taken for one that had been said, and never was."""
    vm = machine()
    begin(fake, vm, obedient(vm))
    boot = vm.boot
    fake.function_status = 500
    fake.instance(vm.uid, vm.name, preempted="TRUE")
    wait_until(lambda: '"kind": "notice"' in vm.log())
    vm.kill()
    if not spooled:
        (vm.root / "var/lib/spotkeeper/spool/facts.json").unlink()
    before = step_of(vm, 1)
    wait_until(lambda: step_of(vm, 1) > before + 5)  # the job does not notice
    fake.function_status = 200
    fake.objects.pop(f"jobs/{JOB}/logs/0/1.log", None)
    vm.start()
    notice = fake.wait_fact(vm.uid, Kind.NOTICE, 1)
    wait_until(lambda: '"job.adopt"' in vm.log())
    fake.wait(lambda: b"hello from 0" in fake.objects.get(f"jobs/{JOB}/logs/0/1.log", b""))  # its log goes on as well
    fake.wait(lambda: complete_log(fake.objects, JOB, 0, 1).count("hello from 0") == 1)
    assert vm.boot == boot, "the same boot: no new member"
    assert [fact for fact in fake.kinds(vm.uid) if fact[0] == "notice"] == [("notice", 1, notice.value)]
    vm.serve(document(2, 1, (vm.member(),), DocState.SAVE_STOP, deadline=time.time() + 20), obedient(vm))
    released = fake.wait_fact(vm.uid, Kind.RELEASED, 1)
    assert int(released.value) > before
    assert vm.log().count('"job.start"') == 1


@pytest.mark.parametrize("how", ["empties", "tramples", "replaces", "removes all"])
def test_a_damaged_control_file_ends_neither_job_nor_agent(fake: Fake, machine: Make, how: str) -> None:
    """The agent mapped the file, and died of SIGBUS; the next one found nothing to steer by, and ended the job."""
    vm = machine()
    run = msgspec.structs.replace(obedient(vm, how), source_sha256=source(fake, {"train.py": SPOILS}))
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    doc = document(1, 1, (vm.member(),))
    vm.serve(doc, run)
    wait_until(lambda: '"job.control"' in vm.log())
    fake.instance(vm.uid, vm.name, preempted="TRUE")
    fake.wait_fact(vm.uid, Kind.NOTICE, 1)
    assert vm.agent is not None and vm.agent.poll() is None
    vm.kill()
    vm.start()
    wait_until(lambda: '"job.adopt"' in vm.log())
    assert not {"exit", "released"} & {kind for kind, *_ in fake.kinds(vm.uid)}
    vm.serve(document(2, 1, doc.members, DocState.SAVE_STOP, deadline=time.time() + 20), run)
    fake.wait_fact(vm.uid, Kind.RELEASED, 1)
    assert vm.log().count('"job.start"') == 1 and "job.kill" not in vm.log()
    if how != "removes all":  # nothing is written to a folder that is gone
        fake.wait(
            lambda: b"another program of this job has changed it" in fake.objects.get(f"jobs/{JOB}/logs/0/1.log", b"")
        )


@pytest.mark.parametrize("left", ["nothing", "an older state"])
def test_a_restarted_agent_without_state_adopts_the_launchers_generation(fake: Fake, machine: Make, left: str) -> None:
    """It took the running generation for one to be started, failed to, and ended it as a crash of the job."""
    vm = machine()
    run = obedient(vm)
    begin(fake, vm, run, gen=3)
    vm.kill()
    state = vm.run_folder / "agent.json"
    if left == "nothing":
        state.write_bytes(b"\xff")
    else:  # a full disk kept the newer ones from being written
        state.write_bytes(re.sub(rb'"started":3,"ended":-1', b'"started":2,"ended":2', state.read_bytes()))
        assert b'"ended":2' in state.read_bytes()
    before = step_of(vm, 3)
    vm.start()
    wait_until(lambda: '"job.adopt"' in vm.log())
    wait_until(lambda: step_of(vm, 3) > before + 5)
    vm.serve(document(4, 3, (vm.member(),), DocState.SAVE_STOP, deadline=time.time() + 20), run)
    assert int(fake.wait_fact(vm.uid, Kind.RELEASED, 3).value) > before
    assert not [fact for fact in fake.kinds(vm.uid) if fact[0] == "exit"]
    assert vm.log().count('"job.start"') == 1


def test_a_shutdown_asks_systemd_for_time_to_save_and_report(fake: Fake, machine: Make) -> None:
    """Without the word the unit is killed when its own 25 s are over, and what was saved last is never said."""
    name, said = f"sk-test-{os.getpid()}-stop", queue.SimpleQueue[bytes]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        threading.Thread(target=lambda: [said.put(each) for each in iter(lambda: systemd.recv(4096), b"over")]).start()
        try:
            vm = machine(environ={"NOTIFY_SOCKET": f"@{name}"})
            begin(fake, vm, obedient(vm))
            assert vm.agent is not None
            vm.agent.send_signal(signal.SIGTERM)
            while not (stop := said.get(timeout=30)).startswith(b"STOPPING=1"):
                pass
        finally:
            systemd.sendto(b"over", f"\0{name}")
    extended = re.fullmatch(rb"STOPPING=1\nEXTEND_TIMEOUT_USEC=(\d+)", stop)
    assert extended is not None and 25e6 < int(extended[1]) <= 30e6, stop
    assert int(fake.wait_fact(vm.uid, Kind.RELEASED, 1).value) > 0, "and the job has saved"


def test_a_killed_launcher_is_reported_and_replaced(fake: Fake, machine: Make) -> None:
    vm = machine()
    begin(fake, vm, obedient(vm))
    [launcher] = [json.loads(line)["pid"] for line in vm.log().splitlines() if '"launcher.up"' in line]
    os.kill(launcher, signal.SIGKILL)
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "137"
    left = [command_of(pid) for pid in vm.processes() if b"SPOTKEEPER_GEN=1" in environ_of(pid)]
    assert left == []
    vm.serve(document(2, 2, (vm.member(),)), obedient(vm))
    wait_until(lambda: step_of(vm, 2) > 0)


def test_an_expired_lease_saves_and_powers_off_but_a_short_outage_does_not(fake: Fake, machine: Make) -> None:
    """A minute of virtual time is 1.5 s here; the lease is 2 minutes."""
    scale = 40.0
    vm = machine(clock=f"{time.time()}:{time.time()}:{scale}")
    run = obedient(vm)
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(1, 1, (vm.member(),)), run, lease_minutes=2)
    wait_until(lambda: step_of(vm, 1) > 0)
    fake.function_status = 503
    time.sleep(1.0)  # 40 s of the lease's 120
    fake.function_status = 200
    count = len(fake.syncs)
    fake.wait(lambda: len(fake.syncs) > count)
    assert vm.log().count("save_stop") == 0
    fake.function_status = 503
    assert vm.init is not None
    assert vm.init.wait(20) == -15
    assert '"lease.over"' in vm.log()
    assert commit_of(vm, 1) is not None
    assert vm.agent is not None and vm.agent.wait(20) == 0
    assert vm.processes() == []


def test_a_static_machine_drops_an_ended_job_and_idles(fake: Fake, machine: Make) -> None:
    vm = machine(name="sk-test-steady-s0", clock=f"{time.time()}:{time.time()}:8")
    kept = vm.attach_disk() / JOB / "ckpt" / "1-5"
    kept.mkdir(parents=True)
    fake.reply(vm.uid, SyncReply(Role.IDLE))
    vm.start()
    wait_until(lambda: '"idle"' in vm.log())
    run = obedient(vm)
    vm.serve(document(1, 1, (vm.member(disk=True),)), run, disk=0)
    wait_until(lambda: step_of(vm, 1) > 0)
    fake.reply(vm.uid, SyncReply(Role.SUPERSEDED, JOB, 0, 1))
    dropped = fake.wait_fact(vm.uid, Kind.DROPPED)
    assert dropped.attempt == 1
    fake.reply(vm.uid, SyncReply(Role.IDLE))
    wait_until(lambda: vm.log().count('"now": "idle"') == 2)
    assert [command_of(pid) for pid in vm.processes() if "spotkeeper_agent " not in command_of(pid)] == []
    assert not (vm.root / "mnt/sk-data").exists()
    wait_until(lambda: not (vm.root / "var/lib/spotkeeper/src").exists())  # it lives for months, with many sources
    assert vm.init is not None and vm.init.poll() is None, "a static machine stays on"
    vm.serve(document(1, 1, (vm.member(disk=True),)), run, disk=0)  # another grant, a lower version: all anew
    vm.fake.reply(vm.uid, msgspec.structs.replace(fake.replies[vm.uid], attempt=2))
    wait_until(lambda: vm.log().count('"job.start"') == 2)
    assert kept.is_dir(), "the job held, or went on elsewhere: its checkpoints stay"
    fake.reply(vm.uid, SyncReply(Role.SUPERSEDED, JOB, 0, 2, over=True))
    wait_until(lambda: any(f.kind is Kind.DROPPED and f.attempt == 2 for _, f in fake.facts))
    assert not kept.parents[1].exists(), "it is over: a static machine's disk would fill with the jobs of years"


def test_a_static_machine_deletes_files_of_jobs_that_ended_on_other_machines(fake: Fake, machine: Make) -> None:
    """Only the node that serves a job hears of its end; the disk of one that had served it kept it for ever."""
    vm = machine(name="sk-test-steady-s0", clock=f"{time.time()}:{time.time()}:8")
    disk = vm.attach_disk()
    for folder in ("over2222/ckpt/1-5", "lives222/ckpt/1-5", "datasets/ours"):
        (disk / folder).mkdir(parents=True)
    fake.reply(vm.uid, SyncReply(Role.IDLE))
    vm.start()
    fake.wait_sync(vm.uid)
    run = obedient(vm)
    ended = ("over2222", "datasets", JOB)  # a function that has gone mad
    vm.fake.reply(
        vm.uid, SyncReply(Role.MEMBER, JOB, 0, 1, doc=document(1, 1, (vm.member(True),)), run=run, ended=ended)
    )
    wait_until(lambda: step_of(vm, 1) > 0)
    wait_until(lambda: not (disk / "over2222").exists())
    asked = [said.old_jobs for _, said in fake.syncs if said.old_jobs]
    assert asked == [("lives222", "over2222")], "once, and not of its own job, nor of what is no job's"
    (disk / JOB / "ckpt/1-1").mkdir(parents=True)
    fake.reply(vm.uid, SyncReply(Role.SUPERSEDED, JOB, 0, 1))
    fake.wait_fact(vm.uid, Kind.DROPPED)
    fake.reply(vm.uid, SyncReply(Role.IDLE, ended=(JOB,)))
    wait_until(lambda: vm.log().count('"now": "idle"') == 2)
    assert sorted(path.name for path in disk.iterdir()) == [JOB, "datasets", "lives222"]


def test_machine_going_down_saves_reports_and_ends(fake: Fake, machine: Make) -> None:
    vm = machine()
    begin(fake, vm, obedient(vm))
    assert vm.agent is not None
    assert int((vm.run_folder / "agent.pid").read_text()) == vm.agent.pid
    vm.agent.terminate()
    fake.wait_fact(vm.uid, Kind.NOTICE)
    assert int(fake.wait_fact(vm.uid, Kind.RELEASED, 1).value) > 0
    fake.wait_fact(vm.uid, Kind.FREED)
    assert vm.agent.wait(10) == 0


def test_two_nodes_stop_together_without_a_crash(fake: Fake, machine: Make) -> None:
    """Two machines, one gang. Only one learns of the stop from the document; the other's job stops with it."""
    first = machine()
    second = machine(uid="1002", name=f"sk-test-{JOB}-n0001-a1", node=1, address="127.0.1.2")
    run = JobRun("job", ("train.py",), source(fake, {"train.py": GANG}), env=NO_DYNAMO)
    for vm in (first, second):
        vm.stand_by(run)
        vm.start()
        fake.wait_sync(vm.uid)
    doc = document(1, 1, (first.member(), second.member()))
    for vm in (first, second):
        vm.serve(doc, run)
    wait_until(lambda: min(step_of(first, 1), step_of(second, 1)) > 2, 60)
    stop = document(2, 1, doc.members, DocState.SAVE_STOP, port=doc.port, deadline=time.time() + 20)
    second.serve(stop, run)
    steps = {fake.wait_fact(vm.uid, Kind.RELEASED, 1).value for vm in (first, second)}
    assert len(steps) == 1
    assert all(kind != "exit" for vm in (first, second) for kind, _, _ in fake.kinds(vm.uid))


def test_a_machine_joins_even_if_its_launcher_cannot_start(fake: Fake, machine: Make) -> None:
    """The job's fault, so its crash budget decides: the machine joins, and the generation ends with an exit."""
    vm = machine()
    vm.start()
    fake.wait_sync(vm.uid)
    run = msgspec.structs.replace(obedient(vm), python="no-such-python")
    vm.stand_by(run)
    fake.wait_fact(vm.uid, Kind.HELLO)
    vm.serve(document(1, 1, (vm.member(),)), run)
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "1"
    fake.wait(lambda: b"no-such-python" in fake.objects.get(f"jobs/{JOB}/logs/0/1.log", b""))


def test_agent_killed_while_warming_up_still_says_hello(fake: Fake, machine: Make) -> None:
    vm = machine()
    vm.start()
    fake.wait_sync(vm.uid)
    run = msgspec.structs.replace(obedient(vm), source_sha256="0" * 64)  # cannot be fetched, so it never gets warm
    vm.stand_by(run)
    wait_until(lambda: '"source.trouble"' in vm.log())
    vm.kill()
    assert fake.kinds(vm.uid) == []
    vm.stand_by(obedient(vm))
    vm.start()
    fake.wait_fact(vm.uid, Kind.HELLO)


def test_an_unmountable_disk_is_reported_and_never_formatted(fake: Fake, machine: Make) -> None:
    vm = machine()
    disk = vm.attach_disk()
    device = vm.root / "dev/disk/by-id/google-sk-data"
    device.unlink()
    disk.rmdir()
    content = b"somebody's data" * 100_000
    device.write_bytes(content)
    run = obedient(vm)
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(1, 1, (vm.member(disk=True),)), run, disk=3)
    told = fake.wait_fact(vm.uid, Kind.NO_DISK)
    assert told.value in ("3-foreign", "3-probe"), "the second where there is no blkid"
    assert device.read_bytes() == content
    assert step_of(vm, 1) == 0, "it does not train without the disk that it was given"
    device.unlink()
    vm.attach_disk()  # somebody has repaired it: it was tried all the time
    assert fake.wait_fact(vm.uid, Kind.ATTACHED).value == "3"
    wait_until(lambda: step_of(vm, 1) > 0)


def test_a_disk_that_never_appears_is_reported(fake: Fake, machine: Make) -> None:
    """The document says that it is attached, so the cloud has shown it; a minute is enough for a device."""
    vm = machine(clock=f"{time.time()}:{time.time()}:20")
    run = obedient(vm)
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(1, 1, (vm.member(),)), run, disk=7)  # not attached yet: no fault
    wait_until(lambda: step_of(vm, 1) > 5)
    assert Kind.NO_DISK.value not in [kind for kind, _, _ in fake.kinds(vm.uid)]
    vm.serve(document(2, 2, (vm.member(disk=True),)), run, disk=7)
    assert fake.wait_fact(vm.uid, Kind.NO_DISK).value == "7-missing"


def test_a_rebooted_static_machine_drops_its_earlier_grant(fake: Fake, machine: Make) -> None:
    """Its memory is gone with the boot; only its word releases the grant, and nobody else can give it."""
    vm = machine(name="sk-test-steady-s0", clock=f"{time.time()}:{time.time()}:8")
    fake.reply(vm.uid, SyncReply(Role.SUPERSEDED, JOB, 0, 4))
    vm.start()
    assert fake.wait_fact(vm.uid, Kind.DROPPED).attempt == 4
    fake.reply(vm.uid, SyncReply(Role.IDLE))
    wait_until(lambda: '"now": "idle"' in vm.log())
    assert vm.init is not None and vm.init.poll() is None, "a static machine stays on"
