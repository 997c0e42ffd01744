"""The machine's init and root helper, for the agent: readiness, requests that need root, power-off.

Outside systemd (in the one-machine cloud) a process stands for the VM's init, and the agent needs no root helper.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host.roothelper import COMMAND_S, SOCKET, RefusedError, command

INIT = "SPOTKEEPER_INIT_PID"  # set by the one-machine cloud: the process that stands for the VM's init
ANSWER_S = 5.0  # real; longest wait for systemctl
UNITS = "SPOTKEEPER_UNITS"


class _Reply(Struct, frozen=True):
    ok: bool
    made: bool = False
    why: str = "request"
    error: str = ""


def notify(*lines: str) -> None:
    """Send ``READY=1``, ``WATCHDOG=1``, ``STATUS=...`` and the like to systemd (sd_notify(3)), if it is there."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto("\n".join(lines).encode(), address)


def watchdog_s() -> float | None:
    """Return the seconds between signs of life to systemd's watchdog (half its limit); None without a watchdog."""
    limit = os.environ.get("WATCHDOG_USEC", "")
    return int(limit) / 2e6 if limit.isdecimal() and int(limit) > 0 else None


def has_units() -> bool:
    """Whether the agent runs as a systemd unit (``templates/boot``), beside the root helper and the jobs' unit.

    The agent's unit sets a variable for this. The agent does not look for the jobs' socket instead: if the socket was
    missing under systemd, the agent would run jobs as its own user, which is allowed to use the metadata server.
    """
    return os.environ.get(UNITS) == "1"


def request_root(op: str, *, at: Path = SOCKET, **values: str) -> bool:
    """Have the root helper carry out one of the requests that ``roothelper.py`` lists; return the reply's ``made``.

    Raises:
        RefusedError: the root helper refused, failed, or did not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(3 * COMMAND_S)  # blkid, mkfs and mount, one after the other
            sock.connect(str(at))
            sock.send(msgspec.json.encode({"op": op, **values}))
            reply = codec.decode(sock.recv(4096), _Reply)
    except (OSError, msgspec.DecodeError) as error:
        raise RefusedError(op, f"the root helper does not answer: {error}") from None
    if not reply.ok:
        raise RefusedError(reply.why, reply.error)
    return reply.made


def is_init() -> bool:
    """Whether systemd is this machine's init, as sd_booted(3) tells; False in the one-machine cloud."""
    return INIT not in os.environ and Path("/run/systemd/system").is_dir()


def shutting_down() -> bool:
    """Whether the whole machine shuts down; False if only the agent restarts.

    Also False without an answer: while a machine shuts down, D-Bus runs longer than the agent's unit.
    """
    if not is_init():
        return True
    ask = ["systemctl", "is-system-running"]
    try:
        state = subprocess.run(ask, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return state.stdout.strip() == "stopping"


def power_off(log: Log) -> None:
    """Power this machine off; in the one-machine cloud, end the process that stands for the VM's init."""
    init = os.environ.get(INIT, "")
    if init.isdecimal() and int(init) > 1:
        log("power.off", by="init", pid=int(init))
        os.kill(int(init), signal.SIGTERM)
    elif is_init():
        log("power.off", by="systemd")
        try:
            if has_units():
                request_root("power-off")
            else:
                command("power-off", "systemctl", "poweroff", "--no-block")
        except RefusedError as error:
            log("power.trouble", error=str(error))
    else:
        log("power.off", by="nothing", detail=f"systemd is not the init and {INIT} is not set, so the machine stays on")
