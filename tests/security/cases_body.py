"""What a rightful machine sends: envelopes, shapes, meanings and events that are wrong."""

from __future__ import annotations

import base64
import copy
import gzip
import itertools
import json
from typing import Any

import flask
from msgspec.structs import replace
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.record import Phase, SlotState

from tests.security.cases_identity import KINDS, PATHS, Case, Cases, shot, unmoved, with_record
from tests.security.site import CANARY, JOB, Machine, Shot, Site, sync

GOOD: dict[str, Any] = {
    "boot": "b-1",
    "ver": 1,
    "job": JOB,
    "facts": [{"kind": "here", "gen": 1, "value": "4", "attempt": 1}],
    "progress": {
        **{"gen": 1, "step": 5, "at": 9.0, "samples_per_s": 1.5, "step_s": 0.5, "loss": 2.5, "commit_gen": 1},
        **{"commit_step": 4, "save_s": 1.0, "total_steps": 100},
    },
}
INTS = (("ver",), ("facts", 0, "gen"), ("facts", 0, "attempt"), *(("progress", n) for n in ("gen", "step")))
MORE_INTS = (*INTS, *(("progress", n) for n in ("commit_gen", "commit_step", "total_steps")))
FLOATS = tuple(("progress", n) for n in ("at", "samples_per_s", "step_s", "loss", "save_s"))
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
    for path in ("/v1/tick", f"/v1/poke/{JOB}"):
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
        assert site.door.handle(flask.Request(environ))[1] in (400, 401, 413)
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
    names = ("rank", "uid", "attempt_", "url", "master", "address", "__class__", CANARY, "", "spec", "zone")
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
    for name in ("at", "samples_per_s", "step_s", "save_s"):
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


# -- meaning


def says(site: Site, by: Machine, *facts: tuple[Kind, int, str], keep: bool = False, **more: Any) -> bytes:
    words = [{"kind": kind.value, "gen": gen, "value": value} for kind, gen, value in facts]
    return site.fire(Shot(sync(by.boot, facts=words, **more), site.token(by), want=(200,), by=by), keep=keep)


def rank_too_high(site: Site) -> Cases:
    for rank, kind in itertools.product((3, 4, 9999), KINDS):
        by = Machine("77", f"sk-t-{JOB}-r{rank:04d}-a1", "z-a", "b", JOB, rank, 1)
        body = sync("b", facts=[{"kind": kind.value, "gen": 1}])
        yield (
            f"rank {rank} {kind.value}",
            lambda b=body, by=by: unmoved(site, Shot(b, site.token(by), want=(200,), by=by)),
        )


def rank_of_another(site: Site) -> Cases:
    for by, kind in itertools.product(site.others, KINDS):
        yield f"{by.name} {kind.value}", lambda by=by, kind=kind: says(site, by, (kind, 1, "0"), job=JOB)


def unknown_job(site: Site) -> Cases:
    for job, kind in itertools.product(("zzzz9999", "00000000"), KINDS):
        by = Machine("77", f"sk-t-{job}-r0000-a1", "z-a", "b", job, 0, 1)
        sent_ = Shot(sync("b", facts=[{"kind": kind.value}]), site.token(by), want=(200,))
        yield f"{job} {kind.value}", lambda s=sent_: site.fire(s)

    def tombstoned(kind: Kind) -> None:
        with with_record(site, phase=Phase.DONE):
            says(site, me, (kind, 1, "0"), keep=True)
            assert site.store.records[JOB][0].phase is Phase.DONE

    me = site.members[0]
    for kind in KINDS:
        yield f"tombstone {kind.value}", lambda kind=kind: tombstoned(kind)


def attempts(site: Site) -> Cases:
    for attempt, kind in itertools.product((2, 99_999), KINDS):
        by = Machine(site.members[0].uid, f"sk-t-{JOB}-r0000-a{attempt}", "z-a", "b", JOB, 0, attempt)
        sent_ = Shot(sync("b", facts=[{"kind": kind.value}]), site.token(by), want=(200,), by=by)
        yield f"name of attempt {attempt} {kind.value}", lambda s=sent_: unmoved(site, s)
    me = site.members[0]
    for attempt, kind in itertools.product((0, 2), KINDS):
        fact = {"kind": kind.value, "attempt": attempt}
        sent_ = Shot(sync(me.boot, facts=[fact]), site.token(me), want=(200,), by=me)
        yield f"word for attempt {attempt} {kind.value}", lambda s=sent_: site.fire(s)


def generations(site: Site) -> Cases:
    me = site.members[0]

    def future(gen: int, kind: Kind) -> None:
        before = dict(site.store.facts[JOB])
        body = sync(me.boot, facts=[{"kind": kind.value, "gen": gen}], progress=GOOD["progress"] | {"gen": gen})
        unmoved(site, Shot(body, site.token(me), want=(200,), by=me, quarantine=True))
        assert site.store.facts[JOB] == before

    for gen, kind in itertools.product((2, 2**40), KINDS):
        yield f"generation {gen} {kind.value}", lambda gen=gen, kind=kind: future(gen, kind)
    for kind in KINDS:
        yield f"generation 0 {kind.value}", lambda kind=kind: says(site, me, (kind, 0, "0"))


def never_ready(site: Site) -> Cases:
    me = site.members[0]

    def check(code: str, gen: int) -> None:
        ranks = site.store.records[JOB][0].ranks
        assert ranks[0].cur is not None
        intent = replace(ranks[0].cur, state=SlotState.INTENT, uid=None, boot=None, since=site.now)
        with with_record(site, ranks=(replace(ranks[0], cur=intent), *ranks[1:])):
            before = dict(site.store.facts[JOB])
            body = sync(me.boot, facts=[{"kind": "exit", "gen": gen, "value": code}])
            site.fire(Shot(body, site.token(me), want=(200,), by=me), keep=True)
            assert site.store.facts[JOB] == before, "an exit of nobody was taken in"

    for code, gen in itertools.product(("0", "1", "93", "-9", "137", "255", "2", "-15", "99"), (0, 1, 2, 7)):
        yield f"exit {code} of {gen}", lambda code=code, gen=gen: check(code, gen)


def lone_success(site: Site) -> Cases:
    def check(ranks: tuple[int, ...], times: int) -> None:
        for rank in ranks * times:
            says(site, site.members[rank], (Kind.EXIT, 1, "0"), keep=True)
            assert site.store.records[JOB][0].phase is Phase.RUN and site.store.records[JOB][0].outcome is None
        site.put_back()

    some = [ranks for size in (1, 2) for ranks in itertools.permutations(range(3), size)]
    for ranks, times in itertools.product(some, (1, 2, 3, 5)):
        yield f"ranks {ranks} x{times}", lambda ranks=ranks, times=times: check(ranks, times)


def time_travel(site: Site) -> Cases:
    me, now = site.members[0], int(site.now)
    year = 365 * 86400

    def check(kind: Kind, value: int, at: float) -> None:
        progress = GOOD["progress"] | {"at": at, "save_s": 1e308}
        says(site, me, (kind, 1, str(value)), progress=progress, keep=True)
        record, told = site.store.records[JOB][0], site.store.progresses[JOB]
        assert told.at <= site.now, "the function's clock decides"
        assert told.save_s is not None and told.save_s <= 3600.0, "no stop is put off for ever"
        assert record.stop_deadline is None or site.now <= record.stop_deadline <= site.now + year
        site.put_back()

    for shift, kind in itertools.product((-year, -1, 0, 86400, year, now), (Kind.NOTICE, Kind.REPRIEVE, Kind.HERE)):
        for at in (0.0, now + float(year)):
            yield f"{kind.value} {shift:+d} s", lambda k=kind, v=now + shift, at=at: check(k, max(0, v), at)


def replays(site: Site) -> Cases:
    me = site.members[0]

    def check(kind: Kind, value: str) -> None:
        says(site, me, (kind, 1, value), keep=True)
        facts, made = dict(site.store.facts[JOB]), len(site.store.alloc[0].grants)
        for _ in range(29):
            says(site, me, (kind, 1, value), keep=True)
        assert set(site.store.facts[JOB]) <= set(facts) and len(site.store.alloc[0].grants) == made
        site.put_back()

    for kind, value in itertools.product(KINDS, ("0", "1", "1000500")):
        yield f"30 x {kind.value} {value}", lambda kind=kind, value=value: check(kind, value)


def reordered(site: Site) -> Cases:
    me = site.members[0]
    words = ((Kind.HELLO, 0, "0"), (Kind.EXIT, 1, "1"), (Kind.RELEASED, 1, "10"), (Kind.ATTACHED, 0, "0"))

    def check(order: tuple[tuple[Kind, int, str], ...], boot: str) -> None:
        by = Machine(me.uid, me.name, me.zone, boot, me.job, me.rank, me.attempt)
        for word in order:
            says(site, by, word, keep=True)
        site.put_back()

    for boot, order in itertools.product((me.boot, "another-boot"), itertools.permutations(words)):
        yield " ".join(kind.value for kind, _, _ in order), lambda order=order, boot=boot: check(order, boot)


def contradictions(site: Site) -> Cases:
    me, soon = site.members[0], str(int(site.now) + 60)
    words = [(kind, 1, soon if kind in (Kind.NOTICE, Kind.REPRIEVE) else "0") for kind in KINDS]
    for pair in itertools.combinations([*words, (Kind.EXIT, 1, "1"), (Kind.EXIT, 1, "2")], 2):
        yield f"{pair[0][0].value} and {pair[1][0].value}", lambda pair=pair: says(site, me, *pair)


def many_jobs(site: Site) -> Cases:
    def check(start: int, by: Machine) -> None:
        for number in range(start, start + 30):
            job = f"{number:08d}"
            site.fire(Shot(sync(by.boot, job=job, facts=[{"kind": "hello"}]), site.token(by), want=(200,), by=by))
            assert job not in site.store.facts and job not in site.store.active

    for start in range(0, 1020, 30):
        yield f"jobs {start}...", lambda start=start: check(start, (site.members[0], site.node)[start // 30 % 2])


# -- events


def push(entry: Any, **more: Any) -> bytes:
    raw = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    message = {"data": base64.b64encode(raw).decode(), "messageId": "1"} | more
    return json.dumps({"message": message, "subscription": "s"}).encode()


def resource(name: str, project: str = "p", zone: str = "z-a") -> dict[str, Any]:
    return {"protoPayload": {"resourceName": f"projects/{project}/zones/{zone}/instances/{name}"}}


def event(site: Site, label: str, body: bytes, *want: int) -> Case:
    """A hint at the most: nothing changes, because nothing has happened."""
    hint = Shot(body, site.clock_token(), "/v1/event", want=want or (200,), quarantine=True)
    return label, lambda: unmoved(site, hint)


def quiet(site: Site, label: str, body: bytes) -> Case:
    """Not even a look: no round is made for it."""

    def check() -> None:
        unmoved(site, Shot(body, site.clock_token(), "/v1/event", want=(200,), quarantine=True))
        assert not any('"ended"' in line for line in site.log.lines)

    return label, check


VM = f"sk-t-{JOB}-r0000-a1"


def unknown_source(site: Site) -> Cases:
    for source in ("aws.ec2", "cron", "", "pubsub.googleapis.com", "audit", "x" * 100, "eventarc", "gitlab"):
        yield quiet(
            site,
            f"as EventBridge {source[:9]}",
            json.dumps({"source": source, "detail": {"instance-id": "i-0"}}).encode(),
        )
        yield quiet(site, f"in a push {source[:9]}", push({"source": source, "protoPayload": {"serviceName": source}}))


def foreign_account(site: Site) -> Cases:
    for project in ("q", "P", "p2", "p-", "", "..", "p/zones/z-a/instances/x/projects/q", "prod", "other:p", "p%2f"):
        yield quiet(site, f"project {project}", push(resource(VM, project)))
    for link in (
        VM,
        f"instances/{VM}",
        f"//compute/p/{VM}",
        f"projects/p/{VM}",
        f"https://evil.example/projects/p/zones/z/instances/{VM}",
    ):
        yield quiet(site, link[:40], push({"protoPayload": {"resourceName": link}}))


def foreign_instance(site: Site) -> Cases:
    for name in (
        *("vm-1", "", "..", "sk-other-abcd2345-r0000-a1", "sk-t-ABCD2345-r0000-a1", f"{VM} ", f"{VM}\n", f"x{VM}"),
        *(f"sk-t-{JOB}-r0-a1", f"sk-t-{JOB}-r0000", "sk-t", f"{VM}/x", "$(id)", "sk-t-zzzz-r0000-a1", "\u0000"),
    ):
        yield quiet(site, f"{name!a}", push(resource(name)))


def duplicate_event(site: Site) -> Cases:
    for number in range(15):
        body = push(resource(f"sk-t-{JOB}-r{number % 3:04d}-a1"), messageId="7")
        yield event(site, f"the {number + 1}th time", body)


def late_event(site: Site) -> Cases:
    for hours in range(24, 39):
        body = push(
            resource(VM) | {"timestamp": "2001-01-01T00:00:00Z"}, publishTime=f"2001-01-{hours - 23:02d}T00:00:00Z"
        )
        yield event(site, f"{hours} h", body)


def batches(site: Site) -> Cases:
    entry = resource(VM)
    for count in (2, 3, 5, 10, 20, 50, 100):
        yield quiet(site, f"{count} in a list", push([entry] * count))
        yield quiet(site, f"{count} messages", json.dumps({"messages": [{"data": ""}] * count}).encode())
        whole = json.dumps([json.loads(push(entry))] * count).encode()
        yield event(site, f"{count} pushes", whole, 413 if len(whole) > 16384 else 200)


def malformed_log(site: Site) -> Cases:
    for raw in (
        *(
            b"",
            b"x",
            b"[]",
            b"null",
            b"1",
            b'"x"',
            b"\xff\xfe",
            b"[" * 9000,
            b'{"protoPayload":[]}',
            b'{"protoPayload":',
        ),
        *(b'{"protoPayload":{"resourceName":1}}', b'{"protoPayload":{"resourceName":null}}', b'{"protoPayload":null}'),
        *(b'{"protoPayload":"x"}', b"{}", b'{"protopayload":{"resourcename":"x"}}'),
    ):
        yield quiet(site, f"{raw[:30]!r}", push(raw))


def subscription_confirm(site: Site) -> Cases:
    for url in (
        "http://169.254.169.254/",
        "https://sns.us-east-1.amazonaws.com/?Action=ConfirmSubscription",
        "file:///etc/passwd",
    ):
        for kind in ("SubscriptionConfirmation", "Notification", "UnsubscribeConfirmation", "HTTP", ""):
            told = {"Type": kind, "SubscribeURL": url, "Token": CANARY, "TopicArn": "arn:aws:sns:r:1:t"}
            yield quiet(site, f"{kind} {url[:20]}", json.dumps(told).encode())
