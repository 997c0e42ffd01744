"""The process that carries a worker's output: somebody kills it, and the job goes on and its log with it."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from spotkeeper_agent.core import settings
from spotkeeper_agent.launcher import output, spool
from tests.agent.chunks import unpacked
from tests.agent.fakes import wait_until

ROOT = Path(__file__).parents[3]

WORKER = """
import os, signal, sys
from pathlib import Path
from spotkeeper_agent.launcher import output
from spotkeeper_agent.launcher.process import become_subreaper
from tests.agent.fakes import alive, children_of, wait_until

def output_worker():
    parents = [child for child in children_of(os.getpid()) if output.is_output_worker(child)]
    return next((child for parent in parents for child in children_of(parent)), None)

become_subreaper()  # as the launcher, which inherits the output worker
output.bound()
log = Path(sys.argv[1])
for number in range(3):
    victim = wait_until(output_worker)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not alive(victim))
    print("line", number, "x" * 100_000, flush=True)  # more than a pipe holds
    wait_until(lambda: log.read_text().count("x\\n") == number + 1)  # a killed output worker loses what it holds
print("the last line", flush=True)
"""


def test_a_line_reaches_the_spool_soon_though_its_log_file_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "FLUSH_S", 0.0)
    read, write = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    arguments = ({read: (full, b"o")}, output.KEPT_BYTES, spool.Spool(tmp_path, b"0", []))
    copying = threading.Thread(target=output._copy, args=arguments, daemon=True)
    copying.start()
    os.write(write, b"a line\n")
    try:
        (file,) = wait_until(lambda: list(tmp_path.glob("*.gz")), 10)
    finally:
        os.close(write)
        copying.join(10)
        os.close(read)
        os.close(full)
    assert unpacked(file.read_bytes()).endswith(b" 0o a line\n")


def test_the_pipe_is_read_before_the_log_is_written_and_no_byte_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that printed more than its pipe takes waited until the log file had it."""
    monkeypatch.setattr(output, "_HELD_BYTES", 4 * output._PIECE)
    read, write = os.pipe()
    printed = b"".join(b"line %06d\n" % number for number in range(6 * output._PIECE // 12))
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 8 * output._PIECE)
    os.write(write, printed)
    os.close(write)
    in_pipe: list[int] = []
    write_all = os.write

    def watched(fd: int, piece: bytes) -> int:
        in_pipe.append(struct.unpack("i", fcntl.ioctl(read, termios.FIONREAD, bytes(4)))[0])
        return write_all(fd, piece)

    monkeypatch.setattr(os, "write", watched)
    log = tmp_path / "log"
    with log.open("wb") as file:
        output._copy({read: (file.fileno(), b"o")}, output.KEPT_BYTES, None)
    os.close(read)
    assert in_pipe[0] == len(printed) - 4 * output._PIECE  # as much as may be held was read first
    assert log.read_bytes() == printed


def test_the_end_of_a_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\nsecond\n")
    assert [output.tail(log, size) for size in (13, 12, 3)] == [b"first\nsecond\n", b"second\n", b"nd\n"]


def test_an_output_worker_that_is_killed_is_replaced_and_no_print_fails(tmp_path: Path) -> None:
    """Each print raised BrokenPipeError, and the job had crashed."""
    log, there = tmp_path / "log", tmp_path / "spool"
    there.mkdir()
    secret = {"TOKEN": "the last", spool.SECRETS: "TOKEN"}
    env = os.environ | {"PYTHONPATH": f"{settings.job_path()}:{ROOT}", spool.FOLDER: str(there), **secret}
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(log)],
            stdout=out,
            stderr=subprocess.PIPE,
            env=env,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    wait_until(lambda: log.read_text().endswith("the last line\n"))
    lines = log.read_text().splitlines()
    assert [line[:6] for line in lines] == ["line 0", "line 1", "line 2", "the la"]
    assert all(len(line) == len("line 0 ") + 100_000 for line in lines[:3])
    wait_until(lambda: "0o ******** line" in spooled(there))
    said = [line for line in spooled(there) if line.startswith("n ")]
    assert said == ["n the output worker was killed: up to a second of output is missing here"] * 3


FULL = """
import sys
from spotkeeper_agent.launcher import output
output.bound()
for number in range(40):
    print("line", number, "x" * 100_000, flush=True)
"""


def test_a_job_survives_a_disk_on_which_not_even_the_rate_can_be_written(tmp_path: Path) -> None:
    """The output worker ended with 0 at the first piece, so no other was started, and the next print failed."""
    log, there = tmp_path / "log", tmp_path / "spool"
    there.mkdir()
    (there / spool.RATE_FILE).symlink_to("/dev/full")
    env = os.environ | {"PYTHONPATH": str(settings.job_path()), spool.FOLDER: str(there)}
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", FULL], stdout=out, stderr=subprocess.PIPE, env=env, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr.decode()
    wait_until(lambda: log.read_text().count("x\n") == 40)
    wait_until(lambda: sum(int(line.split("(")[1].split()[0]) for line in spooled(there)) == 40)
    assert all(line.endswith("lines) left out here: the disk with the spool is full") for line in spooled(there))


FAILING = """
import os, sys
from pathlib import Path
from spotkeeper_agent.launcher import output

class Failing:
    def of(environ, *, before):
        if before and sys.argv[1] == "once":
            return None
        with Path("before").open("a") as file:
            file.write(before + "\\n")
        raise ValueError

def no_fork():
    raise BlockingIOError

output.Spool = Failing
if sys.argv[1] == "everything":
    output._copy = Failing.of
read, write = os.pipe()
if os.fork() == 0:
    if sys.argv[1] == "fork":
        os.fork = no_fork
    output._supervise({read: (1, b"o")}, 1 << 20)
os.close(read)
os.dup2(write, 1)
os.close(write)
for _ in range(4):
    print("x" * 500_000, flush=True)
os.close(1)
os.wait()
"""


@pytest.mark.parametrize(("failing", "tries"), [("once", 1), ("always", 3), ("everything", 3), ("fork", 0)])
def test_prints_succeed_however_often_an_output_worker_fails(tmp_path: Path, failing: str, tries: int) -> None:
    log, told = tmp_path / "log", tmp_path / "before"
    told.touch()
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", FAILING, failing],
            stdout=out,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(settings.job_path())},
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    assert told.read_text().split("\n")[:-1] == ["", "failed", "failed"][:tries]
    assert log.read_text().count("x\n") == (0 if failing == "everything" else 4)


def spooled(folder: Path) -> list[str]:
    text = b"".join(unpacked(path.read_bytes()) for path in sorted(folder.glob("*.gz")))
    return [line[14:] for line in text.decode().splitlines()]


LOUD = """
import os, subprocess, sys
from spotkeeper_agent.launcher import output
output.KEPT_BYTES = 1 << 20
output.bound()
try:
    os.wait()
except ChildProcessError:
    print("no child but its own")
for number in range(16):
    os.write(1, b"%07d\\n" % number * (1 << 17))
subprocess.run(["sh", "-c", "echo from a child; echo an error >&2"])
print("the last line", flush=True)
"""


def test_a_fast_printing_jobs_log_stays_short(tmp_path: Path) -> None:
    """Nobody looks here: a log that is cut every 15 s had filled the memory before the first look."""
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        env = os.environ | {"PYTHONPATH": str(settings.job_path())}
        subprocess.run([sys.executable, "-c", LOUD], stdout=stdout, stderr=stderr, env=env, check=True)
    wait_until(lambda: out.read_bytes().endswith(b"the last line\n") and err.read_text())
    assert out.stat().st_size > 16 << 20
    assert out.stat().st_blocks * 512 <= 3 << 20
    assert out.read_bytes().endswith(b"0000015\n" * 1000 + b"from a child\nthe last line\n")
    assert err.read_text() == "an error\n"
