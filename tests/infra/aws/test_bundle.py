"""What Lambda runs: it needs nothing that its runtime does not have, and equal sources give equal bytes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infra import bundle
from infra.aws.function import HANDLER

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bundle.Archive:
    return bundle.lambda_source(tmp_path_factory.mktemp("build"), HERE)


def test_the_handler_starts_with_what_is_in_the_archive(archive: bundle.Archive, tmp_path: Path) -> None:
    """Without any installed package: a part that is missing would be found by the first tick."""
    with zipfile.ZipFile(archive.path) as file:
        file.extractall(tmp_path)
    module, _, name = HANDLER.rpartition(".")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import {module} as function, spotkeeper.reconcile.clouds.ec2.cloud, spotkeeper.reconcile.controller.reconcile_job
from spotkeeper.reconcile.store.store import open_store
assert callable(function.{name}) and callable(open_store)
unwanted = ("jwt", "requests", "botocore", "spotkeeper.reconcile.clouds.gce.cloud")
print([name for name in unwanted if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_no_wheel_needs_a_newer_glibc_than_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lambda's Python 3.11 stands on glibc 2.26: a wheel for 2.28 fails at the first import, of every tick."""
    wheel = "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_{}_x86_64\n"
    assert bundle.runs_with(wheel.format(17), 26) and not bundle.runs_with(wheel.format(28), 26)
    assert bundle.runs_with(wheel.format(28), bundle.lambda_glibc("3.12"))
    assert bundle.runs_with("Tag: py3-none-any\n", 26) and not bundle.runs_with("Tag: cp311-cp311-linux_x86_64\n", 26)
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for obstore")

    monkeypatch.setattr(bundle, "runs_with", lambda _, glibc: glibc >= 28)
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(bundle.BundleError, match=r"Python 3\.11 on x86_64 with glibc 2\.26: ERROR: No matching"):
        bundle.lambda_source(tmp_path, "3.11")
    platforms = {word.partition("=")[2] for word in asked[0] if word.startswith("--platform=")}
    assert "manylinux_2_26_x86_64" in platforms and "manylinux_2_28_x86_64" not in platforms


def test_equal_sources_give_equal_bytes(archive: bundle.Archive, tmp_path: Path) -> None:
    again = bundle.lambda_source(tmp_path, HERE)
    assert again.path.read_bytes() == archive.path.read_bytes() and again.path != archive.path
    assert archive.sha256 == hashlib.sha256(archive.path.read_bytes()).hexdigest() == again.sha256


def test_the_archive_leaves_out_other_programs(archive: bundle.Archive) -> None:
    names = zipfile.ZipFile(archive.path).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"msgspec", "obstore", "spotkeeper", "typing_extensions.py"}
    parts = {name.split("/")[1] for name in names if name.startswith("spotkeeper/")}
    assert not parts & {"cli", "local", "train", "vm"} and "reconcile" in parts
    assert archive.path.stat().st_size < 50_000_000, "Lambda takes 250 MB unpacked"
