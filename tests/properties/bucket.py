"""The bucket in memory, under the shipped ``Store``: conditional writes as S3 and GCS have them, with hooks
around every call, lost answers and throttling.

``watch`` is told of every version of a record, so that what may only rise is seen at the very write.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotkeeper.reconcile.store.objects import Blob, ConflictError, Deadline, UnavailableError, check_key, check_prefix
from tests.properties.actors import current, hook


@dataclass
class Weather:
    """What the function's next calls meet; counters run down. Users and tests find the bucket as it should be."""

    lost: int = 0  # writes that happen though their answer is lost
    throttled: int = 0  # writes that are refused (429), twice, so the store gives up
    down: bool = False


@dataclass
class Bucket:
    """``Objects`` over a dictionary."""

    weather: Weather = field(default_factory=Weather)
    watch: Callable[[str, bytes], None] = lambda key, data: None
    blobs: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    counter: int = 0
    writes: int = 0

    def until(self, deadline: Deadline) -> Bucket:
        return self

    def get(self, key: str) -> Blob | None:
        check_key(key)
        self._call(f"get {key}")
        found = self.blobs.get(key)
        return Blob(found[0], str(found[1])) if found else None

    def refresh(self, key: str, known: Blob) -> Blob | None:
        found = self.get(key)
        return known if found is not None and found.tag == known.tag else found

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        return [self.get(key) for key in keys]

    def list(self, prefix: str, start: str = "") -> builtins.list[str]:
        check_prefix(prefix)
        self._call(f"list {prefix}")
        return sorted(key for key in self.blobs if key.startswith(prefix + start))

    def create(self, key: str, data: bytes) -> str:
        self._before(f"create {key}", key)
        if key in self.blobs:
            raise ConflictError(f"{key}: exists")
        return self._write(key, data, f"created {key}")

    def replace(self, key: str, data: bytes, tag: str) -> str:
        self._before(f"replace {key}", key)
        if key not in self.blobs or str(self.blobs[key][1]) != tag:
            raise ConflictError(f"{key}: changed since it was read")
        return self._write(key, data, f"replaced {key}")

    def put(self, key: str, data: bytes) -> str:
        self._before(f"put {key}", key)
        return self._write(key, data, f"put {key}")

    def delete(self, key: str) -> None:
        self._before(f"delete {key}", key)
        self.blobs.pop(key, None)
        self._after(f"deleted {key}")

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def plant(self, key: str, data: bytes) -> None:
        """Write as another writer that the test does not control: an operator, another version."""
        self.counter += 1
        self.blobs[key] = (data, self.counter)

    def _call(self, what: str) -> None:
        hook(what)
        if self.weather.down and current() is not None:
            raise UnavailableError(f"{what}: no answer")

    def _before(self, what: str, key: str) -> None:
        check_key(key)
        self._call(what)
        if self.weather.throttled > 0 and current() is not None:
            self.weather.throttled -= 1
            raise UnavailableError(f"{what}: 429, twice")

    def _write(self, key: str, data: bytes, what: str) -> str:
        self.counter += 1
        self.writes += 1
        self.blobs[key] = (data, self.counter)
        self.watch(key, data)
        self._after(what)
        return str(self.counter)

    def _after(self, what: str) -> None:
        if self.weather.lost > 0 and current() is not None:
            self.weather.lost -= 1
            hook(what)
            raise UnavailableError(f"{what}: the answer was lost")
        hook(what)
