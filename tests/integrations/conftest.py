"""Buckets of every kind, which fail on demand and count their calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.reconcile.store.objects import Blob, Deadline, Objects, UnavailableError
from spotkeeper.reconcile.store.objects_obstore import open_bucket
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects
from tests.reconcile import gcs, s3

Clients = Callable[[], Objects]  # one fresh bucket; each call opens it anew, as a process of its own would


class Flaky:
    """A client of a bucket whose creates fail at random, before or after they were carried out.

    ``between``: is called before some creates, so that another writer comes first. ``calls``: of each method.
    """

    def __init__(self, inner: Objects, rng: random.Random | None = None, fails: float = 0.0) -> None:
        self._inner, self._rng, self._fails = inner, rng or random.Random(0), fails  # noqa: S311
        self.between: Callable[[], None] = lambda: None
        self.calls: Counter[str] = Counter()

    def until(self, deadline: Deadline) -> Flaky:
        return self

    def create(self, key: str, data: bytes) -> str:
        self.calls["create"] += 1
        self.between()
        if self._rng.random() < self._fails:
            raise UnavailableError(f"{key}: not sent")
        tag = self._inner.create(key, data)
        if self._rng.random() < self._fails:
            raise UnavailableError(f"{key}: the answer was lost")
        return tag

    def get_many(self, keys: Sequence[str]) -> list[Blob | None]:
        return [self.get(key) for key in keys]

    def get(self, key: str) -> Blob | None:
        self.calls["get"] += 1
        return self._inner.get(key)

    def list(self, prefix: str, start: str = "") -> list[str]:
        self.calls["list"] += 1
        return self._inner.list(prefix, start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3.serve() as endpoint:
        yield endpoint


@pytest.fixture(params=["sqlite", "s3", "gcs"])
def clients(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    if request.param == "sqlite":
        yield lambda: SqliteObjects(tmp_path / "bucket.db")
    elif request.param == "gcs":
        with gcs.serve() as google:
            yield lambda: open_bucket("gs://sk-bucket", google.endpoint)
    else:
        yield s3.fresh_bucket(request.getfixturevalue("s3_endpoint"), tmp_path, monkeypatch)
