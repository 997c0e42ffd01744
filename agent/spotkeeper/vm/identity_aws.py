"""A role as the job's identity: its keys by ``sts:AssumeRole``, in the words of a container's credentials.

The machine's own role may do one thing with it: assume it. Keys last an hour, the longest for a role that is assumed
by a role; AWS's libraries come back for others before.
"""

from __future__ import annotations

import hashlib
import re
import threading
from urllib.parse import urlencode
from xml.etree import ElementTree

import msgspec
import requests
from msgspec import Struct

from spotkeeper.clock import Clock, from_rfc3339
from spotkeeper.spec import codec
from spotkeeper.vm.ec2 import Ec2
from spotkeeper.vm.identity import Address, Answer, Endpoints, IdentityError, same
from spotkeeper.vm.sigv4 import Credentials, Scope, sign

LIFETIME_S = 3600
MARGIN_S = 900.0  # virtual; botocore asks for others when less than 15 minutes are left
CONNECT_S, ANSWER_S = 3.0, 10.0
SECRET = "aws-secret://"  # noqa: S105 - how a reference begins
PATH = "/credentials"
_STS = "{https://sts.amazonaws.com/doc/2011-06-15/}"
_ARN = re.compile(r"arn:[a-z-]+:secretsmanager:([a-z0-9-]+):\d{12}:secret:")


class _Value(Struct, frozen=True, rename="pascal"):
    secret_string: str


class AwsIdentity:
    """``role``: its ARN; ``machine``: whose keys assume it."""

    def __init__(self, role: str, machine: Ec2, clock: Clock, endpoints: Endpoints) -> None:
        self._role = role
        self._machine = machine
        self._clock = clock
        self._endpoints = endpoints
        self._lock = threading.Lock()
        self._keys: tuple[Credentials, str] | None = None  # until when, as AWS writes it

    def environment(self, at: Address) -> dict[str, str]:
        region = self._machine.region()
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{at.host}{PATH}",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(at.token_file),
            "AWS_EC2_METADATA_DISABLED": "true",  # the machine's: it does not answer the job
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
        }

    def answer(self, path: str, query: dict[str, list[str]], headers: dict[str, str], at: Address) -> Answer:
        if not same(headers.get("authorization", ""), at.token):
            return Answer(403)
        if path != PATH:
            return Answer(404)
        keys, expires = self._assumed()
        body = {
            "RoleArn": self._role,
            "AccessKeyId": keys.access_key,
            "SecretAccessKey": keys.secret_key,
            "Token": keys.token,
            "Expiration": expires,
        }
        return Answer(200, msgspec.json.encode(body), "application/json")

    def secret(self, reference: str) -> str:
        name = reference.removeprefix(SECRET)
        found = _ARN.match(name)
        if name == reference or found is None:
            raise IdentityError(f"{reference.partition(':')[0]}: is no {SECRET}<ARN> reference", final=True)
        body = msgspec.json.encode({"SecretId": name})
        headers = {
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": "secretsmanager.GetSecretValue",
        }
        scope = Scope(found[1], "secretsmanager")
        answer = self._post(self._endpoints.secrets_aws, scope, self._assumed()[0], headers, body, name)
        try:
            return codec.decode(answer, _Value).secret_string
        except msgspec.DecodeError:
            raise IdentityError(f"{name}: its content is no text", final=True) from None

    def _assumed(self) -> tuple[Credentials, str]:
        with self._lock:  # held while they are asked for: ranks that begin together ask once
            if self._keys is None or _time(self._keys[1]) - self._clock.now() < MARGIN_S:
                self._keys = self._assume()
            return self._keys

    def _assume(self) -> tuple[Credentials, str]:
        words = {
            "Action": "AssumeRole",
            "Version": "2011-06-15",
            "RoleArn": self._role,
            "RoleSessionName": self._machine.instance().uid,  # in every log of AWS's: which machine it was
            "DurationSeconds": str(LIFETIME_S),
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        scope, body = Scope(self._machine.region(), "sts"), urlencode(words).encode()
        answer = self._post(self._endpoints.sts, scope, self._machine.credentials(), headers, body, self._role)
        try:
            # From AWS itself, over TLS.
            found = ElementTree.fromstring(answer).find(f"{_STS}AssumeRoleResult/{_STS}Credentials")  # noqa: S314
        except ElementTree.ParseError:
            found = None
        names = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
        values = [found.findtext(_STS + name) or "" if found is not None else "" for name in names]
        if not all(values):
            raise IdentityError(f"AssumeRole {self._role}: an answer that is none")
        return Credentials(*values[:3]), values[3]

    def _post(
        self, endpoint: str, scope: Scope, keys: Credentials, headers: dict[str, str], body: bytes, what: str
    ) -> bytes:
        url = endpoint.format(region=scope.region) + "/"
        digest = hashlib.sha256(body).hexdigest()
        signed = sign(keys, scope, "POST", url, headers, digest, self._clock.now())
        try:
            answer = requests.post(url, data=body, headers=signed, timeout=(CONNECT_S, ANSWER_S))
        except requests.RequestException as error:
            raise IdentityError(f"{what}: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise IdentityError(f"{what}: HTTP {answer.status_code}", final=answer.status_code in (403, 404))
        return answer.content


def _time(text: str) -> float:
    try:
        return from_rfc3339(text)
    except ValueError:
        raise IdentityError("AssumeRole: an answer that is none") from None
