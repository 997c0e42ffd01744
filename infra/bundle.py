"""Packs what machines and the function run, so that equal sources give equal bytes.

Two archives: the *bundle* that VMs fetch by hash (``site/`` with the ``spotkeeper``
package and what it imports, ``job/`` for the path of users' jobs, ``templates/job/``), and the
*function* (for Cloud Functions package, entry file and pinned requirements, which it builds; for
Lambda, which builds nothing, the package with its wheels). They are cached by the hash of their
inputs. Nothing here may talk to a cloud; only a bundle for another Python version than
the running one reads the package index, through pip.
"""

from __future__ import annotations

import hashlib
import io
import platform
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
PACKAGE = ROOT / "agent" / "spotkeeper"
AGENT_REQUIRES = ("jinja2", "msgspec", "requests")
UNUSED = ("charset-normalizer",)  # vm/light.py
LAMBDA_REQUIRES = ("msgspec", "obstore")  # boto3 lies in the runtime; callers are checked by IAM
FUNCTION_REQUIRES = ("functions-framework", "msgspec", "obstore", "pyjwt", "cryptography", "requests")
# What a job's own Python gets on its path: the standard library and torch suffice for these.
JOB_PARTS = ("__init__.py", "clock.py", "train", "vm/__init__.py", "vm/launcher")
# What runs on the operator's machine only.
NOT_ON_VMS = ("cli", "local", "report", "reconcile")
NOT_IN_FUNCTION = ("cli", "local", "train", "vm")
_MAIN = '''"""Where Cloud Functions looks for the entry point."""

from spotkeeper.reconcile.http import main

__all__ = ["main"]
'''
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold


@dataclass(frozen=True)
class Archive:
    """A file whose name in the bucket is its content's hash."""

    path: Path
    sha256: str


def bundle(cache_folder: Path, python: str, arch: str = "x86_64") -> Archive:
    """The tar that VMs fetch; ``python`` is their version (``3.11``), ``arch`` as ``uname -m`` says.

    Raises:
        BundleError: a dependency is not installed, or cannot be had for that version.
    """
    files = package_files("site/spotkeeper", PACKAGE, leave_out=NOT_ON_VMS)
    files |= job_files("job/spotkeeper")
    files |= _tree("templates/job", ROOT / "templates" / "job")
    key = _digest(files, _pins(agent_requires()), f"{python} {arch}")
    path = cache_folder / f"bundle-{key[:16]}.tar"
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            _write(path, _tar({**files, **_site_packages(agent_requires(), python, arch, Path(scratch))}))
    return Archive(path, hashlib.sha256(path.read_bytes()).hexdigest())


def function_source(cache_folder: Path) -> Archive:
    """The zip that Cloud Functions builds: ``main.py``, ``requirements.txt``, the package."""
    contents = {name: path.read_bytes() for name, path in package_files("spotkeeper", PACKAGE, NOT_IN_FUNCTION).items()}
    contents["main.py"] = _MAIN.encode()
    contents["requirements.txt"] = "".join(f"{pin}\n" for pin in _pins(closure(FUNCTION_REQUIRES))).encode()
    data = _zip(contents)
    sha256 = hashlib.sha256(data).hexdigest()
    path = cache_folder / f"function-{sha256[:16]}.zip"
    if not path.exists():
        _write(path, data)
    return Archive(path, sha256)


def lambda_source(cache_folder: Path, python: str) -> Archive:
    """The zip that Lambda runs: the package and its wheels for Lambda's ``python`` (``3.11``) on x86_64.

    Raises:
        BundleError: as :func:`bundle`.
    """
    files = package_files("spotkeeper", PACKAGE, leave_out=NOT_IN_FUNCTION)
    requires = closure(LAMBDA_REQUIRES)
    key = _digest(files, _pins(requires), f"lambda {python}")
    path = cache_folder / f"lambda-{key[:16]}.zip"
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            wheels = _site_packages(requires, python, "x86_64", Path(scratch))
            files |= {name.removeprefix("site/"): file for name, file in wheels.items()}
            _write(path, _zip({name: file.read_bytes() for name, file in files.items()}))
    return Archive(path, hashlib.sha256(path.read_bytes()).hexdigest())


class BundleError(Exception):
    """An archive cannot be made; the message says what to install."""


# --- what goes in ---------------------------------------------------------------------


def package_files(prefix: str, root: Path, leave_out: Iterable[str] = ()) -> dict[str, Path]:
    """Archive name -> file of a package, without caches and without the named sub-packages."""
    out = _tree(prefix, root)
    for part in leave_out:
        out = {name: path for name, path in out.items() if not name.startswith(f"{prefix}/{part}/")}
    return out


def job_files(prefix: str) -> dict[str, Path]:
    """Only what users' processes import."""
    files = _tree(prefix, PACKAGE)
    wanted = tuple(f"{prefix}/{part}" for part in JOB_PARTS)
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
def closure(names: tuple[str, ...]) -> tuple[metadata.Distribution, ...]:
    """The distributions that ``names`` need in this environment, themselves included, by name.

    Raises:
        BundleError: one of them is not installed.
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
            raise BundleError(f"{name} is not installed here: pip install -e '.[infra]'") from None
        queue += [need for requirement in found[name].requires or () if (need := _needed(requirement))]
    return tuple(found[name] for name in sorted(found))


def agent_requires() -> tuple[metadata.Distribution, ...]:
    """What goes to machines beside the package itself."""
    return tuple(each for each in closure(AGENT_REQUIRES) if _canonical(each.metadata["Name"]) not in UNUSED)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed(requirement: str) -> str | None:
    """The name in a requirement that applies here, or None: extras are never asked for."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return None
    return parsed.name


def _pins(distributions: Iterable[metadata.Distribution]) -> tuple[str, ...]:
    return tuple(f"{_canonical(d.metadata['Name'])}=={d.version}" for d in distributions)


def _site_packages(
    requires: tuple[metadata.Distribution, ...], python: str, arch: str, scratch: Path
) -> dict[str, Path]:
    """Files of dependencies: those installed here, or fetched for another Python or processor."""
    here = (f"{sys.version_info.major}.{sys.version_info.minor}", sys.platform, platform.machine())
    if here == (python, "linux", arch):
        return _installed(requires)
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"),
        *(f"--platform={libc}_{arch}" for libc in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")),
        *("--implementation=cp", "--python-version", python, "--target", str(scratch)),
        *_pins(requires),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise BundleError(f"pip found no wheels for Python {python} on {arch}: {done.stderr.strip()[-500:]}")
    return {name: path for name, path in _tree("site", scratch).items() if not name.startswith("site/bin/")}


def _installed(distributions: Iterable[metadata.Distribution]) -> dict[str, Path]:
    out: dict[str, Path] = {}
    for distribution in distributions:
        for file in distribution.files or ():
            if (
                file.parts[0] == ".."
                or "__pycache__" in file.parts
                or file.name in ("RECORD", "INSTALLER", "REQUESTED")
            ):
                continue  # scripts, and what differs from one installation to the next
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                out[f"site/{file.as_posix()}"] = path
    return out


# --- how it is packed: no time, no owner, sorted names ---------------------------------


def _digest(files: Mapping[str, Path], pins: Iterable[str], python: str) -> str:
    digest = hashlib.sha256(f"{python} {' '.join(pins)} {_FORMAT}".encode())
    for name in sorted(files):
        digest.update(f"\0{name}\0".encode())
        digest.update(hashlib.sha256(files[name].read_bytes()).digest())
    return digest.hexdigest()


_KEPT = 8  # archives of each kind
_FORMAT = 1  # raise it when the layout of the bundle changes: the cache knows the inputs only


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
    """Every changed source leaves an archive; the newest are enough for whatever runs at this moment."""
    by_age = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in by_age[_KEPT:]:
        path.unlink(missing_ok=True)
