"""Our signatures against botocore's, byte for byte."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from unittest import mock
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as TheirCredentials
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotkeeper_agent.cloud.sigv4 import Credentials, Scope, sign

AT = 1_790_000_000.0
TEXT = st.text(max_size=12)  # any unicode: it is encoded as it would go over the wire
WORDS = st.text("abcXYZ019-._~/+=&%:;,@!*'() \t\"{}", max_size=20)
NAME = st.from_regex(r"[A-Za-z][-A-Za-z0-9]{0,14}", fullmatch=True).filter(
    lambda name: name.lower() not in ("date", "host", "authorization", "x-amz-date")
)
PATHS = st.lists(st.one_of(TEXT, st.sampled_from(["", ".", "..", "a b", "%2F", "~x", "é"])), max_size=5).map(
    lambda parts: "/" + "/".join(quote(part, safe="/~") for part in parts)
)
QUERIES = st.lists(st.tuples(TEXT, st.none() | TEXT), max_size=4).map(
    lambda pairs: "&".join(quote(k, safe="") + ("" if v is None else "=" + quote(v, safe="")) for k, v in pairs)
)
HOSTS = st.sampled_from(
    [
        "https://abc.lambda-url.us-east-1.on.aws",
        "https://b.s3.eu-west-1.amazonaws.com:443",
        "http://127.0.0.1:8080",
        "http://127.0.0.1:80",
        "http://[::1]:9000",
        "https://Bucket.Example.com",
    ]
)
# One header twice is not made: botocore joins the values, an HTTP library sends two, we never do it.
HEADERS = st.lists(st.tuples(NAME, WORDS), max_size=5, unique_by=lambda pair: pair[0].lower()).map(dict)


def theirs(scope: Scope, key: Credentials, method: str, url: str, headers: dict[str, str], body: bytes) -> AWSRequest:
    request = AWSRequest(method=method, url=url, headers=headers, data=body)
    request.context["payload_signing_enabled"] = True
    auth = S3SigV4Auth if scope.service == "s3" else SigV4Auth
    with mock.patch("botocore.auth.get_current_datetime", lambda: datetime.fromtimestamp(AT, UTC)):
        made = TheirCredentials(key.access_key, key.secret_key, key.token or None)
        auth(made, scope.service, scope.region).add_auth(request)
    return request


@settings(max_examples=150, deadline=None)
@example("lambda", "https://a.b", "/v1//sync/../x/", "a=1&a=0&b", {}, b"", "token", "POST")
@given(
    service=st.sampled_from(["lambda", "s3", "ec2"]),
    host=HOSTS,
    path=PATHS,
    query=QUERIES,
    headers=HEADERS,
    body=st.binary(max_size=64),
    token=st.sampled_from(["", "FwoGZXIvYXdzE//+=="]),
    method=st.sampled_from(["GET", "PUT", "POST", "HEAD", "DELETE", "put"]),
)
def test_signatures_equal_botocores(
    service: str, host: str, path: str, query: str, headers: dict[str, str], body: bytes, token: str, method: str
) -> None:
    scope, key = Scope("eu-west-1", service), Credentials("ASIAEXAMPLE", "s3cr3t/+key", token)
    url = host + path + ("?" + query if query else "")
    digest = hashlib.sha256(body).hexdigest()
    expected = theirs(scope, key, method, url, headers, body)
    ours = sign(key, scope, method, url, headers, digest, AT)
    assert {name.lower(): value for name, value in ours.items()} == {
        name.lower(): value for name, value in expected.headers.items()
    }


@pytest.mark.parametrize("change", ["method", "path", "query", "header", "body", "secret", "region", "time", "token"])
def test_every_input_changes_the_signature(change: str) -> None:
    key = Credentials("A", "other" if change == "secret" else "s", "t2" if change == "token" else "t")
    url = f"https://h/{'b' if change == 'path' else 'a'}?{'y' if change == 'query' else 'x'}=1"
    digest = hashlib.sha256(b"c" if change == "body" else b"b").hexdigest()
    headers = {"Content-Type": "b" if change == "header" else "a"}
    scope = Scope("us-west-2" if change == "region" else "us-east-1", "lambda")
    method = "PUT" if change == "method" else "POST"
    made = sign(key, scope, method, url, headers, digest, AT + (change == "time"))["Authorization"]
    plain = sign(
        Credentials("A", "s", "t"),
        Scope("us-east-1", "lambda"),
        "POST",
        "https://h/a?x=1",
        {"Content-Type": "a"},
        hashlib.sha256(b"b").hexdigest(),
        AT,
    )["Authorization"]
    assert made.rpartition("Signature=")[2] != plain.rpartition("Signature=")[2]


def test_a_secret_is_not_shown() -> None:
    assert "s3cr3t" not in repr(Credentials("A", "s3cr3t", "s3cr3t-token"))
