"""The server loop that the launcher and the jobs' unit share: one JSON object per line over a unix socket.

One thread answers the requests in order; between requests it reaps ended children. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

Message = dict[str, object]


@dataclass
class Lines:
    """The server loop.

    Attributes:
        listener: a bound socket that listens.
        answer: returns the reply to a client's line.
        reap: called when a child may have ended.
        admits: returns whether to serve a client that has connected.
    """

    listener: socket.socket
    answer: Callable[[socket.socket, bytes], Message]
    reap: Callable[[], None]
    admits: Callable[[socket.socket], bool] = lambda _: True
    _clients: dict[socket.socket, bytearray] = field(
        default_factory=dict
    )  # the bytes of each since its last whole line
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _wake: tuple[int, ...] = ()

    def open(self) -> None:
        """Start watching for ended children. Clients that connect from now on wait until :meth:`serve`."""
        read, write = self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wake-up descriptor stays silent
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._selector.register(read, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until killed, after :meth:`open`."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self.listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake[0], 4096)
                    self.reap()

    def send(self, client: socket.socket, message: Message) -> None:
        """Send a message to a client; forget a client that has disconnected."""
        if client not in self._clients:
            return
        try:
            client.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(client)

    def send_all(self, message: Message) -> None:
        for client in list(self._clients):
            self.send(client, message)

    def leave_in_child(self) -> None:
        """Close the sockets and handlers in a forked child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for sock in (*self._clients, self.listener):
            sock.close()
        for descriptor in self._wake:
            os.close(descriptor)
        self._selector.close()

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        if not self.admits(client):
            client.close()
            return
        self._clients[client] = bytearray()
        self._selector.register(client, selectors.EVENT_READ)

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        buffer = self._clients[client]
        buffer += data
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            self.send(client, self.answer(client, line))

    def _drop(self, client: socket.socket) -> None:
        if self._clients.pop(client, None) is not None:
            self._selector.unregister(client)
            client.close()
