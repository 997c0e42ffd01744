"""What a machine learns of itself from its cloud: who it is, what is ahead of it, and how it proves who it is.

One interface for all clouds (:class:`Metadata`), implemented by ``gce.py`` and ``ec2.py``; which of them is here,
``here()`` says. A failing or silent server means "ask again" and never "not preempted". Proxies are never used: the
addresses are link-local, and a proxy would answer for another machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.vm.log import Log
from spotkeeper.vm.notice import Sign

if TYPE_CHECKING:
    from spotkeeper.vm.storage import Remote

HOST = "169.254.169.254"  # by address: names may not resolve while the machine goes down
HANG_S = 60.0  # of a wait; Google's own guest agent hangs as long
CONNECT_S = 2.0
ANSWER_S = 5.0
RETRY_S = 1.0  # virtual
RETRY_FLOOR_S = 0.2  # real
EXPIRY_MARGIN_S = 300.0  # virtual; a token is renewed when less than this is left
FIRST = "NONE"  # a mark that no state has: the first wait returns at once, and no change before it is missed
GCE_HOST = "GCE_METADATA_HOST"  # as Google's libraries read it
EC2_ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as AWS's libraries read it
DMI = Path("/sys/class/dmi/id/sys_vendor")


class Instance(Struct, frozen=True):
    """This machine, now. ``uid``: the cloud's unique id; ``attributes``: what the stack told it (``sk-...``)."""

    uid: str
    name: str
    zone: str
    address: str = ""
    attributes: dict[str, str] = {}
    sign: Sign | None = None


class MetadataError(Exception):
    """No usable answer; ask again."""


class Metadata(Protocol):
    """The client of one machine's metadata server. Safe to use from several threads."""

    url: str  # of the server's root: any answer of it has the time

    def instance(self) -> Instance:
        """
        Raises:
            MetadataError: it cannot be told now.
        """
        ...

    def wait(self, mark: str) -> tuple[Instance, str]:
        """The instance once it is no longer what ``mark`` stands for (:data:`FIRST`: at once), or after a minute.

        Raises:
            MetadataError: as above.
        """
        ...

    def prove(self, function: str, path: str, body: bytes) -> dict[str, str]:
        """Headers of ``POST <function><path>`` by which the function knows which machine sends this JSON.

        Raises:
            MetadataError: no token or key could be had.
        """
        ...

    def forget_identity(self) -> None:
        """After a refusal: what :meth:`prove` gives next is made of fresh tokens or keys."""
        ...

    def loose(self) -> str:
        """How somebody who is not on this machine might ask in its name; "" where nobody can."""
        ...

    def storage(self, root: str, bucket: str) -> Remote:
        """A bucket of this cloud, reached as this machine. ``root``: its API's address; "" for the cloud's own."""
        ...


def here(clock: Clock) -> Metadata:
    """The metadata server of the machine that this runs on: by the addresses in the environment, else by its vendor.

    Nothing is asked over the network. Where nothing speaks for EC2, it is Compute Engine's.
    """
    if GCE_HOST not in os.environ and (EC2_ENDPOINT in os.environ or vendor().startswith("Amazon")):
        from spotkeeper.vm.ec2 import Ec2

        return Ec2(clock)
    from spotkeeper.vm.gce import Gce

    return Gce(clock)


def vendor() -> str:
    """Who made this machine, as its firmware says: "Google", "Amazon EC2"; "" where that cannot be read."""
    try:
        return DMI.read_text().strip()
    except OSError:
        return ""


class Watcher(threading.Thread):
    """Waits for news, for ever. Calls ``changed`` with every new state of the instance, the first one included."""

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
