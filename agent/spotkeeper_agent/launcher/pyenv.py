"""Makes the job's own Python environment from its ``requirements``, then starts the launcher in it.

::

    python pyenv.py RUN SOURCE FILE HOME MODE [MODULE...]

``FILE`` is in ``SOURCE``: a requirements file, or ``uv.lock`` with its ``pyproject.toml``. The environment is made
once, on the node's disk, and every machine that gets that disk finds it there. A machine without a disk (a standby, or
a machine that waits for its disk) makes the environment below ``HOME`` on its boot disk. If the disk is mounted before
that environment is ready, the machine finds or makes the environment on the disk instead, for later machines to use.

An environment from a requirements file also sees the interpreter's own packages, such as an image's torch, so pip does
not install these again. An environment from ``uv.lock`` has exactly the lock's packages. The file ``READY`` is written
last: an environment without this file is incomplete and is made again.

Runs as the job's user, under the job's Python: standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import site
import stat
import subprocess
import sys
import time
from pathlib import Path

READY = "READY"
LOCK = "uv.lock"
PROJECT = "pyproject.toml"
BUILDING = "environment.building"  # in RUN: exists while an environment is being made
DISK = "environment.disk"  # in RUN: the folder on the node's mounted disk (written by the agent)
POLL_S = 0.5  # real
MOST_BYTES, MOST_FILES = 256 << 20, 200  # limits of what an environment's hash covers
# An option that names another file: `-r base.txt`, `-rbase.txt`, `--requirement=base.txt`; likewise -c, --constraint.
_OTHER = re.compile(r"\s*(?:-[rc]\s*|--(?:requirement|constraint)(?:\s*=\s*|\s+))([^\s#]+)")


class EnvError(Exception):
    """The environment cannot be made. The message has the reason and a remedy."""


def contents(source: Path, file: str) -> str:
    """Return a hash of all inputs of the environment: ``file`` and the files that it names, also wheels.

    A missing file is no error here: it is reported when the environment is made.
    """
    found = hashlib.sha256()
    todo = [source / file, *([source / Path(file).with_name(PROJECT)] if Path(file).name == LOCK else [])]
    seen: set[str] = set()
    while todo and len(seen) < MOST_FILES:
        path = todo.pop(0)
        known = os.path.normpath(path)
        if known not in seen:  # files may name each other, or themselves
            seen.add(known)
            todo += _hash(found, source, path)
    return found.hexdigest()


def _hash(found: hashlib._Hash, source: Path, path: Path) -> list[Path]:
    """Add one file to the hash; return the files that this file names."""
    found.update(f"{path.relative_to(source) if path.is_relative_to(source) else path.name}\0".encode())
    text = _digest_of(found, path)
    if path.suffix not in (".txt", ".in"):
        return []
    named: list[Path] = []
    for line in text.decode(errors="replace").splitlines():
        if option := _OTHER.match(line):
            named.append(path.parent / option[1])
        elif (words := line.split("#")[0].split()) and "/" in words[0] and _is_file(source / words[0]):
            named.append(source / words[0])  # a wheel that comes with the source
    return named


def _digest_of(found: hashlib._Hash, path: Path) -> bytes:
    """Add a file's content to the hash and return its beginning.

    The job can put anything into its source. To bound the reading, only regular files are read, and a file larger than
    any wheel counts only with its beginning and its size.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):  # the text may not be a valid name
        return b""
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):  # a folder; a device, which may have no end
        os.close(fd)
        return b""
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
        text, digest, left = b"", hashlib.sha256(), MOST_BYTES
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            text, left = text or piece, left - len(piece)
            digest.update(piece)
    found.update(digest.digest() + (b"" if left else str(about.st_size).encode()))
    return text


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def name(source: Path, file: str) -> str:
    """Return the environment's folder name: a hash of its inputs, this interpreter and this type of machine."""
    what = (contents(source, file), sys.version, os.uname().machine, sys.prefix)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def main(run: Path, source: Path, file: str, home: Path, mode: str, warm: list[str]) -> None:
    """Find or make the environment, and execute the launcher in it."""
    found = find(run, source, file, home)
    env = dict(os.environ)
    env["PATH"] = f"{found / 'bin'}:{env.get('PATH', os.defpath)}"
    env["VIRTUAL_ENV"] = str(found)
    sys.stdout.flush()
    python = str(found / "bin" / "python")
    os.execve(python, [python, "-m", "spotkeeper_agent.launcher", mode, str(run), *warm], env)  # noqa: S606 - an argv


def find(run: Path, source: Path, file: str, home: Path) -> Path:
    """Return the environment's folder, and make the environment if it does not exist.

    Raises:
        EnvError: the environment cannot be made.
    """
    if not (source / file).is_file():
        raise EnvError(f"requirements: no {file} in the job's source")
    folder = name(source, file)
    while True:
        disk = _disk(run)
        for place in (disk, home):
            if place is not None and (place / folder / READY).exists():
                return place / folder
        place = disk or home
        building = run / BUILDING
        building.write_text(f"{place / folder}\n")
        try:
            if _make(run, source, file, place, folder):
                return place / folder
        finally:
            building.unlink(missing_ok=True)


def _disk(run: Path) -> Path | None:
    try:
        return Path((run / DISK).read_text().strip())
    except OSError:
        return None


def _make(run: Path, source: Path, file: str, place: Path, folder: str) -> bool:
    """Make the environment in ``place``; stop and return False if the node's disk is mounted meanwhile."""
    began, target = time.monotonic(), place / folder
    place.mkdir(parents=True, exist_ok=True)
    for other in place.iterdir():  # old or incomplete ones: only this machine's launcher uses an environment
        shutil.rmtree(other, ignore_errors=True)
    print(f"environment: installing {file} into {target}", flush=True)
    for command in _commands(source, file, target):
        print(f"environment: {' '.join(command)}", flush=True)
        if not _run(command, source, target, lambda: _disk(run) not in (None, place)):
            print(
                f"environment: giving up {target}, because the node's disk is mounted now: installing there", flush=True
            )
            shutil.rmtree(target, ignore_errors=True)
            return False
        if command[1:3] == ["-m", "venv"]:
            _see_image(target)
    _settle(target)
    print(f"environment: made in {time.monotonic() - began:.0f} s", flush=True)
    return True


def _commands(source: Path, file: str, target: Path) -> list[list[str]]:
    if Path(file).name == LOCK:
        uv = shutil.which("uv")
        if uv is None:
            raise EnvError(
                f"requirements: {file} needs uv on the machine: install it in the image, or use a requirements file"
            )
        project = str((source / file).parent)
        sync = ["sync", "--frozen", "--no-install-project", "--compile-bytecode", "--project", project]
        return [[uv, *sync, "--python", sys.executable]]
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", str(target)], [*pip, "--progress-bar", "off", "-r", file]]


def _see_image(target: Path) -> None:
    """Let the new environment import this interpreter's packages, even if this interpreter itself is in a venv."""
    # venv's --system-site-packages would skip that venv and show only the packages of the interpreter it was made from.
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    found = next(target.glob("lib/python*/site-packages"))
    (found / "_image.pth").write_text("".join(lines))


def _run(command: list[str], source: Path, target: Path, over: object) -> bool:
    """Run a command to its end; if ``over()`` becomes true, kill the command and return False. Raises EnvError."""
    assert callable(over)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env |= {"UV_PROJECT_ENVIRONMENT": str(target), "UV_LINK_MODE": "copy", "PIP_REQUIRE_VIRTUALENV": "0"}
    process = subprocess.Popen(command, cwd=source, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        if over():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    if process.returncode:
        said = "its last lines are above"
        if command[1:3] == ["-m", "venv"]:
            said = "if ensurepip is missing, install python3-venv in the image"
        raise EnvError(f"requirements: {command[0]} ended with {process.returncode}; {said}")
    return True


def _settle(target: Path) -> None:
    """Sync the files to disk, then write READY."""
    os.sync()
    with (target / READY).open("w") as file:
        file.write(f"{time.time():.0f}\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5], sys.argv[6:])
    except (EnvError, OSError) as error:
        sys.exit(str(error))
