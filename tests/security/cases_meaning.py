"""Good form and wrong meaning: what a machine may not say, and events that are none."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.record import Phase, SlotState
from tests.security.cases_body import GOOD
from tests.security.cases_identity import KINDS, Case, Cases, unmoved, with_record
from tests.security.site import CANARY, JOB, Machine, Shot, Site, sync

# -- meaning


def says(site: Site, by: Machine, *facts: tuple[Kind, int, str], keep: bool = False, **more: Any) -> bytes:
    words = [{"kind": kind.value, "gen": gen, "value": value} for kind, gen, value in facts]
    return site.fire(Shot(sync(by.boot, facts=words, **more), site.token(by), want=(200,), by=by), keep=keep)


def rank_too_high(site: Site) -> Cases:
    for node, kind in itertools.product((3, 4, 9999), KINDS):
        by = Machine("77", f"sk-t-{JOB}-n{node:04d}-a1", "z-a", "b", JOB, node, 1)
        body = sync("b", facts=[{"kind": kind.value, "gen": 1}])
        yield (
            f"node {node} {kind.value}",
            lambda b=body, by=by: unmoved(site, Shot(b, site.token(by), want=(200,), by=by)),
        )


def rank_of_another(site: Site) -> Cases:
    for by, kind in itertools.product(site.others, KINDS):
        yield f"{by.name} {kind.value}", lambda by=by, kind=kind: says(site, by, (kind, 1, "0"), job=JOB)


def unknown_job(site: Site) -> Cases:
    for job, kind in itertools.product(("zzzz9999", "00000000"), KINDS):
        by = Machine("77", f"sk-t-{job}-n0000-a1", "z-a", "b", job, 0, 1)
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
        by = Machine(site.members[0].uid, f"sk-t-{JOB}-n0000-a{attempt}", "z-a", "b", JOB, 0, attempt)
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
        nodes = site.store.records[JOB][0].nodes
        assert nodes[0].cur is not None
        intent = replace(nodes[0].cur, state=SlotState.INTENT, uid=None, boot=None, since=site.now)
        with with_record(site, nodes=(replace(nodes[0], cur=intent), *nodes[1:])):
            before = dict(site.store.facts[JOB])
            body = sync(me.boot, facts=[{"kind": "exit", "gen": gen, "value": code}])
            site.fire(Shot(body, site.token(me), want=(200,), by=me), keep=True)
            assert site.store.facts[JOB] == before, "an exit of nobody was taken in"

    for code, gen in itertools.product(("0", "1", "93", "-9", "137", "255", "2", "-15", "99"), (0, 1, 2, 7)):
        yield f"exit {code} of {gen}", lambda code=code, gen=gen: check(code, gen)


def lone_success(site: Site) -> Cases:
    def check(nodes: tuple[int, ...], times: int) -> None:
        for node in nodes * times:
            says(site, site.members[node], (Kind.EXIT, 1, "0"), keep=True)
            assert site.store.records[JOB][0].phase is Phase.RUN and site.store.records[JOB][0].outcome is None
        site.put_back()

    some = [nodes for size in (1, 2) for nodes in itertools.permutations(range(3), size)]
    for nodes, times in itertools.product(some, (1, 2, 3, 5)):
        yield f"nodes {nodes} x{times}", lambda nodes=nodes, times=times: check(nodes, times)


def time_travel(site: Site) -> Cases:
    me, now = site.members[0], int(site.now)
    year = 365 * 86400

    def check(kind: Kind, value: int, at: float) -> None:
        progress = GOOD["progress"] | {"at": at, "save_s": 1e308, "step_s": 1e308, "total_steps": 2**53}
        says(site, me, (kind, 1, str(value)), progress=progress, keep=True)
        record, told = site.store.records[JOB][0], site.store.progresses[JOB]
        assert told.at <= site.now, "the function's clock decides"
        assert told.save_s is not None and told.save_s <= 3600.0, "no stop is put off for ever"
        assert told.left_s is not None and told.left_s < 1e20, "its rounds can count with it"
        assert record.stop_deadline is None or site.now <= record.stop_deadline <= site.now + year
        site.put_back()

    for shift, kind in itertools.product((-year, -1, 0, 86400, year, now), (Kind.NOTICE, Kind.REPRIEVE, Kind.HERE)):
        for at in (0.0, now + float(year)):
            yield f"{kind.value} {shift:+d} s", lambda k=kind, v=now + shift, at=at: check(k, max(0, v), at)


def replays(site: Site) -> Cases:
    me = site.members[0]

    def check(kind: Kind, value: str) -> None:
        says(site, me, (kind, 1, value), keep=True)
        facts, made = dict(site.store.facts[JOB]), len(site.store.allocation[0].grants)
        for _ in range(29):
            says(site, me, (kind, 1, value), keep=True)
        assert set(site.store.facts[JOB]) <= set(facts) and len(site.store.allocation[0].grants) == made
        site.put_back()

    for kind, value in itertools.product(KINDS, ("0", "1", "1000500")):
        yield f"30 x {kind.value} {value}", lambda kind=kind, value=value: check(kind, value)


def reordered(site: Site) -> Cases:
    me = site.members[0]
    words = ((Kind.HELLO, 0, "0"), (Kind.EXIT, 1, "1"), (Kind.RELEASED, 1, "10"), (Kind.ATTACHED, 0, "0"))

    def check(order: tuple[tuple[Kind, int, str], ...], boot: str) -> None:
        by = Machine(me.uid, me.name, me.zone, boot, me.job, me.node, me.attempt)
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


VM = f"sk-t-{JOB}-n0000-a1"


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
        *("vm-1", "", "..", "sk-other-abcd2345-n0000-a1", "sk-t-ABCD2345-n0000-a1", f"{VM} ", f"{VM}\n", f"x{VM}"),
        *(f"sk-t-{JOB}-n0-a1", f"sk-t-{JOB}-n0000", "sk-t", f"{VM}/x", "$(id)", "sk-t-zzzz-n0000-a1", "\u0000"),
    ):
        yield quiet(site, f"{name!a}", push(resource(name)))


def duplicate_event(site: Site) -> Cases:
    for number in range(15):
        body = push(resource(f"sk-t-{JOB}-n{number % 3:04d}-a1"), messageId="7")
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
