"""What a job can write of its agent's, and what it can do to it there: with real user ids, so root alone can run it.

The agent and the jobs are two users, as their units have it: the agent is in the jobs' group beside its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotkeeper.train.core import beneath
from tests.agent.fakes import REPO

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users, neither of whom is the other")

AGENT, JOB = 47001, 47002  # nobody's, on any machine
BEGIN = f"""
import io, json, os, sys, tarfile, hashlib
from pathlib import Path
from types import SimpleNamespace
os.environ["SPOTKEEPER_UNITS"] = "1"
from spotkeeper_agent.job import jobhost
jobhost.grp = SimpleNamespace(getgrnam=lambda name: SimpleNamespace(gr_gid={JOB}))
os.umask(0o002)  # as bad as a unit can say
root = Path(sys.argv[1])
run, disk, state = root / "run", root / "disk", root / "state"
"""
MAKE = """
from spotkeeper.train.agent_link.control import Control
from spotkeeper_agent.job import logs, outputs as output, source, supervisor
from spotkeeper_agent.host import mounting
from spotkeeper_agent.core import settings
from spotkeeper_agent.agent import upgrade
os.umask(0o022)  # as the agent itself begins
settings.Path(run / "node").mkdir(parents=True)
jobhost.share(run / "node")
(run / "agent.json").write_text("{}")
folder = run / "job22222" / "1"
supervisor._make_anew(folder)
Control.create(folder / "ctl").close()
for path in (folder / "ctl", folder / "logs", folder):
    jobhost.share(path)
disk.mkdir()
mounting.make_job_folders(disk, "job22222")
made = io.BytesIO()
with tarfile.open(fileobj=made, mode="w") as tar:
    for name in ("site/spotkeeper/__init__.py", "job/spotkeeper/x.py"):
        info = tarfile.TarInfo(name)
        info.size, info.mode = 1, 0o666
        tar.addfile(info, io.BytesIO(b"#"))
data = made.getvalue()
sha256 = hashlib.sha256(data).hexdigest()
bucket = SimpleNamespace(read=lambda name: [data])
bundles = upgrade.Bundles(state / "bundle", state / "bundle" / ("0" * 64))
bundle = bundles.fetch(bucket, sha256)
upgrade.check_own(bundle)
source.fetch(bucket, "job22222", sha256, state / "src")
print(bundle)
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A machine's folders; not below pytest's own, which no other user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="sk-shared-"))
    os.chown(folder, AGENT, AGENT)
    folder.chmod(0o755)
    yield folder
    assert beneath.remove(folder.parent, folder.name)


# All that is needed is imported first: another user may not reach the interpreter's own folder.
DROP = """
import encodings.idna, grp, hashlib, io, json, os, random, socket, sys, tarfile
from spotkeeper.train.core import beneath
from spotkeeper.train.agent_link import control
from spotkeeper.train.checkpoint import store
from spotkeeper_agent.preflight import checks
from spotkeeper_agent.job import failures
from spotkeeper_agent.job import jobhost
from spotkeeper_agent.job import launcher_client as launch
from spotkeeper_agent.job import logs
from spotkeeper_agent.job import mirror_transfer as mirror_up
from spotkeeper_agent.job import outputs as output
from spotkeeper_agent.job import failures
from spotkeeper_agent.agent import hang
from spotkeeper_agent.host import mounting
from spotkeeper_agent.core import settings
from spotkeeper_agent.job import source, supervisor
from spotkeeper_agent.agent import upgrade
from spotkeeper_agent.launcher import pyenv
user, groups, code = int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
os.setgroups(groups)
os.setresgid(user, user, user)
os.setresuid(user, user, user)
exec(code)
"""


def run(user: int, groups: list[int], code: str, root: Path) -> str:
    env = {"PYTHONPATH": f"{REPO / 'agent'}:{REPO}:{sysconfig.get_path('purelib')}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", DROP, str(root), str(user), json.dumps(groups), code],
        env=env, capture_output=True, text=True, timeout=60, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def as_agent(code: str, root: Path) -> str:
    return run(AGENT, [JOB], BEGIN + code, root)


def as_job(code: str, root: Path) -> str:
    return run(JOB, [], "from pathlib import Path\nos.umask(0o002)\nroot = Path(sys.argv[1])\n" + code, root)


def test_a_job_can_write_only_its_own_folders(root: Path) -> None:
    bundle = as_agent(MAKE, root)
    writable = as_job(
        "for path in (root, *sorted(root.rglob('*'))):\n    if os.access(path, os.W_OK): print(path.relative_to(root))",
        root,
    ).splitlines()
    source = next(path for path in (root / "state/src").iterdir()).relative_to(root).as_posix()
    assert set(writable) == {
        "run/node", "run/job22222/1", "run/job22222/1/ctl", "run/job22222/1/logs",
        "disk/job22222/ckpt", "disk/job22222/out", "disk/job22222/env",
        source, f"{source}/job", f"{source}/job/spotkeeper", f"{source}/job/spotkeeper/x.py",
        f"{source}/site", f"{source}/site/spotkeeper", f"{source}/site/spotkeeper/__init__.py",
    }  # fmt: skip
    assert bundle.startswith(str(root / "state/bundle"))


@pytest.mark.parametrize("where", ["site/spotkeeper", "site/spotkeeper/__init__.py", ".", ".."])
def test_an_agent_that_others_can_write_is_not_executed(root: Path, where: str) -> None:
    bundle = Path(as_agent(MAKE, root))
    said = as_agent(
        f"from spotkeeper_agent.agent.upgrade import check_own\npath = Path({str(bundle / where)!r})\n"
        "path.chmod(path.stat().st_mode | 0o020)\n"
        f"try:\n    check_own(Path({str(bundle)!r}))\nexcept PermissionError as error: print(error)",
        root,
    )
    assert "other users than the agent can write it" in said
    os.chown(bundle / "site", JOB, AGENT)
    (bundle / where).chmod(0o755)
    said = as_agent(
        f"from spotkeeper_agent.agent.upgrade import check_own\n"
        f"try:\n    check_own(Path({str(bundle)!r}))\nexcept PermissionError as error: print(error)",
        root,
    )
    assert f"user {JOB}" in said


ATTACK = """
run, disk, state = root / "run", root / "disk", root / "state"
folder, ckpt, out = run / "job22222/1", disk / "job22222/ckpt", disk / "job22222/out"
for name in ("result.json", "exit.0", "error.0", "pid.0", "stacks.json", "stacks.log", "torchrun.log"):
    os.mkfifo(folder / name)
(folder / "exit.1").symlink_to("/dev/zero")
(folder / "error.1").write_text("[" * 60_000)
(folder / "error.2").symlink_to(state / "secret")
(folder / "ctl").unlink()
(folder / "ctl").symlink_to(state / "secret")
(folder / "logs").rename(folder / "was-logs")
(folder / "logs").symlink_to(state)
(ckpt / "quarantine").symlink_to(state)
(ckpt / "1-5").symlink_to(state)
(ckpt / "1-6").mkdir()
os.mkfifo(ckpt / "1-6/COMMIT")
(ckpt / "1-7").mkdir()
with (ckpt / "1-7/COMMIT").open("wb") as file:
    file.write(b"[" * 200_000)
(ckpt / "1-8").mkdir()
with (ckpt / "1-8/COMMIT").open("wb") as file:
    file.truncate(1 << 40)
(ckpt / ".fetch").symlink_to(state)
(out / "a").write_text("a")
(out / "good").symlink_to("a")
(out / "evil").symlink_to(state / "secret")
os.mkfifo(out / "pipe")
os.mkfifo(run / "node/launcher.log")
(run / "node/environment.building").mkdir()
(run / "node/environment.disk").symlink_to(state / "secret")
full = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
full.bind(str(run / "node/saver.sock"))
full.listen(0)
first = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
first.connect(str(run / "node/saver.sock"))
os.chdir(folder)
for _ in range(2000):
    os.mkdir("d")
    os.chdir("d")
"""
USE = """
from spotkeeper.train.core import beneath
from spotkeeper.train.checkpoint import store
from spotkeeper.train.agent_link import control
from spotkeeper.train.agent_link.control import Commit, Control, read_result
from spotkeeper_agent.preflight import checks
from spotkeeper_agent.job import failures
from spotkeeper_agent.job import launcher_client as launch
from spotkeeper_agent.job import logs
from spotkeeper_agent.job import mirror_transfer as mirror_up
from spotkeeper_agent.job import outputs as output
from spotkeeper_agent.job import failures
from spotkeeper_agent.job import supervisor
from spotkeeper_agent.agent import hang
from spotkeeper_agent.launcher import pyenv
from spotkeeper_agent.core.log import Log
folder, ckpt, out = run / "job22222/1", disk / "job22222/ckpt", disk / "job22222/out"
said = {}
said["result"] = read_result(folder)
said["codes"] = failures.exit_codes(folder)
said["first"] = failures.first(folder)
said["pids"] = sorted(failures.worker_pids(folder))
said["places"] = str(hang.read_places(folder / "stacks.json", may_work=True)[0].value)
said["untimed"] = control.in_untimed_section(folder)
said["hardware"] = failures.of_crash(folder, root)
said["logs"] = logs.collect(folder).decode()
logs.trim(folder)
held = Control.hold(folder / "ctl")
held.request(1)
said["trouble"] = bool(held.trouble())
held.close()
tell = supervisor.Supervisor(run, root, SimpleNamespace(folder=run / "node", pid=0), Log(write=lambda line: None))
tell._warn(SimpleNamespace(folder=folder), "words")
said["newest"] = store.newest(ckpt, hashes=False).commit
said["skipped"] = len(store.newest(ckpt).skipped)
said["damaged"] = [str(commit) for commit in store.damaged(ckpt, None)]
for commit in (Commit(1, 5), Commit(1, 6)):
    try:
        mirror_up.Source(ckpt, commit, 0, replicated=True)
    except (OSError, ValueError) as error:
        pass
try:
    store.quarantine(ckpt, Commit(1, 6))
except OSError:
    said["quarantined"] = False
checks.newest_checkpoint(disk), checks.newest_checkpoint(ckpt)
found, left_out = output.find((out,))
said["output"] = [each.path for each in found]
said["left out"] = left_out
said["saver"] = launch.saver_pid(run / "node")
said["words"] = launch.tail(run / "node", "launcher.log", 100).decode()
beneath.remove(run / "node", pyenv.BUILDING)
beneath.replace(run / "node", pyenv.DISK, b"/disk")
supervisor._make_anew(folder)
said["anew"] = sorted(path.name for path in folder.iterdir())
said["left"] = [path.name for path in folder.parent.iterdir()]
print(json.dumps(said))
"""


def test_a_jobs_links_and_pipes_do_not_reach_or_block_the_agent(root: Path) -> None:
    """Every trap that a file can be, in every place where the agent looks below a job's folders."""
    as_agent(MAKE, root)
    (root / "state/secret").write_text("SECRET")
    shutil.copy(root / "state/secret", root / "state/stdout.log")
    for path in (root / "state/secret", root / "state/stdout.log"):
        os.chown(path, AGENT, AGENT)
        path.chmod(0o600)
    before = {path: path.read_bytes() for path in (root / "state").rglob("*") if path.is_file()}
    as_job(ATTACK, root)
    said = json.loads(as_agent(USE, root))
    assert said == {
        "result": None, "codes": [], "first": None, "pids": [], "places": "unknown", "untimed": False, "hardware": None,
        "logs": "", "trouble": True, "newest": None, "skipped": 4, "damaged": ["1-8", "1-7", "1-6"],
        "quarantined": False, "output": ["a", "good"],
        "left out": ["evil: a link out of the folder", "pipe: not a regular file"],
        "saver": None, "words": "", "anew": ["logs"], "left": ["1"],
    }  # fmt: skip
    assert {path: path.read_bytes() for path in (root / "state").rglob("*") if path.is_file()} == before


def test_a_file_that_becomes_a_link_before_it_is_sent_is_not_opened(root: Path) -> None:
    as_agent(MAKE, root)
    (root / "state/secret").write_text("SECRET")
    os.chown(root / "state/secret", AGENT, AGENT)
    out = root / "disk/job22222/out"
    as_job(f"Path({str(out)!r}, 'a').write_text('a')", root)
    said = as_agent(
        "from spotkeeper_agent.job import outputs as output\n"
        f"found, _ = output.find((Path({str(out)!r}),))\n"
        f"os.unlink({str(out / 'a')!r}); os.symlink(root / 'state/secret', {str(out / 'a')!r})\n"
        "try:\n    output.OutputUpload(None, 'job22222', 0, 1, ())._keep(found[0])\n"
        "except OSError as error: print(error)",
        root,
    )
    assert "Too many levels of symbolic links" in said
