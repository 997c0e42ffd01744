"""Archives: equal sources give equal bytes, and what is in them runs where it is meant to."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from spotkeeper.vm.source import extract

from infra import bundle

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bundle.Archive:
    return bundle.bundle(tmp_path_factory.mktemp("build"), PYTHON)


@pytest.fixture(scope="module")
def unpacked(archive: bundle.Archive, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machine")
    with tarfile.open(archive.path) as tar:
        extract(tar, folder)
    return folder


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    files = bundle.package_files("site/spotkeeper", bundle.PACKAGE / "spec")
    assert bundle._tar(files) == bundle._tar(dict(reversed(files.items())))
    text = {"b": b"2", "a": b"1"}
    assert bundle._zip(text) == bundle._zip(dict(reversed(text.items())))


def test_nothing_of_this_machine_is_in_it(archive: bundle.Archive) -> None:
    with tarfile.open(archive.path) as tar:
        for entry in tar:
            assert (entry.mtime, entry.uid, entry.gid, entry.uname) == (0, 0, 0, ""), entry.name
            assert entry.mode in (0o644, 0o755)
            assert "__pycache__" not in entry.name and entry.name.split("/")[0] in ("site", "job", "templates")


def test_its_name_is_its_hash_and_the_second_is_the_first(archive: bundle.Archive) -> None:
    assert hashlib.sha256(archive.path.read_bytes()).hexdigest() == archive.sha256
    before = archive.path.stat().st_mtime_ns
    assert bundle.bundle(archive.path.parent, PYTHON) == archive
    assert archive.path.stat().st_mtime_ns == before


def test_a_changed_source_is_another_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "spotkeeper"
    package.mkdir()
    (package / "__init__.py").write_text("one = 1\n")
    monkeypatch.setattr(bundle, "PACKAGE", package)
    first = bundle.bundle(tmp_path / "build", PYTHON)
    (package / "__init__.py").write_text("one = 2\n")
    assert bundle.bundle(tmp_path / "build", PYTHON).sha256 != first.sha256


def test_the_agent_imports_from_the_bundle_alone(unpacked: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import msgspec, jinja2, requests, spotkeeper.vm.agent, spotkeeper.spec.names; "
         "print(msgspec.__file__)"],
        env={"PYTHONPATH": str(unpacked / "site")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(unpacked))


def test_what_operators_run_is_not_on_machines(unpacked: Path) -> None:
    there = {path.name for path in (unpacked / "site/spotkeeper").iterdir()}
    assert {"spec", "vm", "clock.py", "__init__.py"} <= there
    assert not there & {"cli", "local", "report", "reconcile"}


def test_a_jobs_path_has_the_library_and_nothing_to_import_by_mistake(unpacked: Path) -> None:
    assert sorted(path.name for path in (unpacked / "job").iterdir()) == ["spotkeeper"]
    there = sorted(path.name for path in (unpacked / "job/spotkeeper").iterdir())
    assert there == ["__init__.py", "clock.py", "train", "vm"]
    assert sorted(path.name for path in (unpacked / "job/spotkeeper/vm").iterdir()) == ["__init__.py", "launcher"]


def test_the_function_is_pinned_and_has_its_entry_point(tmp_path: Path) -> None:
    source = bundle.function_source(tmp_path)
    with zipfile.ZipFile(source.path) as archive:
        names = archive.namelist()
        pins = archive.read("requirements.txt").decode().split()
        main = archive.read("main.py").decode()
    assert names == sorted(names)
    assert "from spotkeeper.reconcile.http import main" in main
    assert all("==" in pin for pin in pins)
    assert {pin.partition("==")[0] for pin in pins} >= {"functions-framework", "obstore", "msgspec", "pyjwt"}
    assert not any(name.startswith(("spotkeeper/cli/", "spotkeeper/local/", "spotkeeper/vm/")) for name in names)
    assert bundle.function_source(tmp_path) == source


def test_old_archives_go(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("not ours")
    for number in range(12):
        bundle._write(tmp_path / f"bundle-{number:02d}.tar", b"x")
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [*(f"bundle-{number:02d}.tar" for number in range(4, 12)), "other"]


def test_a_missing_dependency_says_what_to_install() -> None:
    with pytest.raises(bundle.BundleError, match="no-such-distribution is not installed here"):
        bundle.closure(("no-such-distribution",))


OTHERS = tuple(version for version in ("3.10", "3.11", "3.12", "3.13") if version != PYTHON)
IMPORT_ALL = """
import importlib, pkgutil
from spotkeeper.vm import light
import msgspec, jinja2, requests, spotkeeper
skipped = ("spotkeeper.train", "spotkeeper.vm.__main__", "spotkeeper.vm.launcher", "spotkeeper.spec.yamltext",
           "spotkeeper.spec.jobfile")  # the job's, with torch; programs; read on the operator's machine
names = [each.name for each in pkgutil.walk_packages(spotkeeper.__path__, "spotkeeper.")]
for name in names:
    if not name.startswith(skipped):
        importlib.import_module(name)
print(msgspec.json.decode(b"[1]"), len(names) > 50)
"""


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for program in (shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))):
        asks = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"] if program else ["false"]
        done = subprocess.run(asks, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return program
    return None


def fetched(folder: Path, python: str, arch: str = "x86_64") -> Path:
    """A bundle for other machines, unpacked; its wheels come from the package index."""
    try:
        made = bundle.bundle(folder / "build", python, arch)
    except bundle.BundleError as error:
        pytest.skip(f"no package index can be reached from here: {error}")
    with tarfile.open(made.path) as tar:
        extract(tar, folder / "machine")
    assert made.path.stat().st_size <= 5e6
    return folder / "machine"


@pytest.mark.parametrize("python", OTHERS)
def test_the_agent_runs_on_other_pythons(tmp_path: Path, python: str) -> None:
    program = interpreter(python)
    if program is None:
        pytest.skip(f"no Python {python} here: install one (pyenv's are found)")
    site = fetched(tmp_path, python) / "site"
    command = [program, "-BS", "-W", "error", "-c", IMPORT_ALL]
    done = subprocess.run(command, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1] True", done.stderr


def test_arm_machines_get_their_own_wheels(tmp_path: Path) -> None:
    site = fetched(tmp_path, "3.12", "aarch64") / "site"
    native = list(site.rglob("*.so"))
    assert len(native) >= 2
    for file in native:
        with file.open("rb") as stream:
            assert stream.read(20)[18] == 0xB7, file  # EM_AARCH64
