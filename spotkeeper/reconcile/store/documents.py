"""Encodes, decodes and caches the bucket's JSON documents; those written by CAS have a format number. No I/O.

Invalid bytes raise a ``CorruptError`` that names the object. A process decodes each version of a document once, since
thousands of agents read one record. At each read it still asks the bucket whether that version is the newest.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.market import Guess, Watch
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import Model
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.store.objects import Blob, StoreError

T = TypeVar("T")

FORMAT = 1  # format number of documents written by CAS; a larger number means that a newer Spotkeeper wrote them
PLAIN_BYTES = 64 << 10  # a document up to this size is not compressed, so that people can read it
UNPACKED_BYTES = 64 << 20
ZLIB = b"\x78"  # the first byte of a zlib stream; a JSON document begins with a brace
KEPT_BYTES = 8 << 20  # size of the cached documents as encoded; decoded they take about ten times as much
QUARANTINE_BYTES = 4096  # how much of unreadable content is shown


class CorruptError(StoreError):
    """An object exists and is unreadable: it was edited by hand or damaged.

    Spotkeeper bases no decision on the object and does not delete it. ``token``: the token of the object as read, for
    a repair; ``said``: the beginning of its content.
    """

    def __init__(self, message: str, path: str = "", token: str = "", said: str = "") -> None:
        super().__init__(message)
        self.path, self.token, self.said = path, token, said

    @property
    def remedy(self) -> str:
        """Return in one line what the user can do about the unreadable object."""
        name = re.sub(r"\Aspec-[0-9a-f]{64}", "spec", self.path.rpartition("/")[2])
        return _REMEDIES.get(self.path) or _JOB_REMEDIES.get(name, "delete the object")


class NewerError(CorruptError):
    """A document in a newer format than this program knows. The document is intact and stays as it is."""

    @property
    def remedy(self) -> str:
        return "run `pulumi up` with the version of Spotkeeper that wrote it, or use that version here"


_JOB_REMEDIES = {
    "rec": "repair the object, or delete it: the next tick then ends the job, deletes its VMs and keeps its disks",
    "progress": "delete the object: the running job's next report writes it again within a minute",
    "spec.json": "repair the object, which is the job file as submitted, in JSON",
    "state": "repair the object: without the reports of ended trials, the search's other trials wait for ever",
}
_REMEDIES = {
    "stack/allocation": "spotkeeper repair allocation (it rebuilds the object from ledgers, records and the cloud)",
    "stack/pools.json": "write it again with pulumi up --refresh (in a one-machine cloud: spotkeeper local up)",
}


class Versioned(Struct, Generic[T], frozen=True):
    """A document as read, with the token that a compare-and-swap of it needs."""

    value: T
    token: str


class StaticHello(Struct, frozen=True):
    """The document ``static/<node>/<boot>``: a static machine is up and has no job."""

    machine: str
    uid: str  # unique instance id, from the identity token
    boot: str
    zone: str
    at: float  # virtual unix seconds of the first hello of this boot


class OfferHistory(Struct, frozen=True, omit_defaults=True):
    """The newest observations of an offer, which ``market.read`` collects from ``market/``.

    Decisions are correct without them.
    """

    pool: str
    zone: str
    model: Model
    refused_at: float = 0.0  # the last refusal for capacity, virtual unix seconds; 0: never
    quota_at: float = 0.0  # the last refusal for the account's quota, which says nothing about capacity
    launched_at: float = 0.0
    lost_at: float = 0.0
    price: float | None = None  # USD per machine-hour; None: only the stack file has a price
    guess: Guess | None = None  # the cloud's own estimate for a spot offer
    watch: Watch | None = None  # of a spot offer: its observed availability and losses
    boot_s: float | None = None  # from insertion to hello, the median of the pool's machines
    slow_boot_s: float | None = None  # the 95th percentile of the same, wider for few boots; None: too few

    @property
    def denied_at(self) -> float:
        """Return when the offer was last refused, for any reason, virtual unix seconds; 0: never."""
        return max(self.refused_at, self.quota_at)

    def denied_within(self, seconds: float, now: float) -> bool:
        """Whether the offer was refused, for any reason, in the last ``seconds``."""
        return self.denied_at > 0 and now - self.denied_at < seconds


# --- encoding


class _Document(Struct, frozen=True):
    v: int | None = None


def decode(data: bytes, kind: type[T], path: str) -> T:
    """Decode a document of this type from its bytes.

    Raises:
        CorruptError: the bytes are not such a document; the message names the object and the wrong field.
    """
    try:
        return codec.decode(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise CorruptError(f"{path}: not a {kind.__name__.strip('_')}: {error}", path, said=cut(data)) from error


def cut(data: bytes) -> str:
    return data[:QUARANTINE_BYTES].decode("utf-8", "backslashreplace")


def encode_versioned(document: Record | Allocation | SweepState) -> bytes:
    """Encode a document with its format number (``"v":1``) first, so that an older program refuses a newer format.

    A large document is compressed (zlib): the record of 10,000 nodes has 2 MB, compressed 0.4 MB.
    """
    body = msgspec.json.encode(document)
    plain = b'{"v":%d%s%s' % (FORMAT, b"" if body == b"{}" else b",", body[1:])
    return zlib.compress(plain, 1) if len(plain) > PLAIN_BYTES else plain


def _unpacked(data: bytes, path: str) -> bytes:
    """Return a document's JSON, decompressed if necessary.

    Raises:
        CorruptError: the bytes cannot be decompressed.
    """
    if data[:1] != ZLIB:
        return data
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data, UNPACKED_BYTES)
    except zlib.error as error:
        raise CorruptError(f"{path}: does not unpack: {error}", path, said=cut(data)) from error
    if not unpacker.eof:
        raise CorruptError(f"{path}: is cut short, or larger than {UNPACKED_BYTES} bytes", path, said=cut(data))
    return plain


def decode_versioned(data: bytes, kind: type[T], path: str) -> T:
    """Decode a document written by :func:`encode_versioned`.

    Raises:
        CorruptError: see :func:`decode`; or the document has no format number.
        NewerError: a newer Spotkeeper wrote it.
    """
    data = _unpacked(data, path)
    found = decode(data, _Document, path).v
    if found is not None and found > FORMAT:
        raise NewerError(f"{path}: format {found}: a newer Spotkeeper wrote it, this one knows format {FORMAT}", path)
    if found != FORMAT:
        raise CorruptError(f"{path}: has format {found}, not {FORMAT} as it should", path, said=cut(data))
    return decode(data, kind, path)


def encode_many(documents: Sequence[Struct]) -> bytes:
    """Encode several small documents as one object, compressed (zlib) if it is large."""
    plain = msgspec.json.encode(documents)
    return zlib.compress(plain, 1) if len(plain) > PLAIN_BYTES else plain


def decode_many(data: bytes, kind: type[T], path: str) -> tuple[T, ...]:
    """Decode an object written by :func:`encode_many`.

    Raises:
        CorruptError: see :func:`decode`.
    """
    return decode(_unpacked(data, path), tuple[kind, ...], path)  # type: ignore[valid-type]


class _Entry(Struct, frozen=True):
    blob: Blob  # the version read; its bytes are dropped
    size: int
    value: Any


class Recent:
    """A thread-safe cache of decoded documents by path. The values are frozen, so they may be shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._size = 0

    def blob(self, path: str) -> Blob | None:
        """Return the cached version of a path, without its bytes, for a conditional read; None if it is not cached."""
        with self._lock:
            entry = self._entries.get(path)
        return entry.blob if entry is not None else None

    def value(self, path: str, blob: Blob) -> object | None:
        """Return the decoded document of exactly this version, or None."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is None or entry.blob.tag != blob.tag:
                return None
            self._entries.move_to_end(path)
            value: object = entry.value
            return value

    def keep(self, path: str, blob: Blob, value: object) -> None:
        size = len(blob.data)
        if size > KEPT_BYTES:
            return
        with self._lock:
            old = self._entries.pop(path, None)
            self._size += size - (old.size if old is not None else 0)
            self._entries[path] = _Entry(Blob(b"", blob.tag, blob.etag), size, value)
            while self._size > KEPT_BYTES:
                self._size -= self._entries.popitem(last=False)[1].size
