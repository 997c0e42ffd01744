"""The bucket on S3: signed as botocore would, whole or not at all, in parts where it is large."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotkeeper.clock import Clock
from spotkeeper_agent.cloud import s3
from spotkeeper_agent.cloud.ec2 import Ec2
from spotkeeper_agent.cloud.storage import Bucket, HashedPart, MissingError, StorageError, Stored
from tests.agent.cloud import aws
from tests.agent.cloud.aws import MIN_PART, S3Server, keys_of
from tests.agent.cloud.imds import REGION, Imds, instance

NUMBER = itertools.count()


@pytest.fixture(scope="module")
def imds() -> Iterator[Imds]:
    with instance(**{"sk-stack": "test"}) as made:
        yield made


@pytest.fixture
def s3_server(imds: Imds) -> Iterator[S3Server]:
    with aws.s3(f"bucket-{next(NUMBER)}-x", lambda: keys_of(imds)) as made:
        yield made


@pytest.fixture
def bucket(imds: Imds, s3_server: S3Server) -> Bucket:
    return Ec2(Clock(), imds.url).storage(s3_server.url, s3_server.name)


class Sized(io.BytesIO):
    """A file that comes in small pieces, as one that is hashed on the way does."""

    def __len__(self) -> int:
        return len(self.getvalue())

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(1 << 20, len(self) if size is None or size < 0 else size))


LARGE = bytes(range(256)) * (s3.PART_BYTES // 256) * 2 + b"and the end"
SMALL = b"a model"


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


# Names as they are in use, and such as a signature gets wrong.
@pytest.mark.parametrize("name", ["jobs/a/out/0/model.pt", "a b+c=d&e%20f/~é/..x", "jobs//two", "x/*'()!@:,;$"])
def test_written_objects_are_read_back(bucket: Bucket, s3_server: S3Server, name: str) -> None:
    bucket.write(name, b"line\n")
    assert b"".join(bucket.read(name)) == b"line\n"
    assert bucket.find(name) == Stored(5, md5(b"line\n"))
    assert bucket.send(name, Sized(SMALL)) == bucket.find(name) == Stored(len(SMALL), md5(SMALL))
    assert b"".join(bucket.read(name)) == SMALL
    assert s3_server.refused == []


def test_a_part_that_is_hashed_first_is_sent_in_pieces_and_deleted(
    bucket: Bucket, s3_server: S3Server, tmp_path: Path
) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(SMALL * 50_000)
    with path.open("rb") as file:
        assert bucket.send("logs/x", HashedPart(file, 300_000)) == Stored(300_000, md5((SMALL * 50_000)[:300_000]))
    assert s3_server.content("logs/x") == (SMALL * 50_000)[:300_000]
    for _ in range(2):
        bucket.delete("logs/x")
        assert bucket.find("logs/x") is None
    assert s3_server.refused == []


def test_missing_objects_are_reported(bucket: Bucket) -> None:
    assert bucket.find("no/such") is None
    with pytest.raises(MissingError, match="no/such"):
        list(bucket.read("no/such"))


def test_concurrent_creates_have_one_winner(bucket: Bucket, s3_server: S3Server) -> None:
    assert bucket.create("ckpt/1-20/COMMIT", b"first")
    assert not bucket.create("ckpt/1-20/COMMIT", b"second")
    assert s3_server.content("ckpt/1-20/COMMIT") == b"first"


def test_an_empty_file_is_stored(bucket: Bucket, s3_server: S3Server) -> None:
    assert bucket.send("empty", Sized(b"")) == Stored(0, md5(b""))
    assert s3_server.content("empty") == b""


def test_a_large_file_goes_up_in_parts(bucket: Bucket, s3_server: S3Server) -> None:
    assert bucket.send("jobs/a/out/0/large file", Sized(LARGE)) == Stored(len(LARGE), md5(LARGE))
    assert bucket.find("jobs/a/out/0/large file") == Stored(len(LARGE), ""), "it no longer says what all parts are"
    assert s3_server.asked["PUT part"] == 3 and s3_server.refused == [] and s3_server.unfinished() == 0
    assert hashlib.sha256(b"".join(bucket.read("jobs/a/out/0/large file"))).digest() == hashlib.sha256(LARGE).digest()
    assert s3.PART_BYTES >= MIN_PART, "S3 takes no smaller part"


@pytest.mark.parametrize("size", [s3.PART_BYTES, s3.PART_BYTES + 1])
def test_a_file_of_exactly_one_part_is_stored(bucket: Bucket, s3_server: S3Server, size: int) -> None:
    assert bucket.send("x", Sized(LARGE[:size])).size == size
    assert s3_server.asked["PUT part"] == (0 if size == s3.PART_BYTES else 2)
    assert len(s3_server.content("x")) == size


def test_part_sizes_keep_the_number_of_parts_within_s3s_limit(
    bucket: Bucket, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MOST_PARTS", 2)
    bucket.send("x", Sized(LARGE))
    assert s3_server.asked["PUT part"] == 2


def test_a_part_that_is_lost_is_sent_again(bucket: Bucket, s3_server: S3Server) -> None:
    failures = iter([503, 0, 500, 0])
    s3_server.fault = lambda what, _: next(failures, 0) if what == "PUT part" else 0
    assert bucket.send("x", Sized(LARGE)).size == len(LARGE)
    assert s3_server.asked["PUT part"] == 5 and s3_server.content("x") == LARGE


@pytest.mark.parametrize("what", ["PUT part", "POST upload"])
def test_a_failed_upload_leaves_the_old_object_and_no_parts(bucket: Bucket, s3_server: S3Server, what: str) -> None:
    bucket.write("x", b"before")
    begun = itertools.count()
    s3_server.fault = lambda asked, _: 500 if asked == what and (what == "PUT part" or next(begun) > 0) else 0
    with pytest.raises(StorageError, match="HTTP 500"):
        bucket.send("x", Sized(LARGE))
    assert s3_server.content("x") == b"before" and s3_server.unfinished() == 0


def test_an_aborted_upload_leaves_nothing(bucket: Bucket, s3_server: S3Server) -> None:
    class Broken(Sized):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > s3.PART_BYTES:
                raise StorageError("broken off")
            return super().read(size)

    with pytest.raises(StorageError, match="broken off"):
        bucket.send("x", Broken(LARGE))
    assert bucket.find("x") is None and s3_server.unfinished() == 0


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "in parts"])
def test_a_damaged_upload_is_refused(bucket: Bucket, s3_server: S3Server, content: bytes) -> None:
    s3_server.on_the_way = lambda body: body[:-1] + bytes([body[-1] ^ 1]) if body else body
    with pytest.raises(StorageError, match="XAmzContentSHA256Mismatch"):
        bucket.send("x", Sized(content))
    assert bucket.find("x") is None


def test_a_short_file_is_an_error(bucket: Bucket, s3_server: S3Server) -> None:
    class Shrunk(Sized):
        def __len__(self) -> int:
            return super().__len__() + 7

    with pytest.raises(StorageError, match="shorter than announced"):
        bucket.send("x", Shrunk(SMALL))
    with pytest.raises(StorageError, match="shorter than announced"):
        bucket.send("x", Shrunk(LARGE))
    assert bucket.find("x") is None and s3_server.unfinished() == 0


def test_expired_keys_are_reported(bucket: Bucket, s3_server: S3Server, imds: Imds) -> None:
    bucket.write("x", b"1")
    imds.new_keys()  # the bucket knows the new ones only; ours are still good by our clock
    with pytest.raises(StorageError, match="HTTP 403 InvalidAccessKeyId"):
        bucket.write("x", b"2")


def test_a_wrong_clock_is_reported(imds: Imds, s3_server: S3Server) -> None:
    slow = Ec2(Clock(virtual_epoch=-3600.0), imds.url).storage(s3_server.url, s3_server.name)
    with pytest.raises(StorageError, match="RequestTimeTooSkewed"):
        slow.write("x", b"")


@pytest.mark.parametrize(
    ("name", "region", "url"),
    [
        ("sk-prod", "eu-west-1", "https://sk-prod.s3.eu-west-1.amazonaws.com"),
        ("sk.prod", "us-east-1", "https://s3.us-east-1.amazonaws.com/sk.prod"),
        ("sk-prod", "cn-north-1", "https://sk-prod.s3.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_bucket_addresses(name: str, region: str, url: str) -> None:
    assert s3.address(name, region) == url


def test_completion_that_fails_after_200_is_a_failure(bucket: Bucket, s3_server: S3Server) -> None:
    """S3 sends the status before it has put the parts together."""
    s3_server.late_error = b"<Error><Code>InternalError</Code></Error>"
    with pytest.raises(StorageError, match="InternalError"):
        bucket.send("x", Sized(LARGE))


@pytest.mark.parametrize(
    ("root", "region"), [("https://s3.dualstack.eu-west-1.amazonaws.com", "eu-west-1"), ("http://127.0.0.1:9", REGION)]
)
def test_a_bucket_in_another_region_is_signed_for_there(imds: Imds, root: str, region: str) -> None:
    assert Ec2(Clock(), imds.url).storage(root, "b")._scope.region == region
