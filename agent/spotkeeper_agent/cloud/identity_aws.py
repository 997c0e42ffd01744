"""An AWS role as the jobs' identity: keys from ``sts:AssumeRole``, served as a container's credentials.

The machine's own role is allowed to do only one thing with the jobs' role: assume it. Keys last an hour, because AWS
allows no more when one role assumes another. AWS's libraries renew the keys before they expire.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from urllib.parse import urlencode
from xml.etree import ElementTree

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper_agent.cloud.ec2 import Ec2
from spotkeeper_agent.cloud.identity import Endpoints, IdentityAnswer, IdentityError, ServerAddress, call, expiry
from spotkeeper_agent.cloud.sigv4 import Credentials, Scope, sign

LIFETIME_S = 3600
MARGIN_S = 900.0  # virtual; botocore renews keys when less than 15 minutes are left
SECRET = "aws-secret://"  # noqa: S105 - how a reference begins
PATH = "/credentials"
_STS = "{https://sts.amazonaws.com/doc/2011-06-15/}"
_ARN = re.compile(r"arn:[a-z-]+:secretsmanager:([a-z0-9-]+):\d{12}:secret:")


class _Value(Struct, frozen=True, rename="pascal"):
    secret_string: str


class AwsIdentity:
    """A role as the jobs' identity. ``role``: its ARN; ``machine``: the instance whose keys assume the role."""

    def __init__(self, role: str, machine: Ec2, clock: Clock, endpoints: Endpoints) -> None:
        self._role = role
        self._machine = machine
        self._clock = clock
        self._endpoints = endpoints
        self._lock = threading.Lock()
        self._keys: tuple[Credentials, str] | None = None  # keys, and their expiry as AWS writes it

    def environment(self, at: ServerAddress) -> dict[str, str]:
        region = self._machine.region()
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{at.host}{PATH}",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(at.token_file),
            "AWS_EC2_METADATA_DISABLED": "true",  # the machine's metadata service does not answer jobs
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
        }

    def answer(
        self, path: str, query: dict[str, list[str]], headers: dict[str, str], at: ServerAddress
    ) -> IdentityAnswer:
        if not hmac.compare_digest(headers.get("authorization", "").encode(), at.token.encode()):
            return IdentityAnswer(403)
        if path != PATH:
            return IdentityAnswer(404)
        keys, expires = self._assumed()
        body = {
            "RoleArn": self._role,
            "AccessKeyId": keys.access_key,
            "SecretAccessKey": keys.secret_key,
            "Token": keys.token,
            "Expiration": expires,
        }
        return IdentityAnswer(200, msgspec.json.encode(body), "application/json")

    def secret(self, reference: str) -> str:
        name = reference.removeprefix(SECRET)
        found = _ARN.match(name)
        if name == reference or found is None:
            raise IdentityError(f"{reference.partition(':')[0]}: want a reference {SECRET}<ARN>", final=True)
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
            raise IdentityError(f"{name}: its content is not text", final=True) from None

    def _assumed(self) -> tuple[Credentials, str]:
        with self._lock:  # held during the call, so processes that start together make one call
            if self._keys is None or expiry(self._keys[1], "AssumeRole") - self._clock.now() < MARGIN_S:
                self._keys = self._assume()
            return self._keys

    def _assume(self) -> tuple[Credentials, str]:
        words = {
            "Action": "AssumeRole",
            "Version": "2011-06-15",
            "RoleArn": self._role,
            "RoleSessionName": self._machine.instance().uid,  # AWS's logs show which machine it was
            "DurationSeconds": str(LIFETIME_S),
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        scope, body = Scope(self._machine.region(), "sts"), urlencode(words).encode()
        answer = self._post(self._endpoints.sts, scope, self._machine.credentials(), headers, body, self._role)
        try:
            # The text comes from AWS itself, over TLS.
            found = ElementTree.fromstring(answer).find(f"{_STS}AssumeRoleResult/{_STS}Credentials")  # noqa: S314
        except ElementTree.ParseError:
            found = None
        names = ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration")
        values = [found.findtext(_STS + name) or "" if found is not None else "" for name in names]
        if not all(values):
            raise IdentityError(f"AssumeRole {self._role}: the answer is invalid")
        return Credentials(*values[:3]), values[3]

    def _post(
        self, endpoint: str, scope: Scope, keys: Credentials, headers: dict[str, str], body: bytes, what: str
    ) -> bytes:
        url = endpoint.format(region=scope.region) + "/"
        digest = hashlib.sha256(body).hexdigest()
        signed = sign(keys, scope, "POST", url, headers, digest, self._clock.now())
        return call("POST", url, signed, body, what)
