"""The job's own Python environment, made of its ``requirements``; then the launcher runs in it.

::

    python pyenv.py RUN SOURCE FILE HOME MODE [MODULE...]

``FILE`` lies in ``SOURCE``: a requirements file, or ``uv.lock`` with its ``pyproject.toml``. The environment is made
once, on the rank's own disk, and every machine that gets that disk finds it there. A machine without a disk (it
stands by, or waits for one) makes it below ``HOME``, on its boot disk, and stops doing so where a disk comes
meanwhile: what is there already is faster, what is made there lasts.

What the interpreter has itself (an image's torch) is seen from the environment, so a requirements file that asks for
it gets that one; only an environment of ``uv.lock`` holds what the lock says and nothing else. An environment is
whole when its ``READY`` is there, which is written last; one without is made anew.

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
import subprocess
import sys
import time
from pathlib import Path

READY = "READY"
LOCK = "uv.lock"
PROJECT = "pyproject.toml"
BUILDING = "environment.building"  # in RUN: there while one is being made
DISK = "environment.disk"  # in RUN: the folder on the rank's disk, once that is mounted (the agent writes it)
LOOK_S = 0.5  # real
# Another file is named: `-r base.txt`, `-rbase.txt`, `--requirement=base.txt`; -c and --constraint likewise.
_OTHER = re.compile(r"\s*(?:-[rc]\s*|--(?:requirement|constraint)(?:\s*=\s*|\s+))([^\s#]+)")


class EnvError(Exception):
    """It cannot be made. The text says why, and what to do."""


def contents(source: Path, file: str) -> str:
    """What the environment is made from, as a hash: the file, those it names, wheels and folders' own among them.

    A file that is not there counts as such: whoever makes the environment says so.
    """
    found = hashlib.sha256()
    todo = [source / file, *([source / Path(file).with_name(PROJECT)] if Path(file).name == LOCK else [])]
    seen: set[str] = set()
    while todo:
        path = todo.pop(0)
        known = os.path.normpath(path)
        if known not in seen:  # files may name each other, or themselves
            seen.add(known)
            todo += _hash(found, source, path)
    return found.hexdigest()


def _hash(found: hashlib._Hash, source: Path, path: Path) -> list[Path]:
    """Take in one file; those it names. Anybody's text: what is no file's name, or no file, is none."""
    found.update(f"{path.relative_to(source) if path.is_relative_to(source) else path.name}\0".encode())
    if not _is_file(path):  # nor a pipe or a device, which may have no end
        return []
    try:
        text = path.read_bytes()
    except OSError:
        return []
    found.update(hashlib.sha256(text).digest())
    if path.suffix not in (".txt", ".in"):
        return []
    named: list[Path] = []
    for line in text.decode(errors="replace").splitlines():
        if option := _OTHER.match(line):
            named.append(path.parent / option[1])
        elif (words := line.split("#")[0].split()) and "/" in words[0] and _is_file(source / words[0]):
            named.append(source / words[0])  # a wheel that comes with the source
    return named


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def name(source: Path, file: str) -> str:
    """The folder of the environment: as its contents, for this interpreter on this kind of machine."""
    what = (contents(source, file), sys.version, os.uname().machine, sys.prefix)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def main(run: Path, source: Path, file: str, home: Path, mode: str, warm: list[str]) -> None:
    """Find or make it, and become the launcher in it."""
    found = find(run, source, file, home)
    env = dict(os.environ)
    env["PATH"] = f"{found / 'bin'}:{env.get('PATH', os.defpath)}"
    env["VIRTUAL_ENV"] = str(found)
    sys.stdout.flush()
    python = str(found / "bin" / "python")
    os.execve(python, [python, "-m", f"spotkeeper.vm.launcher.{mode}", str(run), *warm], env)  # noqa: S606 - an argv


def find(run: Path, source: Path, file: str, home: Path) -> Path:
    """The environment's folder, made where it is not there.

    Raises:
        EnvError: it cannot be made.
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
    """False: the rank's disk has come, on which it may be already; what was made here is of no use."""
    began, target = time.monotonic(), place / folder
    place.mkdir(parents=True, exist_ok=True)
    for other in place.iterdir():  # of another file, or half made: this node's launcher is the only one that runs one
        shutil.rmtree(other, ignore_errors=True)
    print(f"environment: made from {file} in {target}", flush=True)
    for command in _commands(source, file, target):
        print(f"environment: {' '.join(command)}", flush=True)
        if not _run(command, source, target, lambda: _disk(run) not in (None, place)):
            print("environment: the rank's disk is here: on with what it has", flush=True)
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
            raise EnvError(f"requirements: {file} needs uv on the machine: put it into the image, or its requirements")
        project = str((source / file).parent)
        sync = ["sync", "--frozen", "--no-install-project", "--compile-bytecode", "--project", project]
        return [[uv, *sync, "--python", sys.executable]]
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", str(target)], [*pip, "--progress-bar", "off", "-r", file]]


def _see_image(target: Path) -> None:
    """The interpreter's own packages, behind the environment's. ``--system-site-packages`` sees no parent venv's."""
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    found = next(target.glob("lib/python*/site-packages"))
    (found / "_image.pth").write_text("".join(lines))


def _run(command: list[str], source: Path, target: Path, over: object) -> bool:
    """Run it to its end; False where ``over`` came first. Raises EnvError where it fails."""
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
            process.wait(LOOK_S)
    if process.returncode:
        said = "its last lines are above"
        if command[1:3] == ["-m", "venv"]:
            said = "where ensurepip is missing, the image wants python3-venv"
        raise EnvError(f"requirements: {command[0]} ended with {process.returncode}; {said}")
    return True


def _settle(target: Path) -> None:
    """Its files are on the disk before its mark is."""
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
