"""S3: a :class:`~spotkeeper_agent.cloud.storage.Bucket` whose requests are signed by the machine's role.

The hash of every piece is signed, so S3 refuses a piece that was changed in transit. The role needs ``s3:ListBucket``:
without it S3 answers 403 instead of 404 for a missing object. A large object is sent in parts, so that the agent needs
memory for one part only. S3 shows the object once all parts are sent; a lifecycle rule of the bucket deletes the parts
of uploads that are never completed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote
from xml.sax.saxutils import escape

import requests

from spotkeeper_agent.cloud.metadata import MetadataError
from spotkeeper_agent.cloud.sigv4 import Credentials, Scope, sign
from spotkeeper_agent.cloud.storage import (
    ANSWER_S,
    CHUNK,
    CONNECT_S,
    HashedPart,
    MissingError,
    Readable,
    StorageError,
    Stored,
)

PART_BYTES = 8 << 20  # S3's minimum is 5 MiB, except for the last part
MOST_PARTS = 10_000
TRIES = 3  # tries per part; the whole stream cannot be sent again
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
MD5 = "x-amz-meta-md5"  # in hex, if it was known before the object was sent
TEXT, BYTES = "text/plain; charset=utf-8", "application/octet-stream"
_PLAIN_MD5 = re.compile(r'"([0-9a-f]{32})"\Z')  # the ETag of an object made of parts ends with the number of parts
_TAG = re.compile(rb"<(UploadId|ETag|Code)>([^<]*)</")


@dataclass(frozen=True)
class _Parts:
    """Parts that were sent: their ETags in order, their total size in bytes, and the MD5 of the whole object."""

    tags: tuple[str, ...]
    bytes: int
    md5: str


class S3:
    """One bucket. ``root``: an address, for objects at ``<root>/<bucket>/<name>``; "" for AWS's own address."""

    def __init__(
        self, root: str, bucket: str, region: str, credentials: Callable[[], Credentials], now: Callable[[], float]
    ) -> None:
        self._root = f"{root}/{bucket}" if root else address(bucket, region)
        self._scope = Scope(region, "s3")
        self._credentials = credentials
        self._now = now

    def read(self, name: str) -> Iterator[bytes]:
        with self._ask("GET", name, stream=True) as answer:
            if answer.status_code == 404:
                raise MissingError(f"{name}: it does not exist")
            _check(name, answer)
            try:
                yield from answer.iter_content(CHUNK)
            except requests.RequestException as error:
                raise StorageError(f"{name}: {type(error).__name__}") from None

    def find(self, name: str) -> Stored | None:
        answer = self._ask("HEAD", name)
        if answer.status_code == 404:
            return None
        _check(name, answer)
        return Stored(_size(name, answer), _md5(answer))

    def send(self, name: str, content: Readable) -> Stored:
        size = len(content)
        if isinstance(content, HashedPart) and size:
            _check(name, self._ask("PUT", name, body=content, headers={"Content-Type": BYTES}))
            return Stored(size, content.md5.hexdigest())
        part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))
        first = _read(content, part_bytes)
        if len(first) < min(size, part_bytes):
            raise StorageError(f"{name}: the file is shorter than announced")
        if len(first) == size:
            md5 = hashlib.md5(first, usedforsecurity=False).hexdigest()
            _check(name, self._ask("PUT", name, body=first, headers={"Content-Type": BYTES, MD5: md5}))
            return Stored(size, md5)
        upload = self._begin(name)
        try:
            parts = self._send_parts(name, upload, first, content, part_bytes)
            if parts.bytes != size:
                raise StorageError(f"{name}: the file is shorter than announced")
            self._finish(name, upload, parts.tags)
        except BaseException:
            self._abort(name, upload)
            raise
        # S3 has checked each part against its signed hash; it knows no MD5 of the whole.
        return Stored(parts.bytes, parts.md5)

    def write(self, name: str, content: bytes) -> None:
        _check(name, self._ask("PUT", name, body=content, headers={"Content-Type": TEXT}))

    def create(self, name: str, content: bytes) -> bool:
        headers = {"Content-Type": TEXT, "If-None-Match": "*"}
        answer = self._ask("PUT", name, body=content, headers=headers)
        if answer.status_code == 412:
            return False
        _check(name, answer)  # 409, two writes at once, is an error too: a retry settles it
        return True

    def delete(self, name: str) -> None:
        answer = self._ask("DELETE", name)
        if answer.status_code not in (204, 404):
            _check(name, answer)

    def _begin(self, name: str) -> str:
        answer = self._ask("POST", name, "uploads=", headers={"Content-Type": BYTES})
        _check(name, answer)
        return _tag(name, answer, b"UploadId")

    def _send_parts(self, name: str, upload: str, first: bytes, content: Readable, part_bytes: int) -> _Parts:
        tags: list[str] = []
        whole = hashlib.md5(usedforsecurity=False)
        piece, sent = first, 0
        while piece:
            query = f"partNumber={len(tags) + 1}&uploadId={quote(upload, safe='')}"
            tags.append(self._send_part(name, query, piece))
            whole.update(piece)
            sent += len(piece)
            piece = _read(content, part_bytes)
        return _Parts(tuple(tags), sent, whole.hexdigest())

    def _send_part(self, name: str, query: str, piece: bytes) -> str:
        for left in reversed(range(TRIES)):
            try:
                answer = self._ask("PUT", name, query, body=piece)
            except StorageError:
                if not left:
                    raise
                continue
            if answer.status_code < 500 or not left:
                break
        _check(name, answer)
        return answer.headers.get("ETag", "")

    def _finish(self, name: str, upload: str, tags: tuple[str, ...]) -> None:
        """Complete the upload. S3 always answers 200; only the body shows success or failure."""
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        headers = {"Content-Type": "application/xml"}
        answer = self._ask("POST", name, f"uploadId={quote(upload, safe='')}", body=body, headers=headers)
        _check(name, answer)
        _tag(name, answer, b"ETag")

    def _abort(self, name: str, upload: str) -> None:
        try:
            self._ask("DELETE", name, f"uploadId={quote(upload, safe='')}")
        except StorageError:
            return  # the bucket's lifecycle rule deletes the parts

    def _ask(
        self,
        method: str,
        name: str,
        query: str = "",
        *,
        body: bytes | HashedPart = b"",
        headers: dict[str, str] | None = None,
        stream: bool = False,
    ) -> requests.Response:
        url = f"{self._root}/{quote(name, safe='/~')}" + (f"?{query}" if query else "")
        if isinstance(body, HashedPart):
            digest = body.sha256
        else:
            digest = hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
        try:
            signed = sign(self._credentials(), self._scope, method, url, headers or {}, digest, self._now())
            return requests.request(
                method,
                url,
                data=body or None,
                headers=signed,
                stream=stream,
                timeout=(CONNECT_S, ANSWER_S),
                allow_redirects=False,  # a signature is valid for one address
            )
        except MetadataError as error:
            raise StorageError(str(error)) from None
        except requests.RequestException as error:
            raise StorageError(f"{name}: {type(error).__name__}") from None


def address(bucket: str, region: str) -> str:
    """Return a bucket's address on AWS. A name with dots goes into the path: as a host it matches no certificate."""
    host = f"s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")
    return f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}"


def _read(content: Readable, size: int) -> bytes:
    """Read ``size`` bytes, or fewer at the content's end."""
    pieces = []
    while size and (piece := content.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _check(name: str, answer: requests.Response) -> None:
    """Check an answer.

    Raises:
        StorageError: the status is not 200; the message has S3's reason.
    """
    if answer.status_code != 200:
        found = dict(_TAG.findall(answer.content[:4096]))
        code = found.get(b"Code", b"").decode(errors="replace")
        raise StorageError(f"{name}: HTTP {answer.status_code}{' ' + code if code else ''}")


def _tag(name: str, answer: requests.Response, tag: bytes) -> str:
    """Return the text of the element ``tag`` in an XML answer.

    Raises:
        StorageError: the answer does not have the element.
    """
    found = dict(_TAG.findall(answer.content[:65536]))
    if tag not in found:
        raise StorageError(f"{name}: {found.get(b'Code', b'the answer is invalid').decode(errors='replace')}")
    return str(found[tag].decode(errors="replace"))


def _size(name: str, answer: requests.Response) -> int:
    length = answer.headers.get("Content-Length", "")
    if not length.isdecimal():
        raise StorageError(f"{name}: the answer is invalid")
    return int(length)


def _md5(answer: requests.Response) -> str:
    """Return the MD5 from the object's metadata; else the ETag if it is an MD5 (no parts, no KMS key); else ""."""
    if told := answer.headers.get(MD5, ""):
        return str(told)
    plain = _PLAIN_MD5.match(answer.headers.get("ETag", ""))
    of_kms = answer.headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    return plain[1] if plain and not of_kms else ""
