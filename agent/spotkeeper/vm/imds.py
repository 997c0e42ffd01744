"""EC2's instance metadata service, version 2 only: the session token, and GET of a path. Knows no path's meaning.

Without a token nothing is asked: version 1 answers anybody who can make this machine fetch an address.

Source: AWS, "Use the Instance Metadata Service to access instance metadata".
"""

from __future__ import annotations

import os
import threading

import requests

from spotkeeper.clock import Clock
from spotkeeper.vm.metadata import ANSWER_S, CONNECT_S, EC2_ENDPOINT, HOST, MetadataError

TTL_S = 21_600  # the longest that is allowed
RENEW_S = 60.0  # virtual; a token that ends sooner is not used for another request
TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name
TTL = "X-aws-ec2-metadata-token-ttl-seconds"
UNAUTHORIZED = 401


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
        if answer.status_code == UNAUTHORIZED:  # the service forgot it, or a clock ran ahead of ours
            self._forget()
            answer = self._ask("GET", path, {TOKEN: self._session_token()})
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise MetadataError(f"{path}: HTTP {answer.status_code}")
        return answer.text

    def answers_without_token(self, path: str) -> bool:
        """Whether version 1 is on. Its answer is not read.

        Raises:
            MetadataError: no answer.
        """
        return self._ask("GET", path, {}).status_code == 200

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
            if answer.status_code == 403:
                raise MetadataError("api/token: HTTP 403: the metadata service is off; set HttpEndpoint to enabled")
            if answer.status_code != 200 or not answer.text:
                raise MetadataError(f"api/token: HTTP {answer.status_code}")
            self._token = (answer.text, now + _seconds(answer.headers.get(TTL, "")))
            return answer.text

    def _forget(self) -> None:
        with self._lock:
            self._token = ("", 0.0)

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> requests.Response:
        url = f"{self.url}latest/{path}"
        timeout = (CONNECT_S, ANSWER_S)
        try:
            return self._session().request(method, url, headers=headers, timeout=timeout, allow_redirects=False)
        except requests.RequestException as error:
            # The answer to PUT is sent with a small TTL, so that it reaches no further than it should.
            hint = "; in a container it takes a hop limit of 2" if method == "PUT" else ""
            raise MetadataError(f"{path}: {type(error).__name__}{hint}") from None

    def _session(self) -> requests.Session:
        """A connection for each thread, kept: it is asked once a second."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False
        return session


def _seconds(text: str) -> float:
    """How long a token is good, by the answer that brought it; one that does not say has what was asked for."""
    return float(text) if text.isdigit() else float(TTL_S)
