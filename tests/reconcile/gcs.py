"""Google's bucket as far as the store needs it: the XML API with generations, in memory, one write a request.

Source: https://cloud.google.com/storage/docs/xml-api/reference-headers (``x-goog-if-generation-match``,
``x-goog-generation``, ``If-None-Match``) and ``/xml-api/get-bucket-list``.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit

from tests import web

PAGE = 7  # keys, so that folders come in pages


class Gcs:
    """``objects``: path with the bucket's name -> (generation, bytes)."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.numbers = itertools.count(1_700_000_000_000_001)
        self.lock = threading.Lock()
        self.bodies_sent = self.puts = 0
        self.tokens: set[str] = set()  # that came in
        self.endpoint = ""

    def put(self, path: str, data: bytes, match: str | None) -> int | None:
        with self.lock:
            now = self.objects.get(path, (0, b""))[0]
            if match is not None and int(match) != now:
                return None
            number = next(self.numbers)
            self.objects[path] = number, data
            self.puts += 1
            return number

    def page(self, bucket: str, query: dict[str, str]) -> str:
        begin = bucket + "/" + query.get("prefix", "")
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        with self.lock:
            keys = sorted(path.removeprefix(bucket + "/") for path in self.objects if path.startswith(begin))
            keys = [key for key in keys if key > after]
            rows = "".join(
                f"<Contents><Key>{key}</Key><Size>{len(self.objects[f'{bucket}/{key}'][1])}</Size>"
                "<LastModified>2026-11-21T00:00:00.000Z</LastModified></Contents>"
                for key in keys[:PAGE]
            )
        more = f"<NextContinuationToken>{keys[PAGE - 1]}</NextContinuationToken>" if len(keys) > PAGE else ""
        return f"<ListBucketResult>{rows}<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}</ListBucketResult>"


@contextmanager
def serve() -> Iterator[Gcs]:
    """A Google of one's own on a free port of this machine."""
    gcs = Gcs()

    class Handler(web.Handler):
        protocol_version = "HTTP/1.1"

        def parse_request(self) -> bool:
            well = super().parse_request()
            if well:
                gcs.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer").strip())
            return well

        def do_PUT(self) -> None:
            data = self.body()
            match = self.headers.get("x-goog-if-generation-match")
            number = gcs.put(unquote(urlsplit(self.path).path)[1:], data, match)
            if number is None:
                self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            else:
                self.answer(200, ETag=_etag(data), x_goog_generation=str(number))

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            path, query = unquote(parts.path)[1:], {key: value[0] for key, value in parse_qs(parts.query).items()}
            if "list-type" in query:
                self.answer(200, gcs.page(path.strip("/"), query).encode())
                return
            found = gcs.objects.get(path)
            if found is None:
                self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                return
            told = {
                "ETag": _etag(found[1]),
                "x_goog_generation": str(found[0]),
                "Last_Modified": formatdate(0, usegmt=True),
            }
            if self.headers.get("If-None-Match") == _etag(found[1]):
                self.answer(304, **told)
                return
            gcs.bodies_sent += 1
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                begin, last = int(wanted[1]), min(int(wanted[2]), len(found[1]) - 1)
                where = {"Content_Range": f"bytes {begin}-{last}/{len(found[1])}"}
                self.answer(206, found[1][begin : last + 1], **told, **where)
                return
            self.answer(200, found[1], **told)

        def do_DELETE(self) -> None:
            with gcs.lock:
                gone = gcs.objects.pop(unquote(urlsplit(self.path).path)[1:], None)
            self.answer(204 if gone else 404)

    with web.serving(Handler) as server:
        gcs.endpoint = server.url
        yield gcs


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'  # noqa: S324 - Google's choice
