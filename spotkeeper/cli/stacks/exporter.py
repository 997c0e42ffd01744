"""``exporter``: serves a stack's metrics to Prometheus until it is stopped."""

from __future__ import annotations

import re
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from spotkeeper.cli.output import emit_line, note
from spotkeeper.client import find_target
from spotkeeper.client.errors import CliError, Exit

if TYPE_CHECKING:
    from spotkeeper.exporter.spans import TraceSender

LEAST_S = 5.0


def run(listen: str, every_s: float, otlp: str | None, stack: str | None, *, as_json: bool) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        CliError: ``spotkeeper[exporter]`` is not installed, no such stack, ``every_s`` is too short, or the address is
            wrong or in use.
        StoreError: the first read of the bucket failed.
    """
    host, port = address(listen)
    if every_s < LEAST_S:
        raise CliError(f"--every {every_s:g}: at least {LEAST_S:g} seconds, since every read costs money", Exit.USAGE)
    try:
        from spotkeeper.exporter import server
        from spotkeeper.exporter.reading import StackReader
    except ImportError as error:
        raise CliError(
            f"the exporter needs {error.name}, which is not installed",
            Exit.MISSING,
            "pip install 'spotkeeper[exporter]'",
        ) from None
    target, pages, stop = find_target(stack), server.Pages(), threading.Event()
    reader = StackReader(target)
    first = reader.read()
    pages.show(first)
    sender = None if otlp is None else _sender(otlp, first.stack.stack, target.clock.scale)
    try:
        http = server.serve(host, port, pages)
    except OSError as error:
        raise CliError(
            f"cannot listen on {listen}: {error.strerror}", Exit.REFUSED, "--listen 127.0.0.1:9465"
        ) from None
    url = f"http://{f'[{host}]' if ':' in host else host}:{http.server_address[1]}/metrics"
    if as_json:
        emit_line({"url": url})
    else:
        note(f"metrics of the stack at {url}; Ctrl-C ends the exporter")

    def end(signum: int, frame: FrameType | None) -> None:
        stop.set()
        threading.Thread(target=http.shutdown, daemon=True).start()  # it waits for the loop below

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    then = sender.offer if sender is not None else lambda _: None
    then(first)
    reading = threading.Thread(target=server.read_forever, args=(reader.read, pages, every_s, stop, then), daemon=True)
    reading.start()
    try:
        http.serve_forever()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.set()
        http.server_close()
        if sender is not None:
            sender.close()


def _sender(otlp: str, stack: str, scale: float) -> TraceSender:
    from spotkeeper.exporter.spans import TraceSender

    try:
        return TraceSender(otlp, stack, scale)
    except ValueError as error:
        raise CliError(f"--otlp {error}", Exit.USAGE) from None


def address(listen: str) -> tuple[str, int]:
    """Return host and port of ``127.0.0.1:9464``, ``[::1]:9464`` or ``:9464`` (all addresses: host ""), or CliError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([^:\[\]]*)):(\d{1,5})", listen)
    if found is None or int(found[3]) > 65535:
        raise CliError(f"--listen {listen}: want ADDRESS:PORT", Exit.USAGE, "--listen 127.0.0.1:9464")
    return found[1] or found[2] or "", int(found[3])
