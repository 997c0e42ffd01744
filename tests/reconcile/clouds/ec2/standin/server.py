"""The stand-in on loopback, for clients that speak HTTP; and without it, for simulations that make many calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from spotkeeper.reconcile.clouds.ec2.api import Api
from spotkeeper.reconcile.clouds.http_client import NoAnswerError
from tests import web
from tests.reconcile.clouds.ec2.standin.site import LostError
from tests.reconcile.clouds.ec2.standin.verbs import Ec2Service


@contextmanager
def serve(service: Ec2Service, abroad: Mapping[str, Ec2Service] | None = None) -> Iterator[str]:
    """Its address. One call at a time, as the site knows no threads. ``abroad``: other regions, by name."""
    lock = threading.Lock()

    class Handler(web.Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.body()
            signed = self.headers.get("Authorization", "")
            if not signed.startswith("AWS4-HMAC-SHA256 ") or "/ec2/aws4_request" not in signed:
                service.faults.append(f"not signed for EC2: {signed[:40]!r}")
            region = signed.partition("Credential=")[2].split("/")[2:3]  # AWS's own addresses name it too
            try:
                with lock:
                    status, data = ({} if abroad is None else abroad).get("".join(region), service).handle(body)
            except LostError:
                self.close_connection = True
                return
            self.answer(status, data, Content_Type="text/xml;charset=UTF-8")

    with web.serving(Handler) as server:
        yield server.url


@lru_cache(maxsize=1)
def session() -> Any:
    """One for all: EC2's model takes half a second to read. Its keys are nobody's."""
    from botocore.session import get_session

    made = get_session()
    made.set_credentials("AKIDEXAMPLE", "none", "none")
    return made


class Here(Api):
    """The adapter's own API, whose requests end in the stand-in instead of a socket."""

    def __init__(self, service: Ec2Service, region: str) -> None:
        super().__init__(region, "http://127.0.0.1:1")
        self.service = service
        self._one = threading.Lock()  # the site knows no threads

    def _session(self) -> Any:
        return session()

    def _send(self, request: Any, **_: object) -> Any:
        from botocore.awsrequest import AWSResponse

        from spotkeeper.reconcile.clouds.ec2.api import _Raw

        try:
            with self._one:
                status, data = self.service.answer(request.url, request.body or b"")
        except LostError as error:
            raise NoAnswerError(f"no answer to {error}") from error
        return AWSResponse(request.url, status, {}, _Raw(data))
