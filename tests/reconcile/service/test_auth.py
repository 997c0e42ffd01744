"""Who may speak: one right token, and every wrong one we could think of."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from spotkeeper.reconcile.clouds.http_client import Answer
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.service import auth
from spotkeeper.reconcile.service.auth import AuthError, Caller, KeySet, KeysUnavailableError, Verifier
from tests.module_time import replace_time
from tests.reconcile.service import identities as ids
from tests.reconcile.service.identities import NOW, bearer, claims, machine, part


class At:
    def __init__(self, now: float = NOW) -> None:
        self.at = now

    def now(self) -> float:
        return self.at


@pytest.fixture
def issuer() -> Iterator[ids.Issuer]:
    with ids.issuer() as running:
        yield running


@pytest.fixture
def clock() -> At:
    return At()


@pytest.fixture
def verifier(issuer: ids.Issuer, clock: At) -> Verifier:
    return Verifier(KeySet(issuer.url), clock, ids.AUDIENCE)


def agent(verifier: Verifier, header: str | None) -> Speaker:
    return verifier.agent(header, ids.NODES, "p")


def test_a_vm_is_identified_by_its_token(verifier: Verifier) -> None:
    assert agent(verifier, bearer()) == Speaker(ids.UID, ids.VM, ids.ZONE)


@pytest.mark.parametrize("issued_by", ["https://accounts.google.com", "accounts.google.com"])
def test_both_issuer_names_are_accepted(verifier: Verifier, issued_by: str) -> None:
    agent(verifier, bearer(claims(iss=issued_by)))


def public_pem() -> bytes:
    return (
        ids.key("one")
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def confused(algorithm: str) -> str:
    """Signed by HMAC with the *public* key as its secret, as a confused verifier would check it."""
    import hashlib
    import hmac

    signing = f"{part({'alg': algorithm, 'kid': 'one', 'typ': 'JWT'})}.{part(claims())}"
    digest = {"HS256": hashlib.sha256, "HS384": hashlib.sha384, "HS512": hashlib.sha512}[algorithm]
    return "Bearer " + signing + "." + part(hmac.digest(public_pem(), signing.encode(), digest))


def with_parts(header: Any = None, body: Any = None, signature: str | None = None) -> str:
    """The right token with some of its parts replaced."""
    one, two, three = bearer().removeprefix("Bearer ").split(".")
    return "Bearer " + ".".join(
        (
            one if header is None else part(header),
            two if body is None else part(body),
            three if signature is None else signature,
        )
    )


def flipped(index: int) -> str:
    token = bearer()
    return token[:index] + ("A" if token[index] != "A" else "B") + token[index + 1 :]


RS = {"alg": "RS256", "kid": "one", "typ": "JWT"}
BAD: dict[str, Any] = {
    # no token, or none that is one
    "no header": None,
    "empty": "",
    "no scheme": lambda: bearer().removeprefix("Bearer "),
    "basic": "Basic dXNlcjpwYXNz",
    "only the scheme": "Bearer ",
    "two spaces": lambda: bearer().replace("Bearer ", "Bearer  "),
    "two headers joined": lambda: bearer() + ", " + bearer(),
    "trailing newline": lambda: bearer() + "\n",
    "one part": "Bearer abc",
    "two parts": "Bearer abc.def",
    "four parts": lambda: bearer() + ".x",
    "huge": "Bearer " + "a" * 9000 + ".b.c",
    "not base64url": "Bearer a+b/.c.d",
    "unicode": "Bearer é.ü.ö",
    "nul": "Bearer a\0.b.c",
    # headers
    "header no json": lambda: with_parts(header=b"xx"),
    "header a list": lambda: with_parts(header=[1]),
    "header without alg": lambda: with_parts(header={"kid": "one"}),
    "header without kid": lambda: with_parts(header={"alg": "RS256"}),
    "kid a number": lambda: with_parts(header={**RS, "kid": 1}),
    "kid unknown": lambda: bearer(kid="two"),
    "kid a path": lambda: bearer(kid="../../etc/passwd"),
    "typ other": lambda: with_parts(header={**RS, "typ": "at+jwt"}),
    "critical extension": lambda: with_parts(header={**RS, "crit": ["b64"], "b64": False}),
    "header deep": lambda: with_parts(header=b"[" * 5000),
    # algorithms
    "alg none, no signature": lambda: with_parts(header={**RS, "alg": "none"}, signature=""),
    "alg none, signature kept": lambda: with_parts(header={**RS, "alg": "none"}),
    "alg None": lambda: with_parts(header={**RS, "alg": "None"}),
    "alg nOnE": lambda: with_parts(header={**RS, "alg": "nOnE"}, signature="x"),
    "alg HS256 with the public key": lambda: confused("HS256"),
    "alg HS384 with the public key": lambda: confused("HS384"),
    "alg HS512 with the public key": lambda: confused("HS512"),
    "alg RS512": lambda: bearer(algorithm="RS512"),
    "alg PS256": lambda: bearer(algorithm="PS256"),
    "alg rs256": lambda: with_parts(header={**RS, "alg": "rs256"}),
    "alg a list": lambda: with_parts(header={**RS, "alg": ["RS256"]}),
    "own key in the header": lambda: (
        "Bearer "
        + jwt.encode(claims(), ids.key("evil"), "RS256", headers={"kid": "one", "jwk": ids.public_jwk("evil")})
    ),
    "own key set in the header": lambda: (
        "Bearer " + jwt.encode(claims(), ids.key("evil"), "RS256", headers={"kid": "evil", "jku": "http://127.0.0.1/x"})
    ),
    # signatures
    "signature removed by Cloud Run": lambda: with_parts(signature=auth.STRIPPED),
    "signature empty": lambda: bearer().rpartition(".")[0] + ".",
    "signature of another token": lambda: with_parts(signature=bearer(claims(sub="2")).rpartition(".")[2]),
    "signature flipped": lambda: flipped(-40),
    "signature cut": lambda: bearer()[:-8],
    "body flipped": lambda: flipped(len(bearer()) // 2),
    "body replaced": lambda: with_parts(body=claims(email="other@x")),
    "another key": lambda: "Bearer " + jwt.encode(claims(), ids.key("evil"), "RS256", headers={"kid": "one"}),
    # bodies, rightly signed
    "no issuer": lambda: bearer(claims(iss=None)),
    "another issuer": lambda: bearer(claims(iss="https://evil.example")),
    "an issuer that begins alike": lambda: bearer(claims(iss="https://accounts.google.com.evil.example")),
    "issuer by http": lambda: bearer(claims(iss="http://accounts.google.com")),
    "no audience": lambda: bearer(claims(aud=None)),
    "another audience": lambda: bearer(claims(aud="https://other.example")),
    "audience with a slash": lambda: bearer(claims(aud=ids.AGENTS + "/")),
    "audience in other case": lambda: bearer(claims(aud=ids.AGENTS.upper())),
    "a list of audiences": lambda: bearer(claims(aud=[ids.AGENTS])),
    "the platform's audience": lambda: bearer(claims(aud=ids.AUDIENCE)),
    "gcloud's audience": lambda: bearer(claims(aud=auth.GCLOUD_AUDIENCE)),
    "audience empty": lambda: bearer(claims(aud="")),
    "no expiry": lambda: bearer(claims(exp=None)),
    "expired": lambda: bearer(claims(iat=int(NOW) - 4000, exp=int(NOW) - 61)),
    "expired at the edge of the skew": lambda: bearer(claims(iat=int(NOW) - 4000, exp=int(NOW) - 60)),
    "expired years ago": lambda: bearer(claims(iat=1, exp=3601)),
    "of the future": lambda: bearer(claims(iat=int(NOW) + 61, exp=int(NOW) + 3600)),
    "not before the future": lambda: bearer(claims(nbf=int(NOW) + 61)),
    "lives for days": lambda: bearer(claims(exp=int(NOW) + 7 * 86400)),
    "ends before it begins": lambda: bearer(claims(iat=int(NOW) + 50, exp=int(NOW) + 40)),
    "expiry a string": lambda: bearer(claims(exp=str(int(NOW) + 3600))),
    "expiry true": lambda: bearer(claims(exp=True)),
    "no iat": lambda: bearer(claims(iat=None)),
    "no e-mail": lambda: bearer(claims(email=None)),
    "another account": lambda: bearer(claims(email="other@p.iam.gserviceaccount.com")),
    "the schedule's account": lambda: bearer(claims(email=ids.CLOCK_MAIL)),
    "e-mail in other case": lambda: bearer(claims(email=ids.NODES.upper())),
    "e-mail not verified": lambda: bearer(claims(email_verified=False)),
    "e-mail verified by a string": lambda: bearer(claims(email_verified="true")),
    "no machine": lambda: bearer(claims(google=None, aud=ids.AGENTS)),
    "machine empty": lambda: bearer(claims(google={}, aud=ids.AGENTS)),
    "machine without an id": lambda: bearer(claims(google={"compute_engine": {"instance_name": "x"}})),
    "another project": lambda: bearer(claims(**machine(project_id="q"))),
    "id no number": lambda: bearer(claims(**machine(instance_id="a.b"))),
    "id an integer": lambda: bearer(claims(**machine(instance_id=4242))),
    "id empty": lambda: bearer(claims(**machine(instance_id=""))),
    "id in other digits": lambda: bearer(claims(**machine(instance_id="٤٢"))),
    "name empty": lambda: bearer(claims(**machine(instance_name=""))),
    "zone missing": lambda: bearer(claims(**machine(zone=None))),
}


REASONS = {
    "no token": ["no header"],
    "not a bearer token": [
        "empty",
        "no scheme",
        "basic",
        "only the scheme",
        "two spaces",
        "two headers joined",
        "trailing newline",
        "one part",
        "two parts",
        "four parts",
        "huge",
        "not base64url",
        "unicode",
        "nul",
        "alg none, no signature",
        "signature empty",
    ],
    "not a token's header": [
        "header no json",
        "header a list",
        "header without alg",
        "header without kid",
        "kid a number",
        "header deep",
        "alg a list",
    ],
    "unknown key id": ["kid unknown", "kid a path", "own key set in the header"],
    "not an RS256 token": [
        "typ other",
        "critical extension",
        "alg none, signature kept",
        "alg None",
        "alg nOnE",
        "alg HS256 with the public key",
        "alg HS384 with the public key",
        "alg HS512 with the public key",
        "alg RS512",
        "alg PS256",
        "alg rs256",
    ],
    "the signature is invalid": [
        "own key in the header",
        "signature of another token",
        "signature flipped",
        "signature cut",
        "body flipped",
        "body replaced",
        "another key",
    ],
    "the signature was removed": ["signature removed by Cloud Run"],
    "claims missing, or of the wrong type": [
        "no issuer",
        "no audience",
        "a list of audiences",
        "no expiry",
        "expiry a string",
        "expiry true",
        "no iat",
        "no e-mail",
        "e-mail verified by a string",
        "machine without an id",
        "id an integer",
        "zone missing",
    ],
    "another issuer": ["another issuer", "an issuer that begins alike", "issuer by http"],
    "another audience": [
        "another audience",
        "audience with a slash",
        "audience in other case",
        "the platform's audience",
        "gcloud's audience",
        "audience empty",
    ],
    "no claims about a machine: request the token with format=full": ["no machine", "machine empty"],
    "expired": ["expired", "expired at the edge of the skew", "expired years ago"],
    "not valid yet": ["of the future", "not before the future"],
    "exp is not within 7200 s after iat": ["lives for days", "ends before it begins"],
    "another service account": ["another account", "the schedule's account", "e-mail in other case"],
    "an email that is not verified": ["e-mail not verified"],
    "another project": ["another project"],
    "the machine's id or name in the token is malformed": [
        "id no number",
        "id empty",
        "id in other digits",
        "name empty",
    ],
}
WHY = {case: why for why, cases in REASONS.items() for case in cases}


@pytest.mark.parametrize("case", BAD)
def test_invalid_tokens_are_refused(verifier: Verifier, case: str) -> None:
    header = BAD[case]() if callable(BAD[case]) else BAD[case]
    with pytest.raises(AuthError) as refusal:
        agent(verifier, header)
    assert str(refusal.value) == WHY[case], "refused for what it says, not for how it was made"


def test_the_table_of_invalid_tokens_is_long() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize(
    ("now", "valid"), [(-61, False), (-60, True), (0, True), (3599, True), (3659, True), (3660, False), (10**7, False)]
)
def test_times_are_virtual_and_skewed_by_a_minute(verifier: Verifier, clock: At, now: float, valid: bool) -> None:
    clock.at = NOW + now
    if valid:
        agent(verifier, bearer())
    else:
        with pytest.raises(AuthError):
            agent(verifier, bearer())


@pytest.mark.parametrize(("audience", "email"), [("", ids.NODES), (ids.AUDIENCE, "")])
def test_an_unset_expectation_matches_no_token(issuer: ids.Issuer, clock: At, audience: str, email: str) -> None:
    verifier = Verifier(KeySet(issuer.url), clock, audience)
    with pytest.raises(AuthError):
        verifier.agent(bearer(claims(aud=audience, email=email)), email, "p")


class TestInvokers:
    MAILS = frozenset({ids.CLOCK_MAIL, "ann@example.com"})

    def test_invokers_are_identified_by_email(self, verifier: Verifier) -> None:
        assert verifier.invoker(bearer(claims(email=ids.CLOCK_MAIL, google=None)), self.MAILS) == Caller(ids.CLOCK_MAIL)

    def test_gclouds_audience_is_accepted_for_people(self, verifier: Verifier) -> None:
        token = bearer(claims(email="ann@example.com", aud=auth.GCLOUD_AUDIENCE, google=None))
        assert verifier.invoker(token, self.MAILS).email == "ann@example.com"

    @pytest.mark.parametrize(
        "changes",
        [
            {"email": ids.NODES},
            {"email": "eve@example.com"},
            {"aud": "https://other.example"},
            {"exp": int(NOW) - 61, "iat": int(NOW) - 4000},
            {"email_verified": False},
        ],
    )
    def test_other_callers_are_refused(self, verifier: Verifier, changes: dict[str, Any]) -> None:
        token = bearer(claims(**({"email": ids.CLOCK_MAIL, "google": None} | changes)))
        with pytest.raises(AuthError):
            verifier.invoker(token, self.MAILS)

    def test_without_invokers_every_caller_is_refused(self, verifier: Verifier) -> None:
        with pytest.raises(AuthError):
            verifier.invoker(bearer(claims(email=ids.CLOCK_MAIL)), frozenset())

    def stripped(self, **changes: Any) -> str:
        token = bearer(claims(**({"email": ids.CLOCK_MAIL, "google": None} | changes)))
        return token.rpartition(".")[0] + "." + auth.STRIPPED

    @pytest.fixture
    def behind(self, issuer: ids.Issuer, clock: At) -> Verifier:
        return Verifier(KeySet(issuer.url), clock, ids.AUDIENCE, behind_iam=True)

    def test_a_token_without_signature_counts_only_as_a_hint_behind_cloud_run(
        self, behind: Verifier, verifier: Verifier
    ) -> None:
        for refused in (verifier.invoker, verifier.hint, behind.invoker):
            with pytest.raises(AuthError, match="removed"):
                refused(self.stripped(), self.MAILS)
        assert behind.hint(self.stripped(), self.MAILS) == Caller(ids.CLOCK_MAIL, verified=False)
        with pytest.raises(AuthError, match="removed"):
            agent(behind, with_parts(signature=auth.STRIPPED))
        for wrong in ({"email": "eve@example.com"}, {"aud": "x"}, {"iss": "x"}, {"exp": 2, "iat": 1}):
            with pytest.raises(AuthError):
                behind.hint(self.stripped(**wrong), self.MAILS)

    def test_after_an_unchecked_token_no_marker_counts(self, behind: Verifier) -> None:
        """Opened to all, Cloud Run spoils no token: the schedule's next one shows it; later ones are refused."""
        whole = bearer(claims(email=ids.CLOCK_MAIL, google=None))
        assert behind.hint(whole, self.MAILS, platform=whole).verified, "an operator's two tokens show nothing"
        assert not behind.hint(self.stripped(), self.MAILS).verified
        assert behind.hint(whole, self.MAILS).verified
        with pytest.raises(AuthError, match="removed"):
            behind.hint(self.stripped(), self.MAILS)

    def test_a_forged_token_does_not_lock_out_the_schedule(self, behind: Verifier) -> None:
        forged = "Bearer " + jwt.encode(claims(email=ids.CLOCK_MAIL), ids.key("evil"), "RS256", headers={"kid": "one"})
        for token in (forged, bearer(claims(email="eve@example.com", google=None))):
            with pytest.raises(AuthError):
                behind.hint(token, self.MAILS)
        assert behind.hint(self.stripped(), self.MAILS) == Caller(ids.CLOCK_MAIL, verified=False)


class TestKeySet:
    def test_keys_are_fetched_once_an_hour(
        self, issuer: ids.Issuer, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(3):
            agent(verifier, bearer())
        assert issuer.fetched == 1
        monkeypatch.setattr(auth, "KEYS_TTL_S", -1.0)
        agent(verifier, bearer())
        assert issuer.fetched == 2

    def test_a_new_key_is_fetched_but_not_for_every_unknown_id(
        self, issuer: ids.Issuer, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        agent(verifier, bearer())
        issuer.keys.append(ids.public_jwk("new"))
        token = "Bearer " + jwt.encode(claims(), ids.key("new"), "RS256", headers={"kid": "new"})
        with pytest.raises(AuthError, match="unknown key"):
            agent(verifier, token)
        assert issuer.fetched == 1, "fetched a moment ago"
        monkeypatch.setattr(auth, "REFETCH_S", -1.0)
        agent(verifier, token)
        assert issuer.fetched == 2
        monkeypatch.setattr(auth, "REFETCH_S", 60.0)
        for number in range(20):
            with pytest.raises(AuthError):
                agent(verifier, bearer(kid=f"made-up-{number}"))
        assert issuer.fetched == 2

    def test_a_revoked_key_is_refused_after_the_next_fetch(
        self, issuer: ids.Issuer, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        agent(verifier, bearer())
        issuer.keys[:] = [ids.public_jwk("new")]
        monkeypatch.setattr(auth, "KEYS_TTL_S", -1.0)
        with pytest.raises(AuthError, match="unknown key"):
            agent(verifier, bearer())

    def test_an_outage_is_survived_for_an_hour_and_no_longer(
        self, issuer: ids.Issuer, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        agent(verifier, bearer())
        issuer.raw = (503, b"")
        monkeypatch.setattr(auth, "REFETCH_S", -1.0)
        with pytest.raises(AuthError, match="unknown key"):
            agent(verifier, bearer(kid="two"))
        agent(verifier, bearer())
        monkeypatch.setattr(auth, "KEYS_TTL_S", -1.0)
        with pytest.raises(KeysUnavailableError):
            agent(verifier, bearer())

    def test_failed_fetches_are_not_repeated_by_every_request(
        self, issuer: ids.Issuer, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        issuer.raw = (503, b"")
        for _ in range(5):
            with pytest.raises(KeysUnavailableError):
                agent(verifier, bearer())
        assert issuer.fetched == 1
        issuer.raw = None
        monkeypatch.setattr(auth, "AGAIN_S", -1.0)
        agent(verifier, bearer())
        assert issuer.fetched == 2

    @pytest.mark.parametrize(
        "raw",
        [(200, b"<html>"), (200, b'{"keys": 1}'), (200, b"\xff"), (200, b"x" * 300_000), (302, b""), (500, b"")],
    )
    def test_an_invalid_key_set_is_refused(
        self, issuer: ids.Issuer, verifier: Verifier, raw: tuple[int, bytes]
    ) -> None:
        issuer.raw = raw
        with pytest.raises(KeysUnavailableError):
            agent(verifier, bearer())
        assert issuer.fetched == 1, "redirects are not followed"

    @pytest.mark.parametrize(
        "jwk",
        [
            lambda: ids.public_jwk("one", kid=""),
            lambda: ids.public_jwk("one", use="enc"),
            lambda: ids.public_jwk("one", alg="RS512"),
            lambda: ids.public_jwk("one", n="!!"),
            lambda: {"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "HS256"},
            lambda: {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "one"},
            lambda: ids.public_jwk("small", bits=1024, kid="one"),
        ],
    )
    def test_other_kinds_of_keys_are_ignored(self, issuer: ids.Issuer, verifier: Verifier, jwk: Any) -> None:
        issuer.keys[:] = [jwk(), ids.public_jwk("new")]
        with pytest.raises(AuthError, match="unknown key"):
            agent(verifier, bearer())
        agent(verifier, "Bearer " + jwt.encode(claims(), ids.key("new"), "RS256", headers={"kid": "new"}))

    def test_the_size_of_a_key_set_is_bounded(self, issuer: ids.Issuer, verifier: Verifier) -> None:
        issuer.keys[:0] = [ids.public_jwk("one", kid=f"k{number}") for number in range(auth.MAX_KEYS)]
        with pytest.raises(AuthError, match="unknown key"):
            agent(verifier, bearer())
        agent(verifier, bearer(kid=f"k{auth.MAX_KEYS - 1}"))

    @pytest.mark.parametrize("url", ["", "http://keys.example/x", "ftp://x/y", "https://", "file:///etc/passwd"])
    def test_keys_are_fetched_by_https_or_from_loopback(self, url: str) -> None:
        with pytest.raises(ValueError, match="SPOTKEEPER_JWKS"):
            KeySet(url)


class Slow(KeySet):
    """A key set whose endpoint answers when told to. ``asked``: when it has been asked."""

    def __init__(self) -> None:
        super().__init__("https://keys.example/certs")
        self.asked, self.answer = threading.Event(), threading.Event()
        self.calls = 0
        self.status = 200
        self.answer.set()
        self._wire = self  # type: ignore[assignment]

    def call(self, *_: object) -> Answer:
        self.calls += 1
        self.asked.set()
        assert self.answer.wait(60)
        return Answer(self.status, json.dumps({"keys": [ids.public_jwk("one"), ids.public_jwk("new")]}).encode())


class TestSlowKeySet:
    def test_during_a_fetch_other_requests_use_known_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = Slow()
        known = keys.key("one")
        monkeypatch.setattr(auth, "KEYS_FRESH_S", -1.0)
        monkeypatch.setattr(auth, "REFETCH_S", -1.0)
        keys.asked.clear()
        keys.answer.clear()
        with ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(keys.key, "one")
            assert keys.asked.wait(60)
            assert [keys.key("one") for _ in range(20)] == [known] * 20
            assert not fetching.done()
            keys.answer.set()
            assert fetching.result(60) is not None
        assert keys.calls == 2

    def test_an_unknown_key_is_waited_for_a_limited_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = Slow()
        keys.answer.clear()
        monkeypatch.setattr(auth, "WAIT_S", 0.01)
        with ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(keys.key, "one")
            assert keys.asked.wait(60)
            with pytest.raises(KeysUnavailableError):
                keys.key("one")
            monkeypatch.setattr(auth, "WAIT_S", 60.0)
            found: list[Any] = []
            waiting = threading.Thread(target=lambda: found.append(keys.key("new")))
            waiting.start()
            keys.answer.set()
            waiting.join(60)
            assert len(found) == 1
            assert fetching.result(60) is not None
        assert keys.calls == 1, "all of them have one answer"

    @pytest.mark.parametrize(
        ("kid", "later_s", "fetches"),
        [
            ("one", auth.KEYS_FRESH_S, 0),
            ("one", auth.KEYS_FRESH_S + 1, 1),
            ("two", auth.REFETCH_S, 0),
            ("two", auth.REFETCH_S + 1, 1),
            ("two", auth.KEYS_TTL_S, 1),
        ],
    )
    def test_when_known_keys_are_fetched_again(
        self, monkeypatch: pytest.MonkeyPatch, kid: str, later_s: float, fetches: int
    ) -> None:
        now = [1000.0]
        replace_time(monkeypatch, auth, monotonic=lambda: now[0])
        keys = Slow()
        known = keys.key("one")
        now[0] += later_s
        keys.status = 503
        for _ in range(3):
            if kid == "one":
                assert keys.key(kid) is known
            else:
                with pytest.raises(AuthError, match="unknown key"):
                    keys.key(kid)
        assert keys.calls == 1 + fetches, "and not for every request"

    def test_expired_keys_are_fetched_again_5_s_after_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        replace_time(monkeypatch, auth, monotonic=lambda: now[0])
        keys = Slow()
        keys.key("one")
        now[0] += auth.KEYS_TTL_S + 1
        keys.status = 503
        for pause_s, calls in ((0.0, 2), (auth.AGAIN_S - 1, 2), (1.0, 3)):
            now[0] += pause_s
            with pytest.raises(KeysUnavailableError):
                keys.key("one")
            assert keys.calls == calls
        now[0] += auth.AGAIN_S
        keys.status = 200
        assert keys.key("one") is not None

    def test_keys_are_renewed_before_they_expire(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = Slow()
        keys.key("one")
        keys.status = 503
        monkeypatch.setattr(auth, "KEYS_FRESH_S", -1.0)
        assert keys.key("one") is not None
        assert keys.calls == 1, "not more often than once a minute"
        monkeypatch.setattr(auth, "REFETCH_S", -1.0)
        assert keys.key("one") is not None
        assert keys.calls == 2
        monkeypatch.setattr(auth, "KEYS_TTL_S", -1.0)
        with pytest.raises(KeysUnavailableError):
            keys.key("one")
