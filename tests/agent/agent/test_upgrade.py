"""The agent of another bundle: verified before it is used, tried a few times, and the old ones go."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spotkeeper_agent.agent import upgrade
from spotkeeper_agent.agent.upgrade import TRIES, Bundles, Upgrade
from spotkeeper_agent.cloud.storage import Bucket
from spotkeeper_agent.core.events import BundleReady
from spotkeeper_agent.job.source import SourceError

OLD, NEW = "a" * 64, "b" * 64


class OneObject:
    """A bucket with one bundle, read in pieces."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.read_of: list[str] = []

    def read(self, name: str) -> Iterator[bytes]:
        self.read_of.append(name)
        yield self.content[:10]
        yield self.content[10:]


def a_bundle(name: str = "site/spotkeeper/__init__.py") -> tuple[Bucket, str]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"new"))
    return cast(Bucket, OneObject(buffer.getvalue())), hashlib.sha256(buffer.getvalue()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bundle" / OLD / "site").mkdir(parents=True)
    (tmp_path / "bundle/current").symlink_to(tmp_path / "bundle" / OLD)
    return tmp_path / "bundle"


def test_an_upgrade_needs_another_hash_and_a_bundled_agent(folder: Path) -> None:
    bundles = Bundles(folder, folder / OLD)
    assert bundles.wants(NEW)
    assert not bundles.wants(OLD)
    assert not bundles.wants("")
    assert not bundles.wants("../../etc")
    assert not Bundles(folder, None).wants(NEW)
    assert upgrade.own_folder() is None, "the tests run from a checkout"


def test_a_bundle_is_verified_and_appears_complete(folder: Path) -> None:
    bucket, sha256 = a_bundle()
    (folder / f"{sha256}.part/junk").mkdir(parents=True)
    made = Bundles(folder, folder / OLD).fetch(bucket, sha256)
    assert made == folder / sha256
    assert (made / "site/spotkeeper/__init__.py").read_text() == "new"
    assert sorted(path.name for path in made.iterdir()) == ["site"]


def test_a_bundle_with_a_wrong_hash_is_not_unpacked_and_retried_a_few_times(folder: Path) -> None:
    bucket, _ = a_bundle()
    bundles = Bundles(folder, folder / OLD)
    for _ in range(TRIES):
        assert bundles.wants(NEW)
        with pytest.raises(SourceError, match="its hash is"):
            bundles.fetch(bucket, NEW)
    assert not bundles.wants(NEW)
    assert not (folder / NEW).exists()


def test_a_bundle_that_would_write_outside_is_refused(folder: Path, tmp_path: Path) -> None:
    bucket, sha256 = a_bundle("../../outside")
    with pytest.raises(SourceError, match="cannot unpack"):
        Bundles(folder, folder / OLD).fetch(bucket, sha256)
    assert not (folder / sha256).exists() and not (tmp_path / "outside").exists()


def test_a_failing_new_agent_is_replaced_by_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *given: executed.append(given))
    (folder / NEW).mkdir()
    for _ in range(TRIES):
        bundles = Bundles(folder, folder / OLD)  # the unit has started the old one anew
        assert bundles.wants(NEW)
        bundles.become(folder / NEW)
    env = os.environ | {"PYTHONPATH": str(folder / NEW / "site")}
    assert executed == [(sys.executable, sys.orig_argv, env)] * TRIES
    bundles = Bundles(folder, folder / OLD)
    bundles.proved()  # the old one is answered as ever
    assert not bundles.wants(NEW)
    assert bundles.wants("c" * 64), "a repaired one has another hash"
    assert (folder / "current").resolve().name == OLD


def test_an_answered_agent_becomes_the_current_bundle(folder: Path) -> None:
    (folder / NEW).mkdir()
    Bundles(folder, folder / OLD)._write_tried(NEW, 1)
    Bundles(folder, folder / NEW).proved()
    assert (folder / "current").resolve().name == NEW
    assert not (folder / "tried").exists()


def test_unused_bundles_are_deleted(folder: Path) -> None:
    for age, name in enumerate("cdef"):
        path = folder / (name * 64)
        path.mkdir()
        os.utime(path, (1000 - age, 1000 - age))
    (folder / NEW).mkdir()
    bundles = Bundles(folder, folder / NEW)
    assert bundles.prune("") == [], "not before it has been answered"
    bundles.proved()
    launcher = folder / ("f" * 64) / "job"
    gone = bundles.prune(str(launcher))
    assert sorted(gone) == ["c" * 64, "d" * 64, "e" * 64]
    assert sorted(path.name[0] for path in folder.iterdir() if len(path.name) == 64) == ["a", "b", "f"]


def test_a_bundle_that_another_user_could_write_is_named(tmp_path: Path) -> None:
    file = tmp_path / NEW / "site"
    file.parent.mkdir()
    file.touch()
    file.chmod(0o662)
    with pytest.raises(PermissionError) as caught:
        upgrade.check_own(tmp_path / NEW)
    why = f"not executed, because other users than the agent can write it (user {os.geteuid()}, mode 662)"
    assert caught.value.args[:2] == (errno.EPERM, why) and caught.value.filename == str(file)
    file.chmod(0o640)
    upgrade.check_own(tmp_path / NEW)
    folder = file.with_name("job")
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=r"mode 777\)"):
        upgrade.check_own(tmp_path / NEW)
    folder.chmod(0o1777)  # as /tmp: others cannot replace what is in it
    upgrade.check_own(tmp_path / NEW)


@pytest.mark.parametrize(("up", "serving", "prunes"), [(True, True, True), (False, False, True), (False, True, False)])
def test_an_upgrade_is_fetched_by_the_helper_then_executed_and_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, up: bool, serving: bool, prunes: bool
) -> None:
    bucket, sha256 = a_bundle()
    for age, name in enumerate("cd"):
        (folder / (name * 64)).mkdir()
        os.utime(folder / (name * 64), (1000 + age, 1000 + age))
    asked: list[tuple[str, Callable[[], object]]] = []
    lines: list[tuple[str, dict[str, object]]] = []
    helper = SimpleNamespace(do=lambda name, work: asked.append((name, work)))
    launcher = SimpleNamespace(up=up, home="")
    log = cast(Any, lambda event, **values: lines.append((event, values)))
    bundles = Bundles(folder, folder / OLD)
    found = Upgrade(bundles, bucket, cast(Any, helper), cast(Any, launcher), log)
    found.succeed()
    assert (found.folder, lines) == (None, []), "nothing newer is ready"
    found.heard(OLD, serving)
    assert asked == [] and lines == [("bundle.pruned", {"bundles": ["c" * 64]})] * prunes
    found.heard(sha256, serving)
    ((name, work),) = asked
    assert (name, work()) == ("bundle", BundleReady(folder / sha256))
    lines.clear()
    found.ready(folder / sha256)
    found.heard(sha256, serving)
    assert len(asked) == 1, "it is fetched once"
    executed: list[Path] = []
    monkeypatch.setattr(bundles, "become", executed.append)
    found.succeed()
    assert [line for line in lines if line[0] != "bundle.pruned"] == [
        ("bundle.ready", {"bundle": sha256}),
        ("agent.succeed", {"bundle": sha256}),
    ]
    assert executed == [folder / sha256]
