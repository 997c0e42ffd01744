"""What a rightful machine sends: envelopes and shapes that are wrong."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
from typing import Any

import flask
import pytest

from spotkeeper.reconcile.service.request_body import BodyError, Push, parse
from tests.security.cases_identity import PATHS, Case, Cases, shot, unmoved
from tests.security.site import CANARY, JOB, Shot, Site, sync

GOOD: dict[str, Any] = {
    "boot": "b-1",
    "ver": 1,
    "job": JOB,
    "facts": [{"kind": "here", "gen": 1, "value": "4", "attempt": 1}],
    "progress": {
        **{"gen": 1, "step": 5, "at": 9.0, "samples_per_s": 1.5, "step_s": 0.5, "loss": 2.5, "commit_gen": 1},
        **{"commit_step": 4, "save_s": 1.0, "total_steps": 100, "image_steps": 5, "image_share": 0.01},
    },
}
INTS = (("ver",), ("facts", 0, "gen"), ("facts", 0, "attempt"), *(("progress", n) for n in ("gen", "step")))
MORE_INTS = (*INTS, *(("progress", n) for n in ("commit_gen", "commit_step", "total_steps", "image_steps")))
FLOATS = tuple(("progress", n) for n in ("at", "samples_per_s", "step_s", "loss", "save_s", "image_share"))
TEXTS = (("boot",), ("job",), ("facts", 0, "kind"), ("facts", 0, "value"))
Path = tuple[str | int, ...]


def with_value(path: Path, raw: str) -> bytes:
    """The good body with one value replaced by raw text."""
    body = copy.deepcopy(GOOD)
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = "@@"
    return json.dumps(body).replace('"@@"', raw).encode()


def sent(site: Site, label: str, body: bytes, *want: int, **fields: Any) -> Case:
    return shot(site, label, body=body, token=site.token(), want=want or (400,), **fields)


# -- envelope


def empty(site: Site) -> Cases:
    for number, body in enumerate((b"", b" ", b"\n", b"\r\n", b"\t", b" " * 100, b"\n" * 1000, b"\xef\xbb\xbf", b"\0")):
        yield sent(site, f"sync {number}", body)
        if body:
            yield shot(site, f"tick {number}", body=body, token=site.clock_token(), path="/v1/tick")
    for path in ("/v1/tick", f"/v1/notify/{JOB}"):
        yield shot(site, path, token=site.clock_token(), path=path, want=(200,))
    yield shot(site, "event", token=site.clock_token(), path="/v1/event", want=(200,), quarantine=True)


def too_large(site: Site) -> Cases:
    for path, size in itertools.product(PATHS, (16_385, 16_386, 20_000, 100_000, 1_000_000)):
        yield shot(site, f"{path} {size}", body=b" " * size, path=path, want=(413,))


class Endless:
    """Ten megabytes, and no more is made than is read."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "read to its end"
        size = min(size, 10_000_000 - self.read_bytes)
        self.read_bytes += size
        return b"x" * size

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self, size: int = -1) -> bytes:
        return self.read(size)


def stream(site: Site) -> Cases:
    def check(path: str, length: str | None, token: str | None) -> None:
        body = Endless()
        environ: dict[str, Any] = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": path,
            "CONTENT_TYPE": "application/json",
            "wsgi.input": body,
            "wsgi.input_terminated": True,
            "wsgi.url_scheme": "https",
            "SERVER_NAME": "f",
            "SERVER_PORT": "443",
        }
        if length is not None:
            environ["CONTENT_LENGTH"] = length
        if token:
            environ["HTTP_AUTHORIZATION"] = token
        status = site.app.handle(flask.Request(environ))[1]
        assert status == 413 if length in (None, "10000000") else status in (400, 401, 413)
        assert body.read_bytes <= 17_000 or (length is None and body.read_bytes <= 70_000)

    for path, length in itertools.product(PATHS, (None, "10", "10000000", "-1", "x")):
        for token in (None, site.token()):
            yield f"{path} of {length}", lambda p=path, n=length, t=token: check(p, n, t)


def bombs(site: Site) -> Cases:
    bomb = gzip.compress(b" " * 1_000_000)
    for path, encoding in itertools.product(PATHS, ("gzip", "x-gzip", "deflate", "br", "zstd", "identity, gzip")):
        yield shot(
            site, f"{path} {encoding}", body=bomb, path=path, want=(415,), headers={"Content-Encoding": encoding}
        )
    yield sent(site, "undeclared", bomb)


def content_types(site: Site) -> Cases:
    wrong = ("text/plain", "", "application/jsonx", "json", "text/json", "application/x-www-form-urlencoded", "*/*")
    wrong += ("multipart/form-data; boundary=x", "application/xml", "application/ld+json", "application/yaml")
    for kind in wrong:
        yield sent(site, f"sync {kind!r}", sync(), 415, headers={"Content-Type": kind})
        yield shot(site, f"tick {kind!r}", body=b"{}", path="/v1/tick", want=(415,), headers={"Content-Type": kind})


def not_utf8(site: Site) -> Cases:
    for raw in (
        *(b"\xff", b"\xfe", b"\x80", b"\xc0\xaf", b"\xc1\xbf", b"\xe0\x80\xaf", b"\xed\xa0\x80", b"\xed\xbf\xbf"),
        *(b"\xf0\x80\x80\xaf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x82", b"\xc3"),
    ):
        yield sent(site, f"in a value {raw!r}", b'{"boot":"b' + raw + b'"}')
        yield sent(site, f"in a key {raw!r}", b'{"boot":"b","' + raw + b'":1}')
    for name in ("utf-16", "utf-32", "utf-7", "cp037"):
        yield sent(site, name, '{"boot":"b-1+"}'.encode(name), 400)


def duplicates(site: Site) -> Cases:
    for path in (*MORE_INTS, *FLOATS, *TEXTS):
        key = json.dumps(path[-1])
        body = with_value(path, f"1, {key}: 1" if path not in TEXTS else f'"here", {key}: "here"')
        yield sent(site, f"{path} twice", body)
    yield sent(site, "escaped", b'{"boot":"b","b\\u006fot":"b"}')
    yield sent(site, "three times", b'{"boot":"b","boot":"b","boot":"b"}')
    yield sent(site, "facts", b'{"boot":"b","facts":[],"facts":[]}')


def deep(site: Site) -> Cases:
    for opening, path in itertools.product((b"[", b'{"a":', b"[[", b'[{"a":', b'{"boot":'), PATHS[:3]):
        token = site.token() if path == "/v1/sync" else site.clock_token()
        yield shot(site, f"{opening!r} {path}", body=opening * (10_000 // len(opening)), path=path, token=token)
    for field, depth in itertools.product(("boot", "facts", "progress", "x"), (7, 100, 4000)):
        body = b'{"boot":"b","%s":' % field.encode() + b"[" * depth + b"]" * depth + b"}"
        yield sent(site, f"{field} {depth}", body)
    for depth in (6, 7, 100, 4000):
        yield f"passed over {depth}", lambda depth=depth: deep_where_nobody_looks(depth)


def deep_where_nobody_looks(depth: int) -> None:
    """In a field that a push may have and we pass over."""
    body = b'{"message":{"data":""},"x":' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(BodyError):
        parse(body, Push)


def truncated(site: Site) -> Cases:
    whole = json.dumps(GOOD).encode()
    for length in range(1, len(whole), 7):
        yield sent(site, f"{length} bytes", whole[:length])
    for length in (10, 100):
        yield sent(site, f"declared shorter: {length}", whole, length=length)


# -- schema


def missing(site: Site) -> Cases:
    needed: tuple[Path, ...] = (("boot",), ("facts", 0, "kind"), *(("progress", n) for n in ("gen", "step", "at")))
    for size in range(1, len(needed) + 1):
        for gone in itertools.combinations(needed, size):
            body = copy.deepcopy(GOOD)
            for path in gone:
                at: Any = body
                for key in path[:-1]:
                    at = at[key]
                del at[path[-1]]
            yield sent(site, f"without {gone}", json.dumps(body).encode())


def extra(site: Site) -> Cases:
    names = ("node", "uid", "attempt_", "url", "master", "address", "__class__", CANARY, "", "spec", "zone")
    for name in names:
        for at in ((), ("facts", 0), ("progress",)):
            body = copy.deepcopy(GOOD)
            place: Any = body
            for key in at:
                place = place[key]
            place[name] = "http://169.254.169.254/"
            yield sent(site, f"{name!r} in {at}", json.dumps(body).encode())


def wrong_type(site: Site) -> Cases:
    for path, raw in itertools.product(MORE_INTS, ('"1"', "1.5", "[]", "{}")):
        yield sent(site, f"{path} {raw}", with_value(path, raw))
    for path, raw in itertools.product(TEXTS, ("1", "[]", "true")):
        yield sent(site, f"{path} {raw}", with_value(path, raw))
    for path in (("facts",), ("facts", 0), ("progress",)):
        yield sent(site, f"{path}", with_value(path, '"x"'))


def negative(site: Site) -> Cases:
    for path, raw in itertools.product(MORE_INTS, ("-1", "-0.5", "-9007199254740991", "-100000")):
        yield sent(site, f"{path} {raw}", with_value(path, raw))
    for name in ("at", "samples_per_s", "step_s", "save_s", "image_share"):
        yield sent(site, f"{name}", with_value(("progress", name), "-1.0"))


def raws(site: Site, *texts: str) -> Cases:
    for path, raw in itertools.product((*MORE_INTS, *FLOATS), texts):
        yield sent(site, f"{path} {raw[:20]}", with_value(path, raw))


def huge(site: Site) -> Cases:
    yield from raws(site, str(2**63), str(2**64), str(2**53 + 1), str(-(2**63) - 1), "9" * 1000)


def overflow(site: Site) -> Cases:
    yield from raws(site, "1e400", "-1e400", "1" + "0" * 400 + ".0")


def not_a_number(site: Site) -> Cases:
    yield from raws(site, "NaN", "Infinity", "-Infinity", "nan")


def bools(site: Site) -> Cases:
    yield from raws(site, "true", "false", "True")


LOOKALIKES = {
    "o": "\u043e\u03bf\uff4f",
    "b": "\u042c\uff42",
    "e": "\u0435\uff45",
    "a": "\u0430",
    "c": "\u0441",
    "t": "\uff54",
}


def homoglyphs(site: Site) -> Cases:
    for path in (("boot",), ("ver",), ("job",), ("facts",), ("progress",)):
        name = str(path[0])
        for letter, others in LOOKALIKES.items():
            for other in others if letter in name else ():
                body = {key.replace(letter, other) if key == name else key: value for key, value in GOOD.items()}
                yield sent(site, f"{name} with {other!a}", json.dumps(body, ensure_ascii=False).encode())
    for mark in ("\u200b", "\u00ad", "\ufeff", "\u0301", " ", "\u2060"):
        for name in ("boot", "ver", "facts"):
            body = {key + mark if key == name else key: value for key, value in GOOD.items()}
            yield sent(site, f"{name}{mark!a}", json.dumps(body, ensure_ascii=False).encode())


def versions(site: Site) -> Cases:
    for name, value in itertools.product(("v", "version", "api", "protocol"), (0, 1, 2, "2", None, 10**9)):
        yield sent(site, f"{name}={value}", json.dumps(GOOD | {name: value}).encode())
    me = site.members[0]
    for ver in (10, 1000, 2**31, 2**40, 2**53 - 1, 2**53):
        yield f"ver {ver}", lambda ver=ver: unmoved(site, Shot(sync(me.boot, ver=ver), site.token(me), want=(200,)))
