"""sd_notify(3) in a few lines: readiness, watchdog, a longer stop. Silent where no systemd listens."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*lines: str) -> None:
    """Send ``READY=1``, ``WATCHDOG=1``, ``STATUS=...``, ``EXTEND_TIMEOUT_USEC=...`` and the like."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto("\n".join(lines).encode(), address)


def watchdog_s() -> float | None:
    """How often the watchdog wants to hear (half of its limit), or None where there is none."""
    limit = os.environ.get("WATCHDOG_USEC", "")
    return int(limit) / 2e6 if limit.isdigit() and int(limit) > 0 else None
