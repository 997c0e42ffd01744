"""What a power cut would leave: kill -9 loses no byte that a call has taken, so the order of fsyncs is judged here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import durable, store
from spotkeeper.train.checkpoint.client import new_manifest
from spotkeeper.train.checkpoint.durable import PAGE
from spotkeeper.train.checkpoint.protocol import Stretch
from spotkeeper.train.checkpoint.store import COMMIT, LATEST, SKELETON, STATE
from tests.train.crash.node import GANG

HINT = (LATEST, f"{LATEST}.tmp")  # nothing reads it


class Disk:
    """Which files and names are only in memory, by the calls that were made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes: set[Path] = set()  # files with bytes that no fsync has covered
        self.names: set[Path] = set()  # made or renamed since their folder's fsync
        self.at_commit: set[Path] | None = None  # the former, when COMMIT got its name
        self._paths: dict[int, Path] = {}
        for name in ("open", "mkdir", "pwrite", "write", "ftruncate", "fsync", "replace"):
            patch.setattr(os, name, self._watched(getattr(os, name), getattr(self, f"_{name}")))

    def _watched(self, real: Any, note: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            done = real(*args, **kwargs)
            note(done, *args)
            return done

        return call

    def _open(self, fd: int, path: Any, flags: int, *_: Any) -> None:
        self._paths[fd] = Path(path)
        if flags & os.O_CREAT:
            self.names.add(Path(path))

    def _mkdir(self, _: None, path: Any, *__: Any) -> None:
        self.names.add(Path(path))

    def _pwrite(self, _: int, fd: int, *__: Any) -> None:
        self.bytes.add(self._paths[fd])

    _write = _ftruncate = _pwrite

    def _fsync(self, _: None, fd: int) -> None:
        path = self._paths[fd]
        self.bytes.discard(path)
        self.names = {name for name in self.names if name.parent != path}

    def _replace(self, _: None, source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        if target.name == COMMIT:
            self.at_commit = set(self.bytes)
        self.names = (self.names - {source}) | {target}
        if source in self.bytes:
            self.bytes = (self.bytes - {source}) | {target}


@pytest.mark.parametrize("part", [False, True])
def test_commit_is_written_after_the_bytes_and_before_the_report(tmp_path: Path, part: bool) -> None:
    folder, commit = tmp_path / "ckpt", Commit(1, 2)
    folder.mkdir()
    buffer = durable.Buffer()
    buffer.reserve(4 * PAGE)
    stretches = (Stretch(STATE, 0, 2 * PAGE + 5), Stretch(SKELETON, 3 * PAGE, 100))
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        written = durable.write_checkpoint(folder, new_manifest(commit, GANG, {}), buffer, stretches, part)
        if part:
            assert not disk.bytes and not disk.names
            store.publish(folder / str(commit), written)
    buffer.close()
    assert disk.at_commit == set(), "COMMIT had a name while bytes were in memory only"
    assert {path.name for path in disk.bytes | disk.names} <= {*HINT}
    assert store.complete(folder) == [commit]
