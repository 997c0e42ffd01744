"""What Lambda runs: it needs nothing that its runtime does not have, and equal sources give equal bytes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infra import bundle
from infra.aws.reconcile import HANDLER

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
import {module} as door, spotkeeper.reconcile.ec2, spotkeeper.reconcile.round
from spotkeeper.reconcile.store import open_store
assert callable(door.{name}) and callable(open_store)
print([name for name in ("jwt", "requests", "botocore", "spotkeeper.reconcile.gce") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_equal_sources_give_equal_bytes(archive: bundle.Archive, tmp_path: Path) -> None:
    again = bundle.lambda_source(tmp_path, HERE)
    assert again.path.read_bytes() == archive.path.read_bytes() and again.path != archive.path
    assert archive.sha256 == hashlib.sha256(archive.path.read_bytes()).hexdigest() == again.sha256


def test_what_only_others_need_stays_out(archive: bundle.Archive) -> None:
    names = zipfile.ZipFile(archive.path).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"msgspec", "obstore", "spotkeeper", "typing_extensions.py"}
    parts = {name.split("/")[1] for name in names if name.startswith("spotkeeper/")}
    assert not parts & {"cli", "local", "train", "vm"} and "reconcile" in parts
    assert archive.path.stat().st_size < 50_000_000, "Lambda takes 250 MB unpacked"
