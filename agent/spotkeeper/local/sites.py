"""One metadata server per machine, each on the machine's own address. Opens and closes sockets; knows no state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from spotkeeper.clock import Clock
from spotkeeper.local.metadata import Machine, MetadataServer
from spotkeeper.local.tokens import Tokens

log = logging.getLogger("spotkeeper.local")


class Listener(Protocol):
    def close(self) -> None: ...


Listen = Callable[[str], Awaitable[Listener]]


class MetadataSites:
    """``look(path)`` reads a machine's present tree; ``listen(address)`` opens a socket into the same app."""

    def __init__(self, look: Callable[[str], Machine | None], tokens: Tokens, clock: Clock, listen: Listen) -> None:
        self._look = look
        self._tokens = tokens
        self._clock = clock
        self._listen = listen
        self._address: dict[str, str] = {}
        self._servers: dict[str, MetadataServer] = {}
        self._listeners: dict[str, Listener] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def at(self, address: str) -> MetadataServer | None:
        """The server behind an address of 127/8."""
        return self._servers.get(address)

    def open(self, path: str, address: str) -> None:
        if path in self._address:
            return
        self._address[path] = address
        self._servers[address] = MetadataServer(lambda: self._look(path), self._tokens, self._clock)
        task = asyncio.get_running_loop().create_task(self._open(path, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, path: str, address: str) -> None:
        try:
            listener = await self._listen(address)
        except OSError:
            log.exception("%s: no metadata server at %s", path, address)
            return
        if self._address.get(path) == address:
            self._listeners[path] = listener
        else:
            listener.close()

    def changed(self, path: str) -> None:
        server = self._servers.get(self._address.get(path, ""))
        if server is not None:
            server.changed()

    def close(self, path: str) -> None:
        address = self._address.pop(path, None)
        server = self._servers.pop(address, None) if address else None
        if server is not None:
            server.changed()  # whoever waits learns that the machine is gone
        listener = self._listeners.pop(path, None)
        if listener is not None:
            listener.close()
