"""A job's source: fetched once by its hash, unpacked inside its folder or not at all."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotkeeper.clock import Clock
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.cloud.storage import Bucket, StorageError
from spotkeeper_agent.job.source import SourceError, fetch, forget_all
from tests.agent.fakes import JOB, Fake, source


@pytest.fixture
def bucket(fake: Fake) -> Iterator[Bucket]:
    fake.instance("7", "sk-test-x")
    yield Gce(Clock(), fake.listen("7")).storage(fake.url, "bucket")


class KilledError(BaseException):
    """At this very moment."""


def test_source_is_fetched_once_by_its_hash(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    sha256 = source(fake, {"train.py": "print(1)", "sub/data.txt": "d"})
    folder = fetch(bucket, JOB, sha256, tmp_path / "src")
    assert (folder / "sub/data.txt").read_text() == "d"
    fake.objects.clear()
    assert fetch(bucket, JOB, sha256, tmp_path / "src") == folder
    assert sorted(path.name for path in (tmp_path / "src").iterdir()) == [sha256]
    assert list(fetch(bucket, JOB, None, tmp_path / "src").iterdir()) == []


def test_sources_are_deleted_whole(fake: Fake, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that dies between two files leaves nothing that passes for a source, and the next one ends it."""
    sha256 = source(fake, {"train.py": "print(1)", "sub/data.txt": "d"})
    fetch(bucket, JOB, sha256, tmp_path / "src")
    (tmp_path / "src/tmpx.tar").write_bytes(b"a fetch that was cut short")

    def delete(at: int, name: str) -> None:
        for left in Path(f"/proc/self/fd/{at}/{name}").rglob("train.py"):
            left.unlink()
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(beneath, "_delete", delete)
        with pytest.raises(KilledError):
            forget_all(tmp_path / "src")
    assert (fetch(bucket, JOB, sha256, tmp_path / "src") / "train.py").read_text() == "print(1)"
    forget_all(tmp_path / "src")
    forget_all(tmp_path / "src")
    assert list(tmp_path.iterdir()) == []


def test_source_of_another_hash_is_not_used(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    sha256 = source(fake, {"train.py": "good"})
    fake.objects[f"jobs/{JOB}/source/{sha256}"] += b"x"
    with pytest.raises(SourceError, match="not used"):
        fetch(bucket, JOB, sha256, tmp_path / "src")
    assert list((tmp_path / "src").iterdir()) == []
    with pytest.raises(StorageError, match="it does not exist"):
        fetch(bucket, JOB, "0" * 64, tmp_path / "src")


@pytest.fixture(params=["as it is", "before 3.11.4"])
def tar_filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12 has Python 3.11.2, whose tarfile knows no filters."""
    if request.param == "before 3.11.4":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.delattr(tarfile.TarFile, "extractall")  # its ``filter`` would be a TypeError there


@pytest.mark.usefixtures("tar_filters")
def test_source_is_unpacked_by_every_python(fake: Fake, bucket: Bucket, tmp_path: Path) -> None:
    sha256 = source(fake, {"train.py": "print(1)", "sub/data.txt": "d"})
    folder = fetch(bucket, JOB, sha256, tmp_path / "src")
    assert (folder / "sub/data.txt").read_text() == "d"


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.usefixtures("tar_filters")
@pytest.mark.parametrize(
    "members",
    [
        [_member("link", tarfile.SYMTYPE, "../outside")],
        [_member("link", tarfile.SYMTYPE, "/etc/outside")],
        [_member("link", tarfile.LNKTYPE, "../outside")],
        [_member("../outside")],
        [_member("pipe", tarfile.FIFOTYPE)],
        [_member("null", tarfile.CHRTYPE)],
        [  # each looks harmless by its name
            _member("a/b/up", tarfile.SYMTYPE, "../.."),
            _member("a/b/up/link", tarfile.SYMTYPE, "../../.."),
            _member("link/outside"),
        ],
    ],
)
def test_source_cannot_write_outside(
    fake: Fake, bucket: Bucket, tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member)
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    fake.objects[f"jobs/{JOB}/source/{sha256}"] = buffer.getvalue()
    with pytest.raises(SourceError, match="cannot unpack"):
        fetch(bucket, JOB, sha256, tmp_path / "src")
    assert list((tmp_path / "src").iterdir()) == []
    assert not (tmp_path / "outside").exists()
