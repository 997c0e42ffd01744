"""One job that tries all of it: to be its machine, to stay, to read who comes after it. On a machine as images are.

logind, D-Bus and polkit run, as they do on most images: they are what starts processes for whoever asks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.contract.generation import JobRun, Role, SyncReply
from tests.agent.fakes import JOB, wait_until
from tests.agent.jobs import OBEDIENT
from tests.agent.systemd import box as boxes
from tests.agent.systemd import hostile
from tests.agent.systemd.stage import PYTHON, UID, Stage, another

WHY_NOT = boxes.why_not() or boxes.why_no_logins()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
OTHER = "bcdefghi"  # another job, which comes after
HIDDEN = f"ps -eo args --no-headers | grep -c '^{hostile.NAME}'"


@dataclass
class Attacked:
    stage: Stage
    job: JobRun

    def train(self, gen: int) -> dict[str, Any]:
        """Have this generation run; what it has tried, once it has."""
        self.stage.train(gen, gen, disk=False, run=self.job)
        return self.found(gen)

    def found(self, gen: int) -> dict[str, Any]:
        path = self.stage.box.path(f"/run/spotkeeper/{JOB}/{gen}/attacks.json")
        try:
            wait_until(lambda: path.exists() and path.read_text())
        except AssertionError as error:
            logs = f"cat /run/spotkeeper/{JOB}/{gen}/torchrun.log"
            raise AssertionError(f"{error}: {self.stage.log()}{self.run(logs)}") from None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def run(self, script: str, user: str = "") -> str:
        return self.stage.box.run(script, user=user, check=False).stdout.strip()


@pytest.fixture(scope="module")
def attacked(stage: Stage) -> Attacked:
    """The first generation has done what it could, and still runs."""
    box = stage.box
    box.run("systemctl start systemd-logind polkit; echo spotkeeper-job:100000:65536 | tee /etc/subuid >/etc/subgid")
    for service in ("dbus", "systemd-logind", "polkit"):
        assert box.show(service, "ActiveState") == "active", service
    text = Path(hostile.__file__).read_text()
    box.write("/opt/hostile.py", text)
    stage.cloud.wait_sync(UID)
    one = Attacked(stage, stage.job({"train.py": text}, "train.py"))
    one.train(1)
    return one


def test_a_job_gets_no_machine_token_and_writes_no_agent_file(attacked: Attacked) -> None:
    assert attacked.found(1)["got"] == {}


def test_a_job_can_neither_hang_nor_replace_its_agent(attacked: Attacked) -> None:
    """Its traps lie wherever the agent looks; the agent becomes another meanwhile, and that one is as much its own."""
    stage = attacked.stage
    agent, saved = stage.box.show("spotkeeper", "MainPID"), attacked.run("cat /run/spotkeeper/agent.json")
    code = another(stage.cloud.objects[f"bundles/{stage.bundle}.tar"])
    stage.bundle = hashlib.sha256(code).hexdigest()
    stage.cloud.objects[f"bundles/{stage.bundle}.tar"] = code
    attacked.train(1)
    wait_until(lambda: stage.bundle in attacked.run("readlink /var/lib/spotkeeper/bundle/current"), 30)
    assert stage.box.show("spotkeeper", "MainPID") == agent and stage.box.show("spotkeeper", "NRestarts") == "0"
    assert attacked.run("find /var/lib/spotkeeper/bundle ! -type l -writable", user="spotkeeper-job") == ""
    assert attacked.run("cat /run/spotkeeper/agent.json") == saved


def test_a_process_outside_the_jobs_unit_gets_no_token_either(attacked: Attacked) -> None:
    """Where systemd or another service could be talked into starting something for its user."""
    assert attacked.run(hostile.FETCH), "it is there"
    got = json.loads(attacked.run(f"{PYTHON} /opt/hostile.py try", user="spotkeeper-job"))
    assert {name: text for name, text in got.items() if name.startswith("token")} == {}


def test_systemd_starts_nothing_else_for_the_jobs_user(attacked: Attacked) -> None:
    uid = attacked.run("id -u spotkeeper-job")
    assert attacked.run(f"systemctl is-enabled user@{uid} user-runtime-dir@{uid}").split() == ["masked", "masked"]
    assert attacked.run(f"loginctl enable-linger spotkeeper-job; sleep 1; systemctl is-active user@{uid}") == "inactive"


def test_no_job_process_outlives_its_generation(attacked: Attacked) -> None:
    """In groups of their own, and among the agent's programs: whether the launcher ends them, or has been killed."""
    host = attacked.stage.box.show("spotkeeper-job", "MainPID")
    assert attacked.found(1)["hidden"] == 5
    assert attacked.run(HIDDEN) == "5"
    assert attacked.train(2)["hidden"] == 5
    wait_until(lambda: '"job.end", "gen": 2' in attacked.stage.log())
    assert attacked.run(HIDDEN) == "0"
    assert attacked.stage.box.show("spotkeeper-job", "MainPID") == host, "the unit goes on"


def test_systemd_ends_what_the_jobs_unit_cannot(attacked: Attacked) -> None:
    """A cgroup's files belong to who made it, and may be spoilt: then the unit ends."""
    host = attacked.stage.box.show("spotkeeper-job", "MainPID")
    assert attacked.train(3)["hidden"] == 1
    wait_until(lambda: attacked.stage.box.show("spotkeeper-job", "MainPID") not in ("0", host))
    assert attacked.run(HIDDEN) == "0"
    assert attacked.train(4) == {"got": {}, "hidden": 0}


def test_the_next_job_finds_nothing_of_an_attacker(attacked: Attacked) -> None:
    stage, trace = attacked.stage, hostile.TRACE
    find = f"find /tmp /var/tmp /dev/shm /var/lib/spotkeeper-job -name '{trace}*' | sort"
    assert len(attacked.run(find).split()) == 5, "so far its own generations have found it"
    attacked.run("systemctl restart spotkeeper")
    assert len(attacked.run(find).split()) == 5, "and an agent's restart takes nothing from them"
    host = stage.box.show("spotkeeper-job", "MainPID")
    stage.cloud.reply(UID, SyncReply(Role.IDLE))
    wait_until(lambda: stage.box.show("spotkeeper-job", "MainPID") not in ("0", host))
    wait_until(lambda: attacked.run(find) == "")
    stage.train(1, 1, disk=False, job=OTHER, run=stage.job({"train.py": OBEDIENT}, "train.py", job=OTHER))
    worker = stage.running(1)
    home = attacked.run(f"tr '\\0' '\\n' </proc/{worker}/environ | sed -n s/^HOME=//p")
    assert home == f"/var/lib/spotkeeper-job/{OTHER}"
    assert attacked.run("ls /var/lib/spotkeeper-job") == OTHER
    wait_until(lambda: attacked.run("pgrep -u spotkeeper-job -f 'saver.py --socket'"))
    logs = attacked.run("stat -c '%F %U' /run/spotkeeper/node/saver.log /run/spotkeeper/node/launcher.log")
    assert set(logs.splitlines()) <= {"regular file spotkeeper-job", "regular empty file spotkeeper-job"}


def test_a_stopped_jobs_unit_is_restarted(attacked: Attacked) -> None:
    """It may send signals to it, for both are one user: then root restarts the unit, and the next job trains."""
    stage = attacked.stage
    host = stage.box.show("spotkeeper-job", "MainPID")
    attacked.run(f"kill -STOP {host}", user="spotkeeper-job")
    wait_until(lambda: "(stopped)" in attacked.run(f"cat /proc/{host}/status"))
    stage.cloud.reply(UID, SyncReply(Role.IDLE))
    wait_until(lambda: stage.box.show("spotkeeper-job", "MainPID") not in ("0", host))
    stage.train(5, 5, disk=False, run=stage.job({"train.py": OBEDIENT}, "train.py"))
    stage.running(5)
