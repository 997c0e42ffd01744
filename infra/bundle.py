"""Pack the programs of machines and of the function reproducibly: equal sources give equal bytes.

Machines fetch the *bundle* by its hash: ``site/`` has ``spotkeeper``, ``spotkeeper_agent`` and their dependencies,
``job/`` what users' jobs import, ``templates/job/`` torchrun's arguments. The *function* archive has the package
``spotkeeper``; for Cloud Functions also an entry file and pinned requirements, for Lambda the wheels. Archives are
cached by the hash of their inputs. This module calls no cloud; if installed packages do not fit, pip fetches wheels.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import platform
import py_compile
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "spotkeeper"
AGENT = ROOT / "agent" / "spotkeeper_agent"
LOCK = ROOT / "requirements.lock"
AGENT_REQUIRES = ("jinja2", "msgspec", "requests")
UNUSED = ("charset-normalizer",)  # agent/spotkeeper_agent/host/memory.py gives the reason
OLDEST_GLIBC = 17  # minor versions of glibc 2: the oldest that wheels may need, and the one in machine images
MACHINES_GLIBC = 28
LAMBDA_REQUIRES = ("msgspec", "obstore")  # Lambda's runtime has boto3, and IAM checks the callers
FUNCTION_REQUIRES = ("functions-framework", "msgspec", "obstore", "pyjwt", "cryptography", "requests")
# Packages that a job's own Python imports; they need only the standard library and torch.
JOB_LIBRARY = ("__init__.py", "clock.py", "version.py", "train")
JOB_AGENT = ("__init__.py", "launcher")
# Packages that no machine of a job runs.
NOT_ON_VMS = (
    *("cli", "client", "contract/parse", "dashboard", "exporter", "integrations", "local", "replay", "report"),
    "reconcile",
)
NOT_IN_FUNCTION = ("cli", "client", "dashboard", "exporter", "integrations", "local", "replay", "report", "train")
_MAIN = '''"""The entry point of Cloud Functions."""

from spotkeeper.reconcile.service.http import main

__all__ = ["main"]
'''
_THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest timestamp that a zip can store


@dataclass(frozen=True)
class Archive:
    """A packed file, named in the bucket by the hash of its content."""

    path: Path
    sha256: str


def bundle(cache_folder: Path, python: str, arch: str = "x86_64", *, compiled: bool = False) -> Archive:
    """Return the tar that machines fetch, for their ``python`` (``3.11``) and ``arch`` (as ``uname -m`` prints it).

    Args:
        compiled: add compiled modules if this Python is a ``python``. Such a bundle depends on who packs it.

    Raises:
        BundleError: a dependency is not installed, or not available for that Python version.
    """
    files = package_files("site/spotkeeper", LIBRARY, leave_out=NOT_ON_VMS) | _tree("site/spotkeeper_agent", AGENT)
    files |= job_files("job")
    files |= _tree("templates/job", ROOT / "templates" / "job")
    compiled = compiled and python == _THIS_PYTHON
    key = _digest(files, _pins(agent_requires()), f"{python} {arch}{' compiled' * compiled}")
    path = cache_folder / f"bundle-{key[:16]}.tar"
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as cache:
            files |= _site_packages(agent_requires(), python, arch, Path(scratch))
            _write(path, _tar(files | _compiled(files, Path(cache)) if compiled else files))
    return Archive(path, hashlib.sha256(path.read_bytes()).hexdigest())


def function_source(cache_folder: Path, python: str) -> Archive:
    """Return the zip that Cloud Functions builds: ``main.py``, the package, and requirements for ``python`` (``3.11``).

    Raises:
        BundleError: a dependency is not installed, or its installed version is not the one in the lock file.
    """
    contents = {name: path.read_bytes() for name, path in package_files("spotkeeper", LIBRARY, NOT_IN_FUNCTION).items()}
    contents["main.py"] = _MAIN.encode()
    contents["requirements.txt"] = _locked(_pins(closure(FUNCTION_REQUIRES, python))).encode()
    data = _zip(contents)
    sha256 = hashlib.sha256(data).hexdigest()
    path = cache_folder / f"function-{sha256[:16]}.zip"
    if not path.exists():
        _write(path, data)
    return Archive(path, sha256)


def lambda_source(cache_folder: Path, python: str) -> Archive:
    """Return the zip that Lambda runs: the package and its wheels for ``python`` (``3.11``) on x86_64."""
    files = package_files("spotkeeper", LIBRARY, leave_out=NOT_IN_FUNCTION)
    requires = closure(LAMBDA_REQUIRES)
    key = _digest(files, _pins(requires), f"lambda {python} glibc {lambda_glibc(python)}")
    path = cache_folder / f"lambda-{key[:16]}.zip"
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            wheels = _site_packages(requires, python, "x86_64", Path(scratch), lambda_glibc(python))
            files |= {name.removeprefix("site/"): file for name, file in wheels.items()}
            _write(path, _zip({name: file.read_bytes() for name, file in files.items()}))
    return Archive(path, hashlib.sha256(path.read_bytes()).hexdigest())


def lambda_glibc(python: str) -> int:
    """Return N of glibc 2.N in Lambda's runtime, which is Amazon Linux 2 up to Python 3.11, later Amazon Linux 2023."""
    return 26 if python in ("3.10", "3.11") else 34


class BundleError(Exception):
    """An archive cannot be made; the message names what to install."""


# --- contents ---------------------------------------------------------------------


def package_files(prefix: str, root: Path, leave_out: Iterable[str] = ()) -> dict[str, Path]:
    """Return a package's files by archive name, except caches and the sub-packages in ``leave_out``."""
    out = _tree(prefix, root)
    for part in leave_out:
        out = {name: path for name, path in out.items() if not name.startswith(f"{prefix}/{part}/")}
    return out


def job_files(prefix: str) -> dict[str, Path]:
    """Return the files that users' processes import, by archive name."""
    files = _tree(f"{prefix}/spotkeeper", LIBRARY) | _tree(f"{prefix}/spotkeeper_agent", AGENT)
    wanted = (
        *(f"{prefix}/spotkeeper/{part}" for part in JOB_LIBRARY),
        *(f"{prefix}/spotkeeper_agent/{part}" for part in JOB_AGENT),
    )
    return {
        name: path
        for name, path in files.items()
        if name in wanted or any(name.startswith(f"{part}/") for part in wanted)
    }


def _tree(prefix: str, root: Path) -> dict[str, Path]:
    return {
        f"{prefix}/{path.relative_to(root).as_posix()}": path
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


@cache
def closure(names: tuple[str, ...], python: str = "") -> tuple[metadata.Distribution, ...]:
    """Return the distributions ``names`` and all their dependencies, sorted by name.

    Args:
        python: the Python version (``3.11``) for which dependencies are returned; empty: the running version.

    Raises:
        BundleError: a distribution is not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = _canonical(queue.pop())
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise BundleError(f"{name} is not installed here: run pip install -e '.[infra]'") from None
        queue += [need for requirement in found[name].requires or () if (need := _needed(requirement, python))]
    return tuple(found[name] for name in sorted(found))


def agent_requires() -> tuple[metadata.Distribution, ...]:
    """Return the distributions in the machines' bundle, without Spotkeeper itself."""
    return tuple(each for each in closure(AGENT_REQUIRES) if _canonical(each.metadata["Name"]) not in UNUSED)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed(requirement: str, python: str) -> str | None:
    """Return the name of a requirement; None if it belongs to an extra or does not apply to ``python``."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    there = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": "", **there}):
        return None
    return parsed.name


def _pins(distributions: Iterable[metadata.Distribution]) -> tuple[str, ...]:
    return tuple(f"{_canonical(d.metadata['Name'])}=={d.version}" for d in distributions)


def _locked(pins: Iterable[str]) -> str:
    """Return the pins with their hashes from the lock file, so that pip installs nothing else.

    Raises:
        BundleError: an installed version is not in the lock file.
    """
    entries = re.split(r"\n(?=\S)", LOCK.read_text().rstrip("\n"))
    known = {entry.split(maxsplit=1)[0]: entry for entry in entries}
    if strangers := [pin for pin in pins if pin not in known]:
        raise BundleError(f"{LOCK.name} does not have {', '.join(strangers)}: run make setup, or make lock")
    return "".join(f"{known[pin]}\n" for pin in pins)


def _site_packages(
    requires: tuple[metadata.Distribution, ...], python: str, arch: str, scratch: Path, glibc: int = MACHINES_GLIBC
) -> dict[str, Path]:
    """Return the files of dependencies: installed files if they fit the arguments, else files from wheels.

    Args:
        glibc: N of the glibc 2.N with which the files must run.
    """
    here = (_THIS_PYTHON, sys.platform, platform.machine())
    if here == (python, "linux", arch) and all(runs_with(found.read_text("WHEEL") or "", glibc) for found in requires):
        return _installed(requires)
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"),
        f"--platform=manylinux2014_{arch}",
        *(f"--platform=manylinux_2_{minor}_{arch}" for minor in range(OLDEST_GLIBC, glibc + 1)),
        *("--implementation=cp", "--python-version", python, "--target", str(scratch)),
        *_pins(requires),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        where = f"Python {python} on {arch} with glibc 2.{glibc}"
        raise BundleError(f"pip found no wheels for {where}: {done.stderr.strip()[-500:]}")
    return {name: path for name, path in _tree("site", scratch).items() if not name.startswith("site/bin/")}


def _compiled(files: Mapping[str, Path], scratch: Path) -> dict[str, Path]:
    """Return compiled modules that this Python's minor version loads without a look at their sources."""
    out: dict[str, Path] = {}
    for name, path in files.items():
        if path.suffix == ".py":
            made = importlib.util.cache_from_source(name, optimization="")
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(path), str(scratch / made), name, doraise=True, invalidation_mode=mode)
            out[made] = scratch / made
    return out


def runs_with(wheel: str, glibc: int) -> bool:
    """Return whether a distribution runs with glibc 2.``glibc``, as far as the tags in its WHEEL file tell."""
    for platforms in re.findall(r"^Tag: [^-\s]+-[^-\s]+-(\S+)$", wheel, re.MULTILINE):
        if platforms == "any" or platforms.startswith(("manylinux1_", "manylinux2010_", "manylinux2014_")):
            return True
        if (least := re.match(r"manylinux_2_(\d+)_", platforms)) and int(least[1]) <= glibc:
            return True
    return False  # the wheel was built for this machine


def _installed(distributions: Iterable[metadata.Distribution]) -> dict[str, Path]:
    out: dict[str, Path] = {}
    for distribution in distributions:
        for file in distribution.files or ():
            if (
                file.parts[0] == ".."
                or "__pycache__" in file.parts
                or file.name in ("RECORD", "INSTALLER", "REQUESTED")
            ):
                continue  # scripts, and files that differ between installations
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                out[f"site/{file.as_posix()}"] = path
    return out


# --- packing: no time, no owner, sorted names ---------------------------------


def _digest(files: Mapping[str, Path], pins: Iterable[str], python: str) -> str:
    digest = hashlib.sha256(f"{python} {' '.join(pins)} {_FORMAT}".encode())
    for name in sorted(files):
        digest.update(f"\0{name}\0".encode())
        digest.update(hashlib.sha256(files[name].read_bytes()).digest())
    return digest.hexdigest()


_KEPT = 8  # archives of each kind
_FORMAT = 1  # increment it when the bundle's layout changes: the cache key covers only inputs


def _tar(files: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            data = files[name].read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = 0o755 if files[name].stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _zip(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_STORED  # zlib's output may differ between versions
            archive.writestr(entry, contents[name])
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)
    _prune(path.parent, f"{path.name.partition('-')[0]}-*")


def _prune(folder: Path, pattern: str) -> None:
    """Delete all but the newest archives of a kind: every change of a source makes another archive."""
    by_age = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in by_age[_KEPT:]:
        path.unlink(missing_ok=True)
