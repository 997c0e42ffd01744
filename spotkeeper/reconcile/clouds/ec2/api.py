"""A client of EC2's API: botocore encodes requests and decodes answers, ``Wire`` sends and receives them.

Lambda's runtime contains botocore, so it is not bundled. :meth:`Api.open` imports it and loads its model of EC2. Lambda
gives the function a part of a core, so the import takes seconds, and no call's deadline includes it. botocore's
retries and time limits are not used: it would retry ``InsufficientInstanceCapacity``, which is an HTTP 500, and its
limits apply to each read, so a slow server could block a call for ever. Each call is made once and has a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from spotkeeper.contract.cloud import ResultKind
from spotkeeper.reconcile.clouds.ec2.errors import GONE, classify
from spotkeeper.reconcile.clouds.http_client import NoAnswerError, Wire, split_origin

Parsed = dict[str, Any]  # an answer as botocore reads it; ``schema`` converts it
POOR = "ParamValidation"  # botocore's code, not EC2's: the request does not fit EC2's model and was not sent

log = logging.getLogger(__name__)


class Ec2RefusedError(Exception):
    """EC2 refused a call; ``code`` is EC2's error code, ``status`` the HTTP status."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


class Api:
    """A client for EC2 in one region; each call has a deadline. Thread-safe.

    Args:
        region: such as ``us-east-1``.
        endpoint: root of the API; None means ``AWS_ENDPOINT_URL_EC2``, ``AWS_ENDPOINT_URL`` or AWS's own, in this
        order.
    """

    def __init__(self, region: str, endpoint: str | None = None) -> None:
        self._region, self._endpoint = region, endpoint
        self._lock = threading.Lock()
        self._local = threading.local()  # ``ends`` of the call that this thread makes
        self._clients: dict[str, Any] = {}  # by service
        self._shared: Any = None  # botocore's session, whose models take long to load
        self._wires: dict[str, Wire] = {}

    def beside(self, region: str) -> Api:
        """Return a client for another region, which uses this one's loaded models and identity."""
        other = type(self)(region, self._endpoint)
        other._shared = self._shared = self._shared or self._session()
        return other

    def open(self) -> None:
        """Import botocore and make the client, outside of any call's deadline.

        Raises:
            ValueError: the endpoint is plain http to another machine.
        """
        self._opened()

    def call(self, operation: str, deadline_s: float, params: Mapping[str, object], service: str = "ec2") -> Parsed:
        """Make one request, without retries; ``operation`` is botocore's name, such as ``run_instances``.

        Raises:
            Ec2RefusedError: EC2 refused the request, or it does not fit botocore's model of EC2 and was not sent.
            NoAnswerError: no complete answer in time; the call may or may not have been carried out.
            ValueError: the endpoint is plain http to another machine.
        """
        from botocore import exceptions
        from botocore.parsers import ResponseParserError

        client = self._opened(service)
        self._local.ends = time.monotonic() + deadline_s
        try:
            answer: Parsed = getattr(client, operation)(**params)
        except exceptions.ClientError as error:
            said = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise Ec2RefusedError(str(said.get("Code", "")), str(said.get("Message", "")), status) from error
        except exceptions.ParamValidationError as error:
            raise Ec2RefusedError(POOR, str(error), 0) from error
        except (exceptions.BotoCoreError, ResponseParserError) as error:
            raise NoAnswerError(f"{operation}: {type(error).__name__}: {error}") from error
        return answer

    def blocks(self, query: Mapping[str, object], ends: float) -> Parsed:
        """Return a page of the blocks in which two snapshots differ, by EBS's own API. Raises as :meth:`call`."""
        return self.once("list_changed_blocks", query, ends, "ebs")

    def once(self, operation: str, query: Mapping[str, object], ends: float, service: str = "ec2") -> Parsed:
        left = ends - time.monotonic()
        if left <= 0:
            raise NoAnswerError(f"{operation}: no time left")
        return self.call(operation, left, query, service)

    def again(self, operation: str, query: Mapping[str, object], ends: float) -> Parsed:
        """Make a call with an idempotency token; repeat it once if no answer comes. Each try has half of the time."""
        half = (ends + time.monotonic()) / 2
        try:
            return self.once(operation, query, half)
        except NoAnswerError as error:
            log.warning("%s: %s; repeated with the same client token", operation, error)
        except Ec2RefusedError as error:
            if classify(error.code, error.status) is not ResultKind.AMBIGUOUS:
                raise
            log.warning("%s: %s; repeated with the same client token", operation, error)
        return self.once(operation, query, ends)

    def gone(self, operation: str, query: Mapping[str, object], ends: float) -> tuple[ResultKind, str]:
        """Make a call that deletes a resource; a missing resource counts as deleted."""
        try:
            self.once(operation, query, ends)
        except Ec2RefusedError as error:
            if error.code not in GONE:
                raise
            return ResultKind.ACCEPTED, "was gone"
        return ResultKind.ACCEPTED, ""

    def _opened(self, service: str = "ec2") -> Any:
        with self._lock:
            if service not in self._clients:
                from botocore.config import Config

                once = Config(retries={"total_max_attempts": 1, "mode": "standard"})
                session = self._shared or self._session()
                client = session.create_client(service, self._region, endpoint_url=self._endpoint, config=once)
                split_origin(client.meta.endpoint_url, "AWS_ENDPOINT_URL", "https://host")
                client.meta.events.register(f"before-send.{service}.*", self._send)
                self._clients[service] = client
            return self._clients[service]

    def _session(self) -> Any:
        from botocore.session import get_session

        return get_session()

    def _send(self, request: Any, **_: object) -> Any:
        """Send a prepared request. botocore calls this handler instead of sending, and uses the answer it returns."""
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
    """A body that has already been read, in the form that botocore expects."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: object) -> Iterator[bytes]:
        yield self._body


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
