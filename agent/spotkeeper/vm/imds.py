"""EC2's instance metadata service, version 2 only: the session token, and GET of a path. Knows no path's meaning.

Without a token nothing is asked: version 1 answers anybody who can make this machine fetch an address.

Source: AWS, "Use the Instance Metadata Service to access instance metadata".
"""

from __future__ import annotations

import http.client
import os
import threading
from dataclasses import dataclass
from urllib.parse import urlsplit

from spotkeeper.clock import Clock
from spotkeeper.vm.metadata import ANSWER_S, EC2_ENDPOINT, HOST, MetadataError

TTL_S = 21_600  # the longest that is allowed
RENEW_S = 60.0  # virtual; a token that ends sooner is not used for another request
TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name
TTL = "X-aws-ec2-metadata-token-ttl-seconds"
UNAUTHORIZED = 401


@dataclass(frozen=True)
class _Answer:
    status: int
    text: str
    ttl: str  # the token header's


class Imds:
    """``endpoint``: ``http://host[:port]``; None: as the environment says. Safe to use from several threads."""

    def __init__(self, clock: Clock, endpoint: str | None = None) -> None:
        self._clock = clock
        self.url = (endpoint or os.environ.get(EC2_ENDPOINT) or f"http://{HOST}").rstrip("/") + "/"
        self._token: tuple[str, float] = ("", 0.0)
        self._lock = threading.Lock()
        self._local = threading.local()

    def get(self, path: str) -> str | None:
        """What is at ``/latest/<path>``; None where nothing is (404).

        Raises:
            MetadataError: any other answer than these, or none.
        """
        answer = self._ask("GET", path, {TOKEN: self._session_token()})
        if answer.status == UNAUTHORIZED:  # the service forgot it, or a clock ran ahead of ours
            self._forget()
            answer = self._ask("GET", path, {TOKEN: self._session_token()})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise MetadataError(f"{path}: HTTP {answer.status}")
        return answer.text

    def answers_without_token(self, path: str) -> bool:
        """Whether version 1 is on. Its answer is not read.

        Raises:
            MetadataError: no answer.
        """
        return self._ask("GET", path, {}).status == 200

    def _session_token(self) -> str:
        """
        Raises:
            MetadataError: none could be had.
        """
        with self._lock:
            token, ends = self._token
            now = self._clock.steady()
            if token and ends - now > RENEW_S:
                return token
            answer = self._ask("PUT", "api/token", {TTL: str(TTL_S)})
            if answer.status == 403:
                raise MetadataError("api/token: HTTP 403: the metadata service is off; set HttpEndpoint to enabled")
            if answer.status != 200 or not answer.text:
                raise MetadataError(f"api/token: HTTP {answer.status}")
            self._token = (answer.text, now + _seconds(answer.ttl))
            return answer.text

    def _forget(self) -> None:
        with self._lock:
            self._token = ("", 0.0)

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> _Answer:
        """The answer, whatever it is; a redirect is not followed.

        Raises:
            MetadataError: none.
        """
        connection = self._connection()
        while True:
            kept = connection.sock is not None
            try:
                connection.request(method, f"/latest/{path}", headers=headers)
                with connection.getresponse() as answer:
                    text = answer.read().decode(errors="replace")
                return _Answer(answer.status, text, answer.headers.get(TTL, ""))
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                if kept:
                    continue  # the other end may have closed it since
                # The answer to PUT is sent with a small TTL, so that it reaches no further than it should.
                hint = "; in a container it takes a hop limit of 2" if method == "PUT" else ""
                raise MetadataError(f"{path}: {type(error).__name__}{hint}") from None

    def _connection(self) -> http.client.HTTPConnection:
        """One for each thread, kept: it is asked once a second, at a ninth of what ``requests`` costs."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            host = urlsplit(self.url).netloc
            connection = self._local.connection = http.client.HTTPConnection(host, timeout=ANSWER_S)
        return connection


def _seconds(text: str) -> float:
    """How long a token is good, by the answer that brought it; one that does not say has what was asked for."""
    return float(text) if text.isdigit() else float(TTL_S)
