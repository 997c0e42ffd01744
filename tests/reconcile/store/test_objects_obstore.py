"""What obstore is asked for, as values, and how its errors are told: without a server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore import exceptions

from spotkeeper.reconcile.store import credentials
from spotkeeper.reconcile.store.objects import BucketRefusedError, ConflictError, UnavailableError
from spotkeeper.reconcile.store.objects_obstore import ObstoreObjects, open_bucket

LONG = {"timeout": timedelta(seconds=15), "connect_timeout": timedelta(seconds=5)}
BRIEF = LONG | {"timeout": timedelta(seconds=5)}
AGAIN = {"max_retries": 4, "retry_timeout": timedelta(seconds=10)}
AT = "http://127.0.0.1:9"


def keys() -> None:
    """The caller's credentials."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Open a bucket; return what obstore's store was made with."""
    asked: dict[str, Any] = {}

    def made(kind: str) -> Callable[..., object]:
        return lambda name, **options: asked.update(kind=kind, name=name, **options)

    monkeypatch.setattr(obstore.store, "S3Store", made("s3"))
    monkeypatch.setattr(obstore.store, "GCSStore", made("gcs"))
    monkeypatch.setattr(credentials, "s3", lambda: ("eu-west-1", keys))
    monkeypatch.setattr(credentials, "gcs", lambda: keys)

    def opened(*args: Any, **more: Any) -> dict[str, Any]:
        bucket = open_bucket(*args, **more)
        return asked | {"field": bucket._field}

    return opened


def test_what_a_bucket_of_s3_is_opened_with(opened: Callable[..., dict[str, Any]]) -> None:
    s3 = {"kind": "s3", "name": "b", "field": "e_tag", "retry_config": AGAIN, "credential_provider": keys}
    here = {"region": "eu-west-1"}
    assert opened("s3://b") == {**s3, "prefix": None, "config": here, "client_options": LONG}
    assert opened("s3://b/a/c/") == {**s3, "prefix": "a/c", "config": here, "client_options": LONG}
    brief = AGAIN | {"retry_timeout": timedelta(seconds=2)}
    assert opened("s3://b", brief=True) == {
        **s3,
        "prefix": None,
        "config": here,
        "client_options": BRIEF,
        "retry_config": brief,
    }
    private = {"endpoint": "https://s3.example", **here}
    assert opened("s3://b", "https://s3.example") == {**s3, "prefix": None, "config": private, "client_options": LONG}
    plain = LONG | {"allow_http": True}
    assert opened("s3://b", AT) == {**s3, "prefix": None, "config": {"endpoint": AT, **here}, "client_options": plain}


def test_a_bucket_of_s3_without_a_known_region_leaves_it_to_obstore(
    opened: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "s3", lambda: (None, None))
    found = opened("s3://b")
    assert (found["config"], found["credential_provider"]) == ({}, None)


def test_what_a_bucket_of_google_cloud_is_opened_with(opened: Callable[..., dict[str, Any]]) -> None:
    gcs = {"kind": "gcs", "name": "b", "field": "version", "retry_config": AGAIN, "credential_provider": keys}
    assert opened("gs://b/a") == {**gcs, "prefix": "a", "config": {}, "client_options": LONG}
    private = {"base_url": "https://storage.example"}
    assert opened("gs://b", "https://storage.example") == {
        **gcs,
        "prefix": None,
        "config": private,
        "client_options": LONG,
    }
    found = opened("gs://b", AT)
    assert found.pop("credential_provider")() == {"token": "", "expires_at": None}, "no token travels unencrypted"
    del gcs["credential_provider"]
    unsigned = {"base_url": AT, "skip_signature": True}
    assert found == {**gcs, "prefix": None, "config": unsigned, "client_options": LONG | {"allow_http": True}}


CALLS: dict[str, tuple[str, Callable[[ObstoreObjects], object], str]] = {
    "get": ("get", lambda bucket: bucket.get("a/key"), "a/key"),
    "create": ("put", lambda bucket: bucket.create("a/key", b""), "a/key"),
    "replace": ("put", lambda bucket: bucket.replace("a/key", b"", "tag"), "a/key"),
    "put": ("put", lambda bucket: bucket.put("a/key", b""), "a/key"),
    "list": ("list", lambda bucket: bucket.list("a/"), "a/"),
    "list from": ("list", lambda bucket: bucket.list("a/", "k"), "a/"),
    "newest": ("list", lambda bucket: bucket.newest("a/", 3), "a/"),
    "delete": ("delete", lambda bucket: bucket.delete("a/key"), "a/key"),
}
ERRORS: list[tuple[Exception, type[Exception], str]] = [
    (exceptions.GenericError("down\nrequest dump"), UnavailableError, "down"),
    (
        exceptions.PermissionDeniedError("x"),
        BucketRefusedError,
        "PermissionDeniedError: this identity lacks a permission, or the store does not support it",
    ),
    (exceptions.PreconditionError("x"), ConflictError, "exists, or changed since it was read"),
    (exceptions.AlreadyExistsError("x"), ConflictError, "exists, or changed since it was read"),
]


@pytest.mark.parametrize(("error", "kind", "why"), ERRORS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_names_its_key_and_only_what_may_pass_is_repeated(
    call: str, error: Exception, kind: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, make, key = CALLS[call]
    asked = []

    def failing(*args: object, **options: object) -> object:
        asked.append(args)
        raise error

    monkeypatch.setattr(obstore, verb, failing)
    with pytest.raises(kind) as caught:
        make(ObstoreObjects(obstore.store.MemoryStore()))
    assert str(caught.value) == f"{key}: {why}"
    assert len(asked) == (2 if kind is UnavailableError else 1)


def test_keys_that_begin_alike_are_listed_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the folder's first key: a ledger has thousands before them."""
    bucket, real, asked = ObstoreObjects(obstore.store.MemoryStore()), obstore.list, []

    def listing(store: Any, **options: Any) -> Any:
        asked.append(options)
        return real(store, **options)

    for number in range(3):
        bucket.put(f"f/{number}.x", b"")
    monkeypatch.setattr(obstore, "list", listing)
    assert bucket.list("f/", "1.") == ["f/1.x"]
    assert asked == [{"prefix": "f/", "offset": "f/1-", "chunk_size": 50}]
