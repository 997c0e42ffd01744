"""Archives: equal sources give equal bytes, and what is in them runs where it is meant to."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from infra import bundle, gcp
from spotkeeper_agent.job.source import extract
from tests.infra.settings import stackfiles
from tests.sizes import size

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
    files = bundle.package_files("site/spotkeeper", bundle.LIBRARY / "contract")
    assert bundle._tar(files) == bundle._tar(dict(reversed(files.items())))
    text = {"b": b"2", "a": b"1"}
    assert bundle._zip(text) == bundle._zip(dict(reversed(text.items())))


def test_the_bundle_contains_nothing_of_this_machine(archive: bundle.Archive) -> None:
    with tarfile.open(archive.path) as tar:
        for entry in tar:
            assert (entry.mtime, entry.uid, entry.gid, entry.uname) == (0, 0, 0, ""), entry.name
            assert entry.mode in (0o644, 0o755)
            assert "__pycache__" not in entry.name and entry.name.split("/")[0] in ("site", "job", "templates")


def test_a_bundle_is_named_by_its_hash_and_cached(archive: bundle.Archive) -> None:
    assert hashlib.sha256(archive.path.read_bytes()).hexdigest() == archive.sha256
    before = archive.path.stat().st_mtime_ns
    assert bundle.bundle(archive.path.parent, PYTHON) == archive
    assert archive.path.stat().st_mtime_ns == before


def test_a_compiled_bundle_starts_without_a_look_at_the_sources(
    tmp_path: Path, archive: bundle.Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("a", "b"):
        package = tmp_path / part / "spotkeeper"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("text, numbers = 'text', {3, 1, 2}\n")
        monkeypatch.setattr(bundle, "LIBRARY", package)
        made = bundle.bundle(tmp_path / part, PYTHON, compiled=True)
    assert made.sha256 == bundle.bundle(tmp_path / "a", PYTHON, compiled=True).sha256 != archive.sha256
    with tarfile.open(made.path) as tar:
        extract(tar, tmp_path)
    (tmp_path / "site/spotkeeper/__init__.py").write_text("raise SystemExit(1)")
    subprocess.run([sys.executable, "-c", "import spotkeeper"], cwd=tmp_path / "site", check=True)


def test_a_changed_source_is_another_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "spotkeeper"
    package.mkdir()
    (package / "__init__.py").write_text("one = 1\n")
    monkeypatch.setattr(bundle, "LIBRARY", package)
    first = bundle.bundle(tmp_path / "build", PYTHON)
    (package / "__init__.py").write_text("one = 2\n")
    assert bundle.bundle(tmp_path / "build", PYTHON).sha256 != first.sha256


def test_the_agent_imports_from_the_bundle_alone(unpacked: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import msgspec, jinja2, requests; "
         "import spotkeeper_agent.agent.agent, spotkeeper.contract.names; "
         "print(msgspec.__file__)"],
        env={"PYTHONPATH": str(unpacked / "site")}, cwd=unpacked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(unpacked))


def test_the_bundle_leaves_out_operators_programs(unpacked: Path) -> None:
    there = {path.name for path in (unpacked / "site/spotkeeper").iterdir()} - {"__pycache__"}
    assert there == {"__init__.py", "clock.py", "version.py", "contract", "train"}
    assert not (unpacked / "site/spotkeeper/contract/parse").exists()


def test_a_jobs_path_has_only_the_library(unpacked: Path) -> None:
    assert sorted(path.name for path in (unpacked / "job").iterdir()) == ["spotkeeper", "spotkeeper_agent"]
    there = sorted(path.name for path in (unpacked / "job/spotkeeper").iterdir())
    assert there == ["__init__.py", "clock.py", "train", "version.py"]
    assert sorted(path.name for path in (unpacked / "job/spotkeeper_agent").iterdir()) == ["__init__.py", "launcher"]


def test_the_function_is_pinned_and_has_its_entry_point(tmp_path: Path) -> None:
    source = bundle.function_source(tmp_path, "3.11")
    with zipfile.ZipFile(source.path) as archive:
        names = archive.namelist()
        entries = re.split(r"\n(?=\S)", archive.read("requirements.txt").decode().strip())
        main = archive.read("main.py").decode()
    assert names == sorted(names)
    assert "from spotkeeper.reconcile.service.http import main" in main
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries), "pip then takes nothing else"
    assert {entry.partition("==")[0] for entry in entries} >= {"functions-framework", "obstore", "msgspec", "pyjwt"}
    assert not any(name.startswith(("spotkeeper/cli/", "spotkeeper/local/", "spotkeeper_agent/")) for name in names)
    assert bundle.function_source(tmp_path, "3.11") == source


def test_requirements_are_resolved_for_the_functions_python() -> None:
    """Where one has hashes, pip wants all: one that only the other version needs would end the build."""
    assert bundle._needed('typing-extensions>=4; python_version < "3.13"', "3.13") is None
    assert bundle._needed('typing-extensions>=4; python_version < "3.13"', "3.11") == "typing-extensions"
    assert bundle._needed('tomli; python_full_version < "3.12"', "3.13") is None


def test_a_version_other_than_the_locks_is_an_error() -> None:
    with pytest.raises(bundle.BundleError, match=r"requirements\.lock does not have msgspec==0\.0\.1"):
        bundle._locked(["msgspec==0.0.1"])


def test_old_archives_are_deleted(tmp_path: Path) -> None:
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
import importlib, pathlib
from spotkeeper_agent.host import memory
import msgspec, jinja2, requests, spotkeeper, spotkeeper_agent
skipped = ("spotkeeper.train", "spotkeeper_agent.__main__", "spotkeeper_agent.launcher",
           "spotkeeper.contract.parse.yamltext",
           "spotkeeper.contract.parse.jobfile",
           "spotkeeper.contract.parse.sweepfile")  # the job's, with torch; programs; read on the operator's machine
site = pathlib.Path(spotkeeper.__file__).parents[1]
files = [file for name in ("spotkeeper", "spotkeeper_agent") for file in (site / name).rglob("*.py")]
names = [".".join(file.relative_to(site).with_suffix("").parts).removesuffix(".__init__") for file in files]
for name in names:
    if not name.startswith(skipped):
        importlib.import_module(name)
print(msgspec.json.decode(b"[1]"), len(names) > 50)
"""


def interpreter(version: str) -> str | None:
    """A Python of that version that this user may run: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}")]
    with suppress(OSError):  # a folder of another user
        found += map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))
    for program in filter(None, found):
        asks = [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        with suppress(OSError):
            if subprocess.run(asks, capture_output=True, text=True, check=False).stdout.strip() == version:
                return program
    return None


def test_a_python_that_this_user_may_not_read_or_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    program = tmp_path / "python3.7"
    program.write_text("#!/nowhere/that/is\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "glob", refuse)
    assert interpreter("3.7") is None
    monkeypatch.setattr(subprocess, "run", refuse)
    assert interpreter("3.7") is None


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


@pytest.mark.parametrize("python", size(OTHERS[:1], OTHERS))
def test_the_agent_runs_on_other_pythons(tmp_path: Path, python: str) -> None:
    program = interpreter(python)
    if program is None:
        pytest.skip(f"no Python {python} here that this user may run: install one (pyenv's are found)")
    site = fetched(tmp_path, python) / "site"
    command = [program, "-BS", "-W", "error", "-c", IMPORT_ALL]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(site)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[1] True", done.stderr


def test_arm_machines_get_their_own_wheels(tmp_path: Path) -> None:
    site = fetched(tmp_path, "3.12", "aarch64") / "site"
    native = list(site.rglob("*.so"))
    assert len(native) >= 2
    for file in native:
        with file.open("rb") as stream:
            assert stream.read(20)[18] == 0xB7, file  # EM_AARCH64


@pytest.mark.parametrize("runtime", ["python311", "python313"])
def test_the_functions_archive_is_for_the_python_that_runs_it(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AskedError(Exception):
        pass

    def source(build: Path, python: str) -> NoReturn:
        raise AskedError(python)

    monkeypatch.setattr(bundle, "bundle", lambda *_, **__: None)
    monkeypatch.setattr(bundle, "function_source", source)
    with pytest.raises(AskedError, match=rf"^3\.{runtime[-2:]}$"):
        gcp.declare(stackfiles.read("gcp", {"reconcile": {"runtime": runtime}}), tmp_path)
