"""EC2 by botocore: the service's own model writes and reads the calls, our wire carries them. Knows no verb of ours.

boto3 lies in Lambda's runtime, so nothing is bundled; it is imported with the first call (0.1 s, and 0.1 s for EC2's
model), which the Compute Engine function never makes. What botocore would do about time and failure is taken from it:
it retries ``InsufficientInstanceCapacity`` because that is an HTTP 500, and its time limits are between bytes, so a
server that drips holds a call for ever. Here each call has one deadline, is made once, and none outlives it: Lambda
freezes sockets that are left open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from spotkeeper.reconcile.wire import NoAnswerError, Wire, is_loopback, split_origin

Parsed = dict[str, Any]  # an answer as botocore reads it; ``ec2_wire`` makes it ours at once
POOR = "ParamValidation"  # our own code: the request does not fit EC2's model, and was not sent


class RefusedError(Exception):
    """EC2 said no. ``code``: as EC2 spells it; ``status``: of HTTP."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


class Api:
    """EC2 of one region; each call with a deadline. Thread-safe.

    Args:
        region: such as ``us-east-1``.
        endpoint: root of the API; None: as ``AWS_ENDPOINT_URL_EC2`` or ``AWS_ENDPOINT_URL`` say, else AWS's own.
    """

    def __init__(self, region: str, endpoint: str | None = None) -> None:
        self._region, self._endpoint = region, endpoint
        self._lock = threading.Lock()
        self._local = threading.local()  # ``ends`` of the call that this thread makes
        self._client: Any = None
        self._wires: dict[str, Wire] = {}

    def call(self, operation: str, deadline_s: float, params: Mapping[str, object]) -> Parsed:
        """One request, made once. ``operation``: as in botocore's client (``run_instances``).

        Raises:
            RefusedError: EC2's error, or a request that its model refuses.
            NoAnswerError: no complete answer in time; it may or may not have been carried out.
            ValueError: the endpoint is plain http to another machine.
        """
        from botocore import exceptions
        from botocore.parsers import ResponseParserError

        self._local.ends = time.monotonic() + deadline_s
        try:
            answer: Parsed = getattr(self._opened(), operation)(**params)
        except exceptions.ClientError as error:
            said = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise RefusedError(str(said.get("Code", "")), str(said.get("Message", "")), status) from error
        except exceptions.ParamValidationError as error:
            raise RefusedError(POOR, str(error), 0) from error
        except (exceptions.BotoCoreError, ResponseParserError) as error:
            raise NoAnswerError(f"{operation}: {type(error).__name__}: {error}") from error
        return answer

    def _opened(self) -> Any:
        with self._lock:
            if self._client is None:
                from botocore.config import Config

                once = Config(retries={"total_max_attempts": 1, "mode": "standard"})
                client = self._session().create_client("ec2", self._region, endpoint_url=self._endpoint, config=once)
                check_endpoint(client.meta.endpoint_url)
                client.meta.events.register("before-send.ec2.*", self._send)
                self._client = client
            return self._client

    def _session(self) -> Any:
        from botocore.session import get_session

        return get_session()

    def _send(self, request: Any, **_: object) -> Any:
        """botocore's own way to carry a request elsewhere: what this returns is the answer."""
        from botocore.awsrequest import AWSResponse

        parts = urlsplit(request.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {name: _text(value) for name, value in request.headers.items()}
        body = request.body.encode() if isinstance(request.body, str) else request.body
        answer = self._wire(f"{parts.scheme}://{parts.netloc}").call(
            request.method, target, headers, body, self._local.ends - time.monotonic()
        )
        return AWSResponse(request.url, answer.status, {}, _Raw(answer.body))

    def _wire(self, origin: str) -> Wire:
        with self._lock:
            return self._wires.setdefault(origin, Wire(origin))


class _Raw:
    """A body that has been read, as botocore takes one from its own client."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: object) -> Iterator[bytes]:
        yield self._body


def check_endpoint(url: str) -> None:
    """
    Raises:
        ValueError: plain http to a host that is not this machine: a session's token must not cross an open line.
    """
    parts = split_origin(url, "AWS_ENDPOINT_URL", "https://host")
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"AWS_ENDPOINT_URL={url!r}: plain http only to this machine itself")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
