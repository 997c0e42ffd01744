"""How the bucket's documents are written down, and read again: JSON, versioned where it is compared and swapped.

Reads and writes nothing by itself. Whatever does not make sense is a ``CorruptError`` that names the object.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.reconcile.store_api import CorruptError, NewerError
from spotkeeper.spec import codec
from spotkeeper.spec.record import Alloc, Record

T = TypeVar("T")

FORMAT = 1  # of the documents that are compared and swapped; another number means another Spotkeeper wrote them
PLAIN_BYTES = 64 << 10  # of a document that is written as it is, for people to read
UNPACKED_BYTES = 64 << 20
ZLIB = b"\x78"  # the first byte of a zlib stream; a JSON document begins with a brace
QUARANTINE_BYTES = 4096  # of what makes no sense, that people are shown


class _Document(Struct, frozen=True):
    v: int | None = None


def decode(data: bytes, kind: type[T], path: str) -> T:
    """A document from its bytes.

    Raises:
        CorruptError: naming the object and the field that is wrong.
    """
    try:
        return codec.decode(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise CorruptError(f"{path}: not a {kind.__name__.strip('_')}: {error}", path, said=cut(data)) from error


def cut(data: bytes) -> str:
    """The beginning, for people who want to know what is wrong with it."""
    return data[:QUARANTINE_BYTES].decode("utf-8", "backslashreplace")


def encode_versioned(document: Record | Alloc) -> bytes:
    """The document with ``"v":1`` in front: a program that does not know the number must not guess.

    A large one is packed (zlib): the record of 10,000 ranks is 2 MB as it is and a fifth of that packed.
    """
    body = msgspec.json.encode(document)
    plain = b'{"v":%d%s%s' % (FORMAT, b"" if body == b"{}" else b",", body[1:])
    return zlib.compress(plain, 1) if len(plain) > PLAIN_BYTES else plain


def _unpacked(data: bytes, path: str) -> bytes:
    """The document, packed or not.

    Raises:
        CorruptError: it does not unpack.
    """
    if data[:1] != ZLIB:
        return data
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data, UNPACKED_BYTES)
    except zlib.error as error:
        raise CorruptError(f"{path}: does not unpack: {error}", path, said=cut(data)) from error
    if not unpacker.eof:
        raise CorruptError(f"{path}: cut short, or larger than {UNPACKED_BYTES} bytes", path, said=cut(data))
    return plain


def decode_versioned(data: bytes, kind: type[T], path: str) -> T:
    """The inverse of :func:`encode_versioned`.

    Raises:
        CorruptError: see :func:`decode`; or it has no number.
        NewerError: a newer Spotkeeper wrote it.
    """
    data = _unpacked(data, path)
    found = decode(data, _Document, path).v
    if found is not None and found > FORMAT:
        raise NewerError(f"{path}: format {found}, this Spotkeeper knows {FORMAT}: a newer one wrote it", path)
    if found != FORMAT:
        raise CorruptError(f"{path}: format {found}, this Spotkeeper writes {FORMAT}", path, said=cut(data))
    return decode(data, kind, path)


def encode_many(documents: Sequence[Struct]) -> bytes:
    """Several small ones as one, packed."""
    return zlib.compress(msgspec.json.encode(documents), 1)


def decode_many(data: bytes, kind: type[T], path: str) -> tuple[T, ...]:
    """The inverse of :func:`encode_many`.

    Raises:
        CorruptError: see :func:`decode`.
    """
    return decode(_unpacked(data, path), tuple[kind, ...], path)  # type: ignore[valid-type]
