"""The interface of metadata clients, and the thread that watches the metadata server for changes.

``gce.py`` and ``ec2.py`` implement :class:`Metadata`; ``cloud.here()`` chooses one. A request that fails is sent again;
a failure never counts as "not preempted". Proxies are never used: a proxy would ask its own machine's metadata server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from spotkeeper.clock import Clock
from spotkeeper_agent.cloud.notice import Instance
from spotkeeper_agent.cloud.storage import Bucket
from spotkeeper_agent.core.log import Log

HOST = "169.254.169.254"  # an address, because names may not resolve during shutdown
HANG_S = 60.0  # longest duration of a long poll, as in Google's guest agent
CONNECT_S = 2.0
ANSWER_S = 5.0
RETRY_S = 1.0  # virtual
RETRY_FLOOR_S = 0.2  # real
EXPIRY_MARGIN_S = 300.0  # virtual; a token is renewed when less than this is left
FIRST = "NONE"  # a mark that no state has, so the first wait returns at once
GCE_HOST = "GCE_METADATA_HOST"  # the variable that Google's libraries read
EC2_ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # the variable that AWS's libraries read


class MetadataError(Exception):
    """The metadata server gave no usable answer; try again."""


class Metadata(Protocol):
    """The client of one machine's metadata server. Safe to use from several threads."""

    url: str  # the server's root; every answer has a Date header

    def instance(self) -> Instance:
        """Return this machine as the server describes it now.

        Raises:
            MetadataError: no usable answer.
        """

    def wait(self, mark: str) -> tuple[Instance, str]:
        """Wait until the instance has changed; return it and a mark that stands for its new state.

        ``mark`` is the previous call's mark. If it is :data:`FIRST`, the call returns at once; without a change it
        returns after a minute.

        Raises:
            MetadataError: no usable answer.
        """

    def prove(self, function: str, path: str, body: bytes) -> dict[str, str]:
        """Return headers that prove which machine sends this JSON body in ``POST <function><path>``.

        Raises:
            MetadataError: the server gives no token or key.
        """

    def forget_identity(self) -> None:
        """Make the next :meth:`prove` use new tokens or keys, because the function refused the last ones."""

    def loose(self) -> str:
        """Describe a weakness by which an attacker can read this machine's metadata; return "" if there is none."""

    def storage(self, root: str, bucket: str) -> Bucket:
        """Return a bucket, for use with this machine's rights. ``root``: the API's address, "" for the default."""


class Watcher(threading.Thread):
    """A thread that calls ``changed`` with the instance's first state and every new one."""

    def __init__(self, metadata: Metadata, changed: Callable[[Instance], None], clock: Clock, log: Log) -> None:
        super().__init__(name="metadata", daemon=True)
        self._metadata = metadata
        self._changed = changed
        self._clock = clock
        self._log = log

    def run(self) -> None:
        mark = FIRST
        last: Instance | None = None
        while True:
            try:
                instance, mark = self._metadata.wait(mark)
            except MetadataError as error:
                self._log.once(f"metadata {error}", "metadata.trouble", error=str(error))
                time.sleep(max(RETRY_FLOOR_S, self._clock.real_s(RETRY_S)))
                continue
            if instance != last:
                last = instance
                self._changed(instance)
