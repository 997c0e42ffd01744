"""Who speaks: everything that is not one right token, and right tokens of the wrong machine."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.reconcile.service import auth, auth_aws
from spotkeeper.reconcile.service.auth import AuthError, Verifier
from tests.reconcile.service import identities as ids
from tests.reconcile.service.identities import part
from tests.security.site import JOB, Bucket, Machine, Shot, Site, sync

Case = tuple[str, Callable[[], object]]
Cases = Iterator[Case]
HELLO = sync(facts=[{"kind": "hello"}])
PATHS = ("/v1/sync", "/v1/tick", f"/v1/notify/{JOB}", "/v1/event", "/v1/channels/none/test")
KINDS = tuple(Kind)
RS = {"alg": "RS256", "kid": "one", "typ": "JWT"}


def shot(site: Site, label: str, **fields: Any) -> Case:
    sent = Shot(**fields)
    return label, lambda: site.fire(sent)


def refused(site: Site, label: str, token: str | None, path: str = "/v1/sync", **fields: Any) -> Case:
    return shot(site, f"{label} {path}", body=HELLO, token=token, path=path, want=(401,), **fields)


def no_token(site: Site) -> Cases:
    for path, token in itertools.product(PATHS, (None, "", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz")):
        yield refused(site, repr(token), token, path)


def malformed(site: Site) -> Cases:
    good = site.token()
    one, two, three = good.removeprefix("Bearer ").split(".")
    texts = (
        *("Bearer a", "Bearer a.b", "Bearer a.b.c", "Bearer a.b.c.d", "Bearer ...", "Bearer .a.b", "Bearer a..b"),
        *("bearer\t" + one, "BEARER " + good[7:], good.replace(" ", "  "), good + "\n", "\n" + good, good + " "),
        *(f"Bearer {one}.{two}", f"Bearer {one}.{two}.", f"Bearer {two}.{one}.{three}", f"Bearer {one}={two}={three}"),
        *("Bearer " + "a" * 9000 + ".b.c", "Bearer a+b/.c.d", "Bearer \u00e9.\u00fc.\u00f6", "Bearer a\0.b.c"),
        f"Bearer {part(b'[' * 3000)}.{two}.{three}",
        f"Bearer {part([1])}.{two}.{three}",
        f"Bearer {part(b'xx')}.{two}.{three}",
        f"Bearer {part({})}.{two}.{three}",
        f"Bearer {part({'alg': 'RS256', 'kid': 1})}.{two}.{three}",
        f"Bearer {part(RS | {'crit': ['b64'], 'b64': False})}.{two}.{three}",
        f"Bearer {one}.{part(b'{' * 3000)}.{three}",
        f"Bearer {one}.{two}.{three[:-4]}",
        f"Bearer {one}.{two[:-4]}AAAA.{three}",
    )
    for number, text in enumerate(texts):
        yield refused(site, f"text {number}", text)


def confused(site: Site) -> Cases:
    public = (
        ids.key("one")
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    claims = site.claims()
    for algorithm, digest in (("HS256", hashlib.sha256), ("HS384", hashlib.sha384), ("HS512", hashlib.sha512)):
        signing = f"{part(RS | {'alg': algorithm})}.{part(claims)}"
        token = f"Bearer {signing}.{part(hmac.digest(public, signing.encode(), digest))}"
        yield refused(site, f"{algorithm} with the public key", token)
    _, two, three = site.token().removeprefix("Bearer ").split(".")
    for algorithm, signature in itertools.product(("none", "None", "nOnE", "", "rs256", "ES256", "HS256"), ("", three)):
        yield refused(site, f"alg {algorithm!r}", f"Bearer {part(RS | {'alg': algorithm})}.{two}.{signature}")
    for algorithm in ("RS384", "RS512", "PS256"):
        yield refused(site, algorithm, ids.bearer(claims, algorithm=algorithm))
    evil = ids.key("evil")
    for header in (
        {"kid": "one"},
        {"kid": "one", "jwk": ids.public_jwk("evil")},
        {"kid": "one", "jku": "http://169.254.169.254/"},
    ):
        yield refused(
            site, f"own key {sorted(header)}", "Bearer " + jwt.encode(claims, evil, "RS256", headers=dict(header))
        )


def wrong_audience(site: Site) -> Cases:
    right = ids.AGENTS
    for aud in (
        *(ids.AUDIENCE, right + "/", right.upper(), right + "?", right[:-1], "", "*", [right], [right, right]),
        *(None, 7, auth.GCLOUD_AUDIENCE, "https://evil.example/v1/sync", right.replace("https", "http")),
    ):
        yield refused(site, f"aud {aud}", site.token(aud=aud))
    for path in PATHS[1:]:
        yield refused(site, "the agents' audience", site.clock_token(aud=ids.AGENTS), path)


def wrong_issuer(site: Site) -> Cases:
    for iss in (
        *("https://evil.example", "http://accounts.google.com", "https://accounts.google.com/", "accounts.google.co"),
        *("https://accounts.google.com.evil.example", None, ""),
    ):
        yield refused(site, f"iss {iss}", site.token(iss=iss))


def times(site: Site) -> Cases:
    now = int(site.now)
    for iat, exp in (
        *((now - 4000, now - 61), (now - 4000, now - 60), (1, 3601), (now + 61, now + 3600), (now, now + 7 * 86400)),
        *(
            (now + 50, now + 40),
            (now, now),
            (now - 5, str(now + 50)),
            (now - 5, True),
            (now - 5, None),
            (None, now + 9),
        ),
        *((now - 86400, now + 86400), (-1, now + 50), (now - 5, 2**63), (now + 365 * 86400, now + 366 * 86400)),
    ):
        yield refused(site, f"{iat} to {exp}", site.token(iat=iat, exp=exp))
    yield refused(site, "not before", site.token(nbf=now + 61))
    me = site.members[0]
    for iat, exp in ((now - 3600, now - 59), (now + 59, now + 3000), (now - 10, now + 1)):
        yield shot(
            site,
            f"within the skew: {iat} to {exp}",
            body=sync(me.boot),
            token=site.token(iat=iat, exp=exp),
            want=(200,),
        )


def stripped(token: str) -> str:
    return f"{token.rpartition('.')[0]}.{auth.STRIPPED}"


def marker(site: Site) -> Cases:
    for path in PATHS:
        yield refused(site, "a node's", stripped(site.token()), path)
        yield refused(site, "the schedule's", stripped(site.clock_token()), path)
        yield refused(site, "empty signature", site.clock_token().rpartition(".")[0] + ".", path)
    behind = Verifier(site.keys, site.world, ids.AUDIENCE, behind_iam=True)

    def after(path: str, token: str) -> object:
        """Behind Cloud Run too."""
        kept, site.runtime._verifier = site.runtime._verifier, behind
        try:
            return site.fire(Shot(HELLO, token, path, want=(401,)))
        finally:
            site.runtime._verifier = kept

    for path, token in (
        ("/v1/sync", stripped(site.token())),
        (f"/v1/notify/{JOB}", stripped(site.clock_token())),
        ("/v1/tick", stripped(site.token())),
        ("/v1/event", stripped(site.clock_token(email="eve@example.com"))),
    ):
        yield f"behind Cloud Run {path}", lambda path=path, token=token: after(path, token)


def key_ids(site: Site) -> Cases:
    def bounded(kid: str) -> None:
        fetched = site.keys.fetched
        for number in range(20):
            site.fire(Shot(HELLO, ids.bearer(site.claims(), kid=f"{kid}{number}"), want=(401,)))
        assert site.keys.fetched <= fetched + 1, "unknown ids made it fetch again and again"

    def rotated() -> None:
        site.fire(Shot(sync(site.members[0].boot), site.token(), want=(200,)))
        old, site.keys.listed = site.keys.listed, [ids.public_jwk("new")]
        site.keys._fetched = site.keys._tried = None
        try:
            site.fire(Shot(HELLO, site.token(), want=(401,)))
            new = "Bearer " + jwt.encode(site.claims(), ids.key("new"), "RS256", headers={"kid": "new"})
            site.fire(Shot(sync(site.members[0].boot), new, want=(200,)))
        finally:
            site.keys.listed, site.keys._fetched = old, None

    for kid in ("two", "../../etc/passwd", "one ", "ONE", "", "0", "one\0", "k" * 500, "https://evil.example", "'"):
        yield f"kid {kid[:20]!r}", lambda kid=kid: bounded(kid)
    yield "rotated", rotated


def other_account(site: Site) -> Cases:
    for email in ("eve@example.com", ids.NODES.upper(), ids.NODES + ".evil", "", None, ids.CLOCK_MAIL, 7):
        yield refused(site, f"email {email}", site.token(email=email))
    for verified in (False, None, "true", 1, 0):
        yield refused(site, f"email_verified {verified!r}", site.token(email_verified=verified))
    me = site.members[0]
    for project in ("q", "P", "", "p ", None, 7):
        said = ids.machine(instance_id=me.uid, instance_name=me.name, zone=me.zone, project_id=project)
        yield refused(site, f"project {project!r}", ids.bearer(site.claims(**said)))
    yield refused(site, "no machine", ids.bearer(site.claims(google=None)))


def spoken(site: Site, by: Machine, kind: Kind, **more: Any) -> Shot:
    """One fact of ``by``, which may touch its own node at the most."""
    fact: dict[str, Any] = {"kind": kind.value, "gen": 1, "value": "0"}
    return Shot(sync(more.pop("boot", by.boot), facts=[fact], **more), site.token(by), want=(200,), by=by)


def other_rank(site: Site) -> Cases:
    """A machine of one node (or job) that names another's job, boot or attempt."""
    for by, kind in itertools.product((site.others[0], site.members[2]), KINDS):
        yield f"{by.name} {kind.value} for {JOB}", lambda by=by, kind=kind: site.fire(spoken(site, by, kind, job=JOB))
        stolen = site.members[0].boot
        yield (
            f"{by.name} {kind.value} with another's boot",
            lambda by=by, kind=kind, stolen=stolen: site.fire(spoken(site, by, kind, boot=stolen)),
        )


@contextmanager
def with_record(site: Site, job: str = JOB, **changes: Any) -> Iterator[None]:
    """The job's record with changes, for as long as this lasts."""
    kept = site.rest
    record, version = site.store.records[job]
    site.store.records[job] = (replace(record, **changes), version)
    site.rest = Bucket.of(site.store)
    try:
        yield
    finally:
        site.rest = kept
        site.put_back()


def unmoved(site: Site, sent: Shot) -> None:
    """It may leave a word of its own, and moves nothing: no call, no new record."""
    site.cloud.asked.clear()
    record = site.store.records[JOB]
    site.fire(sent, keep=True)
    assert site.store.records[JOB] == record and not site.cloud.asked
    site.put_back()


def superseded(site: Site) -> Cases:
    one = site.members[0]

    def say(attempt: int, kind: Kind) -> None:
        nodes = site.store.records[JOB][0].nodes
        assert nodes[0].cur is not None
        newer = replace(nodes[0], top=5, cur=replace(nodes[0].cur, attempt=5))
        with with_record(site, nodes=(newer, *nodes[1:])):
            old = Machine(one.uid, f"sk-t-{JOB}-n0000-a{attempt}", one.zone, one.boot, JOB, 0, attempt)
            before = set(site.store.facts[JOB])
            site.fire(spoken(site, old, kind), keep=True)
            new = [site.store.facts[JOB][key].kind for key in set(site.store.facts[JOB]) - before]
            assert set(new) <= {Kind.FREED}, "it may say that it let go, and nothing else"

    for attempt, kind in itertools.product((1, 2, 4), KINDS):
        yield f"attempt {attempt} of 5 says {kind.value}", lambda attempt=attempt, kind=kind: say(attempt, kind)


def impostor(site: Site) -> Cases:
    def say(by: Machine, kind: Kind) -> None:
        site.fire(spoken(site, by, kind), keep=True)
        said = {fact.kind for fact in site.store.facts[JOB].values() if fact.uid == by.uid and fact.node == 0}
        assert said <= {Kind.FREED}, "it may say that it let go, and nothing else"
        site.put_back()
        unmoved(site, spoken(site, by, kind))

    for uid, kind in itertools.product(("1", site.members[1].uid), KINDS):
        by = Machine(uid, site.members[0].name, site.members[0].zone, site.members[0].boot, JOB, 0, 1)
        yield f"{kind.value} from id {uid}", lambda by=by, kind=kind: say(by, kind)


ACCOUNT, ROLE = "123456789012", "arn:aws:iam::123456789012:role/sk-t-node"
INSTANCE = "i-0123456789abcdef0"
GOOD_IAM = auth_aws.Iam(
    ACCOUNT,
    f"arn:aws:sts::{ACCOUNT}:assumed-role/sk-t-node/{INSTANCE}",
    f"AROAEXAMPLEEXAMPLE:{INSTANCE}",
    f"AROAEXAMPLEEXAMPLE:{INSTANCE}",
    "ASIAEXAMPLEEXAMPLE",
)


def human_session(_: Site) -> Cases:
    arn = f"arn:aws:sts::{ACCOUNT}:assumed-role/"
    wrong = {
        "nobody": None,
        "a person's role": replace(GOOD_IAM, user_arn=f"{arn}admin/{INSTANCE}"),
        "a role that ends alike": replace(GOOD_IAM, user_arn=f"{arn}my-sk-t-node/{INSTANCE}"),
        "a role that begins alike": replace(GOOD_IAM, user_arn=f"{arn}sk-t-node2/{INSTANCE}"),
        "another case": replace(GOOD_IAM, user_arn=f"{arn}SK-T-NODE/{INSTANCE}"),
        "a user": replace(GOOD_IAM, user_arn=f"arn:aws:iam::{ACCOUNT}:user/{INSTANCE}"),
        "federated": replace(GOOD_IAM, user_arn=f"arn:aws:sts::{ACCOUNT}:federated-user/{INSTANCE}"),
        "the account itself": replace(GOOD_IAM, user_arn=f"arn:aws:iam::{ACCOUNT}:root"),
        "another account's ARN": replace(GOOD_IAM, user_arn=GOOD_IAM.user_arn.replace(ACCOUNT, "999999999999")),
        "another account's id": replace(GOOD_IAM, account_id="999999999999"),
        "a name that is no id": replace(
            GOOD_IAM, user_arn=f"{arn}sk-t-node/ann", user_id="AROAX:ann", caller_id="AROAX:ann"
        ),
        "an id in upper case": replace(GOOD_IAM, user_arn=f"{arn}sk-t-node/{INSTANCE.upper()}"),
        "an id too long": replace(GOOD_IAM, user_arn=GOOD_IAM.user_arn + "0"),
        "a path in the session": replace(GOOD_IAM, user_arn=GOOD_IAM.user_arn + "/x"),
        "a line after it": replace(GOOD_IAM, user_arn=GOOD_IAM.user_arn + "\n"),
        "another session's id": replace(GOOD_IAM, user_id="AROAEXAMPLEEXAMPLE:ann", caller_id="AROAEXAMPLEEXAMPLE:ann"),
        "ids that differ": replace(GOOD_IAM, caller_id="AROAOTHER:" + INSTANCE),
        "a user's id": replace(GOOD_IAM, user_id=f"AIDAX:{INSTANCE}", caller_id=f"AIDAX:{INSTANCE}"),
        "a lasting key": replace(GOOD_IAM, access_key="AKIAEXAMPLEEXAMPLE"),
        "empty": auth_aws.Iam(),
    }

    def check(iam: auth_aws.Iam | None) -> None:
        with pytest.raises(AuthError) as told:
            auth_aws.instance(iam, ACCOUNT, ROLE)
        assert INSTANCE not in str(told.value)

    for label, iam in wrong.items():
        yield label, lambda iam=iam: check(iam)


def two_headers(site: Site) -> Cases:
    good, bad = site.token(), site.token(aud="x")
    for pair in ((good, good), (good, bad), (bad, good), ("", good), (good, "Basic x")):
        for joined in (", ".join(pair), ",".join(pair), " ".join(pair)):
            if joined.strip() != good:
                yield refused(site, f"joined {len(joined)}", joined)
    for path in PATHS[1:]:
        yield refused(site, "joined", f"{site.clock_token()},{site.clock_token()}", path)
    yield refused(site, "only the platform's", None, headers={"X-Serverless-Authorization": good})
    yield refused(site, "only another", None, headers={"X-Forwarded-Authorization": good, "Proxy-Authorization": good})
