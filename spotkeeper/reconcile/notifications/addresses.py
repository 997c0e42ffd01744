"""The channels' addresses: literal ones from the function's environment, others from the cloud's secret store.

Only the function reads addresses. They are in no document of the bucket, which submitters may read.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.contract.notification import AWS_PARAMETER, AWS_SECRET, GCP_SECRET, is_reference, secret_of
from spotkeeper.contract.redact import learn
from spotkeeper.reconcile.clouds.http_client import NoAnswerError, Wire
from spotkeeper.reconcile.notifications.https import SendError

ENV = "SPOTKEEPER_CHANNELS"
SECRETS = "https://secretmanager.googleapis.com"
READ_S = 3.0  # real seconds for one read of the secret store
KEPT_S = 300.0  # real seconds for which an address is remembered, so that a new version of a secret is found
_REGION = 3  # the region's place in an ARN

ReadSecret = Callable[[str], str]  # a reference -> its content


class _Payload(Struct, frozen=True):
    data: str


class _Secret(Struct, frozen=True):
    payload: _Payload


class ChannelAddresses:
    """The address of each channel. Thread-safe.

    Args:
        given: by channel, an https address or a reference to a secret (``SPOTKEEPER_CHANNELS``).
        read: reads a secret.
    """

    def __init__(self, given: Mapping[str, str], read: ReadSecret, now: Callable[[], float] = time.monotonic) -> None:
        self._given, self._read, self._now = dict(given), read, now
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, str]] = {}

    def of(self, channel: str) -> str:
        """Return a channel's address.

        Raises:
            SendError: the channel has no address, or its secret cannot be read.
        """
        given = self._given.get(channel)
        if given is None:
            raise SendError("the function does not know this channel's address yet: run pulumi up")
        if not is_reference(given):
            return given
        with self._lock:
            at, known = self._known.get(channel, (0.0, ""))
        if known and self._now() - at < KEPT_S:
            return known
        try:
            found = self._read(given).strip()
        except NoAnswerError as error:
            raise SendError(f"the secret with this channel's address cannot be read: {error}") from None
        learn([found])  # hides the address in every log line of this process
        with self._lock:
            self._known[channel] = self._now(), found
        return found

    def forget(self, channel: str) -> None:
        """Forget a channel's address that did not work, so that the next use reads the channel's secret again."""
        with self._lock:
            self._known.pop(channel, None)


def parse_addresses(text: str) -> dict[str, str]:
    """Return the addresses in ``SPOTKEEPER_CHANNELS``, by channel.

    Raises:
        ValueError: the text is not a JSON object of strings. The message does not contain the text.
    """
    try:
        found: dict[str, str] = codec.decode(text.encode(), dict[str, str]) if text else {}
    except msgspec.DecodeError:
        raise ValueError(f"{ENV}: want a JSON object of addresses by channel") from None
    learn(address for address in found.values() if not is_reference(address))
    return found


class SecretReader:
    """Reads secrets with the identity of the function: Secret Manager, Secrets Manager or Systems Manager."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._google: tuple[Wire, Callable[[float], str]] | None = None

    def __call__(self, reference: str) -> str:
        """Return a secret's content.

        Raises:
            NoAnswerError: the store refused or did not answer.
        """
        if name := secret_of(reference, GCP_SECRET):
            return self._gcp(f"{name}/versions/{reference.rpartition('/')[2]}")
        if arn := secret_of(reference, AWS_SECRET):
            return str(_aws("secretsmanager", arn, "get_secret_value", SecretId=arn).get("SecretString") or "")
        if arn := secret_of(reference, AWS_PARAMETER):
            found = _aws("ssm", arn, "get_parameter", Name=arn, WithDecryption=True)
            return str(found.get("Parameter", {}).get("Value") or "")
        raise NoAnswerError("the reference to it has an unknown form")

    def _gcp(self, version: str) -> str:
        from spotkeeper.reconcile.clouds.gce.api import MetadataToken

        with self._lock:
            self._google = self._google or (Wire(SECRETS), MetadataToken(self._clock))
            wire, token = self._google
        headers = {"Authorization": f"Bearer {token(READ_S)}", "Accept": "application/json"}
        answer = wire.call("GET", f"/v1/{version}:access", headers, None, READ_S)
        if answer.status != 200:
            raise NoAnswerError(f"Secret Manager answers HTTP {answer.status}")
        try:
            return base64.b64decode(codec.decode(answer.body, _Secret).payload.data, validate=True).decode()
        except (msgspec.DecodeError, binascii.Error, UnicodeDecodeError):
            raise NoAnswerError("Secret Manager's answer is not text") from None


def _aws(service: str, arn: str, operation: str, **query: object) -> Any:
    from botocore import exceptions
    from botocore.config import Config
    from botocore.session import get_session

    once = Config(connect_timeout=READ_S, read_timeout=READ_S, retries={"total_max_attempts": 1, "mode": "standard"})
    try:
        client = get_session().create_client(service, arn.split(":")[_REGION], config=once)
        return getattr(client, operation)(**query)
    except exceptions.ClientError as error:
        raise NoAnswerError(str(error.response.get("Error", {}).get("Code", "refused"))) from None
    except exceptions.BotoCoreError as error:
        raise NoAnswerError(type(error).__name__) from None
