"""AWS's servers for one test: S3 (moto's, behind a guard that checks what moto does not) and the check of signatures.

Signatures are recomputed by botocore from what arrived. moto stores; the guard refuses what S3 would refuse: an unknown
key, another signature, a body of another hash, a clock that is wrong, too small a part.
Source: AWS, "Authenticating Requests (AWS Signature Version 4)" and "Error responses" of S3's API reference.
"""

from __future__ import annotations

import calendar
import contextlib
import hashlib
import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.agent.cloud.imds import REGION, ROLE, Imds

_AUTH = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, "
    r"SignedHeaders=([^,]+), Signature=(\w+)\Z"
)
MIN_PART = 5 << 20


def keys_of(imds: Imds) -> Credentials:
    """The keys that the role has now; those before them are no longer taken."""
    with imds.lock:
        found = json.loads(imds.tree[f"meta-data/iam/security-credentials/{ROLE}"])
    return Credentials(found["AccessKeyId"], found["SecretAccessKey"], found["Token"])


def refusal(  # noqa: PLR0911 - a list of reasons
    keys: Credentials, method: str, url: str, headers: Mapping[str, str], body: bytes, service: str, skew_s: float
) -> str | None:
    """The code with which AWS would refuse this request; None where botocore would have signed it so."""
    sent = {name.lower(): value for name, value in headers.items()}
    found = _AUTH.match(sent.get("authorization", ""))
    if found is None:
        return "AccessDenied"
    access, day, region, of, names, signature = found.groups()
    stamp = sent.get("x-amz-date", "")
    if access != keys.access_key or sent.get("x-amz-security-token") != keys.token:
        return "InvalidAccessKeyId"
    if (of, region, day) != (service, REGION, stamp[:8]):
        return "AuthorizationHeaderMalformed"
    if abs(calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ")) - time.time()) > skew_s:
        return "RequestTimeTooSkewed"
    signed = {name: sent[name] for name in names.split(";")}
    if not {"host", "x-amz-date", "x-amz-security-token"} <= set(signed):
        return "AccessDenied"
    request = AWSRequest(method=method, url=url, headers=signed, data=body)
    request.context["timestamp"] = stamp
    auth = (S3SigV4Auth if service == "s3" else SigV4Auth)(keys, service, region)
    if auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request) != signature:
        return "SignatureDoesNotMatch"
    told = sent.get("x-amz-content-sha256", hashlib.sha256(body).hexdigest() if service != "s3" else "")
    return None if told == hashlib.sha256(body).hexdigest() else "XAmzContentSHA256Mismatch"


class S3Server:
    """One bucket, ``name``. ``keys``: whose requests are taken."""

    def __init__(self, name: str, keys: Callable[[], Credentials]) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.name = name
        self.asked: Counter[str] = Counter()  # by method and what it is of
        self.refused: list[str] = []
        self.fault: Callable[[str, str], int] = lambda what, path: 0  # a status instead of an answer
        self.on_the_way: Callable[[bytes], bytes] = lambda body: body
        self.late_error = b""  # in the body of a completion that has said 200
        self._keys = keys
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._guard, threaded=True)
        self._server.RequestHandlerClass.log_request = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.call("PUT", "")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def call(self, method: str, path: str, query: str = "") -> bytes:
        """A request past the guard."""
        scope = "AWS4-HMAC-SHA256 Credential=x/20261121/us-east-1/s3"  # moto reads which service is meant from it
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": f"/{self.name}{path}",
            "RAW_URI": f"/{self.name}{path}",
            "QUERY_STRING": query,
            "wsgi.input": io.BytesIO(b""),
            "wsgi.url_scheme": "http",
            "HTTP_HOST": urlsplit(self.url).netloc,
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": "80",
            "HTTP_AUTHORIZATION": scope,
            "CONTENT_LENGTH": "0",
        }
        return b"".join(self._moto(environ, lambda *_: None))

    def content(self, name: str) -> bytes:
        return self.call("GET", f"/{name}")

    def unfinished(self) -> int:
        """Uploads in parts that were begun and neither completed nor given up."""
        return self.call("GET", "", "uploads").count(b"<UploadId>")

    def _guard(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = self.on_the_way(body)
        method, raw = environ["REQUEST_METHOD"], environ["RAW_URI"]
        query = parse_qs(urlsplit(raw).query, keep_blank_values=True)
        what = f"{method} {'part' if 'partNumber' in query else 'upload' if query else 'object'}"
        self.asked[what] += 1
        headers = {key[5:].replace("_", "-"): value for key, value in environ.items() if key.startswith("HTTP_")}
        headers |= {"content-type": environ["CONTENT_TYPE"]} if environ.get("CONTENT_TYPE") else {}
        status = self.fault(what, raw)
        code = "InternalError" if status else refusal(self._keys(), method, self.url + raw, headers, body, "s3", 900)
        if code is not None:
            self.refused.append(code)
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
            statuses = {"XAmzContentSHA256Mismatch": 400, "InternalError": status}
            start(f"{statuses.get(code, 403)} No", [("Content-Length", str(len(text)))])
            return [text]
        if self.late_error and "uploadId" in query and method == "POST":
            start("200 OK", [("Content-Length", str(len(self.late_error)))])
            return [self.late_error]
        environ["wsgi.input"] = io.BytesIO(body)
        answered: Iterable[bytes] = self._moto(environ, start)
        return answered


@contextlib.contextmanager
def s3(name: str, keys: Callable[[], Credentials]) -> Iterator[S3Server]:
    s3_server = S3Server(name, keys)
    try:
        yield s3_server
    finally:
        s3_server.close()
