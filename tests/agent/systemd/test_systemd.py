"""The units on a real systemd: the rendered startup script, the real agent, a disk, a job, an upgrade, a power-off.

One machine for the whole file: its boot takes seconds. Skipped where no such machine can be had.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Role, SyncReply
from tests.agent.fakes import JOB, wait_until
from tests.agent.systemd import box as boxes
from tests.agent.systemd.stage import PYTHON, UID, Stage, another

pytestmark = pytest.mark.skipif(bool(boxes.why_not()), reason=boxes.why_not() or "")

REACH = """
import socket, sys
host, port, kind = sys.argv[1:]
family = socket.AF_INET6 if ":" in host else socket.AF_INET
with socket.socket(family, getattr(socket, "SOCK_" + kind)) as sock:
    sock.settimeout(3)
    print(sock.connect_ex((host, int(port))))
"""


def test_agent_and_job_run_as_different_unprivileged_users(stage: Stage) -> None:
    stage.cloud.wait_sync(UID)
    for unit in ("spotkeeper", "spotkeeper-root", "spotkeeper-job"):
        wait_until(lambda: stage.box.show(unit, "ActiveState") == "active")  # noqa: B023 - waited for at once
    agent = stage.box.show("spotkeeper", "MainPID")
    status = stage.box.run(f"cat /proc/{agent}/status").stdout
    assert "CapEff:\t0000000400000000" in status, "reading the kernel's log, and nothing else"
    assert "NoNewPrivs:\t1" in status
    host = stage.box.show("spotkeeper-job", "MainPID")
    owners = stage.box.run(f"stat -c %U /proc/{host} /proc/{host}/mem").stdout.split()
    assert owners == ["spotkeeper-job", "root"], "its own user cannot look into it"
    socket = "/run/spotkeeper-job /run/spotkeeper-job/host.sock"
    assert stage.box.run(f"stat -c '%U %a' {socket}").stdout == "root 755\nspotkeeper 600\n"


def test_only_system_services_reach_the_metadata_server(stage: Stage) -> None:
    stage.box.write("/opt/reach.py", REACH)
    refused, nobody, reached = 1, 111, 0  # EPERM; ECONNREFUSED: it was asked

    def reach(user: str, host: str, port: int, kind: str = "STREAM") -> int:
        return int(stage.box.run(f"{PYTHON} /opt/reach.py {host} {port} {kind}", user=user).stdout)

    # The jobs' user, a person, and whom a job could be by subordinate ids, wherever their processes are.
    for user in ("spotkeeper-job", "1000", "100000", "nobody"):
        for host, port, expected in (
            ("169.254.169.254", 80, refused), ("169.254.169.254", 443, refused), ("169.254.169.254", 53, nobody),
            ("::ffff:169.254.169.254", 80, refused), ("fd20:ce::254", 80, refused), ("fd00:ec2::254", 80, refused),
            ("127.0.0.1", 9, nobody),
        ):  # fmt: skip
            assert reach(user, host, port) == expected, (user, host, port)
        assert reach(user, "169.254.169.254", 53, "DGRAM") == reached, "its name server is there"
    for user in ("root", "spotkeeper", "messagebus"):
        assert reach(user, "169.254.169.254", 80) == reached, user


def test_root_follows_no_link_of_the_agent(stage: Stage) -> None:
    """A link in place of the bundles' folder: the boot fails, as the agent, and what it leads to stays root's."""
    box, bundles = stage.box, "/var/lib/spotkeeper/bundle"
    box.run("mkdir -p /opt/of-root/inner; touch /opt/of-root/inner/file")
    box.run(f"mv {bundles} {bundles}.aside; ln -s /opt/of-root/inner {bundles}", user="spotkeeper")
    done = box.run("/opt/startup.sh", check=False)
    assert done.returncode != 0
    assert "Permission denied" in done.stderr
    assert box.run("stat -c %U /opt/of-root /opt/of-root/inner /opt/of-root/inner/*").stdout.split() == ["root"] * 3
    box.run(f"rm {bundles}; mv {bundles}.aside {bundles}", user="spotkeeper")
    assert box.run("/opt/startup.sh").returncode == 0, "once it has gone, the next boot is as any"
    stage.cloud.wait_sync(UID)


def test_the_root_helper_serves_only_the_agent(stage: Stage, tmp_path: Path) -> None:
    ask = (
        "import json, socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect('/run/spotkeeper-root/socket')\ns.send(sys.argv[1].encode())\nprint(s.recv(4096).decode())\n"
    )
    stage.box.write("/opt/ask.py", ask)
    refused = stage.box.run(f"{PYTHON} /opt/ask.py '{{}}'", user="spotkeeper-job", check=False)
    assert "PermissionError" in refused.stderr
    wrong = json.loads(stage.box.run(f'{PYTHON} /opt/ask.py \'{{"op": "shell"}}\'', user="spotkeeper").stdout)
    known = "`op` must be mount, scratch, unmount, power-off or restart-jobs"
    assert wrong == {"ok": False, "why": "request", "error": known}


def test_a_job_trains_on_the_disk_and_outlives_its_agent(stage: Stage, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(1200 << 20)
    stage.run = replace(stage.run, scratch_gb=1)
    stage.box.run("mount -o remount,rw /sys")  # as on a machine
    with boxes.block_device(stage.box, image, "google-sk-data"):
        stage.cloud.reply(UID, SyncReply(Role.STANDBY, JOB, 0, 1, run=stage.run, disk=0))
        stage.cloud.wait_fact(UID, Kind.ATTACHED, timeout_s=20)
        assert stage.box.run("stat -c '%U %G %a' /mnt/sk-data").stdout == "spotkeeper spotkeeper-job 755\n"
        stage.cloud.wait_fact(UID, Kind.HELLO, timeout_s=20)
        stage.train(1, 1, disk=True)
        worker = stage.running(1)
        assert stage.box.run(f"stat -c %U /proc/{worker}").stdout == "spotkeeper-job\n"
        assert "SPOTKEEPER_SCRATCH=/mnt/sk-scratch" in stage.box.run(f"tr '\\0' '\\n' </proc/{worker}/environ").stdout
        # The job fills its scratch folder: as much is left for checkpoints as before.
        in_job = f"nsenter -t {worker} -m setpriv --reuid=spotkeeper-job --regid=spotkeeper-job --clear-groups"
        df = "df -k --output=avail /mnt/sk-data | tail -1"
        left = int(stage.box.run(df).stdout)
        trim = stage.box.run("fstrim /mnt/sk-scratch", check=False)
        assert "not supported" in trim.stderr and int(stage.box.run(df).stdout) <= left, "the volume keeps its blocks"
        stage.box.run(f"{in_job} fallocate -l 900M /mnt/sk-scratch/most")
        fill = stage.box.run(f"{in_job} fallocate -l 900M /mnt/sk-scratch/more", check=False)
        assert "No space left on device" in fill.stderr
        assert int(stage.box.run(df).stdout) > left - (16 << 10), "checkpoints, at most"
        for attack in ("rm -f /mnt/sk-data/*/scratch.ext4", f"dd if=/mnt/sk-data/{JOB}/scratch.ext4 of=/dev/null"):
            assert stage.box.run(f"{in_job} sh -c '{attack}'", check=False).returncode
        agent = stage.box.show("spotkeeper", "MainPID")
        stage.box.run("systemctl restart spotkeeper")
        assert stage.box.show("spotkeeper", "MainPID") != agent
        wait_until(lambda: "job.adopt" in stage.log())
        assert stage.worker(1) == worker, "an agent's restart is no affair of the job's"
        # The stack's agents are another bundle from now on.
        other = another(stage.cloud.objects[f"bundles/{stage.bundle}.tar"])
        stage.bundle = hashlib.sha256(other).hexdigest()
        stage.cloud.objects[f"bundles/{stage.bundle}.tar"] = other
        agent = stage.box.show("spotkeeper", "MainPID")
        stage.train(1, 1, disk=True)
        current = "readlink /var/lib/spotkeeper/bundle/current"
        wait_until(lambda: stage.bundle in stage.box.run(current).stdout)
        assert stage.bundle in stage.box.run(f"tr '\\0' '\\n' </proc/{agent}/environ").stdout, "the same process"
        assert stage.worker(1) == worker, "nor is an upgrade"
        # Another generation: the group of the first one ends, and nothing else.
        host = stage.box.show("spotkeeper-job", "MainPID")
        stage.train(2, 2, disk=True)
        stage.running(2)
        assert not stage.worker(1)
        assert stage.box.show("spotkeeper-job", "MainPID") == host
        # The machine goes down while it trains: the agent goes first, has the job save, and lets go of the disk.
        stage.box.run(f'{PYTHON} /opt/ask.py \'{{"op": "power-off"}}\'', user="spotkeeper")
        released = stage.cloud.wait_fact(UID, Kind.RELEASED, 2, timeout_s=25)
        assert int(released.value) > 0, "the step of the save that the shutdown asked for"
        stage.cloud.wait_fact(UID, Kind.FREED, timeout_s=25)
        wait_until(stage.box.ended, 30)
