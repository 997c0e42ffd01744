"""Powering this machine off, the last thing an agent does on a dynamic VM. Never the machine it was tested on."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from spotkeeper.vm.log import Log
from spotkeeper.vm.roothelper import RefusedError, command

UNITS = "SPOTKEEPER_UNITS"
INIT = "SPOTKEEPER_INIT_PID"  # set by the local cloud: the process that stands for the VM's init


def has_units() -> bool:
    """Whether this process is the agent's unit (``templates/boot``), beside a root helper and the jobs' unit.

    By its word and not by what answers: an agent that took the jobs' unit for missing would run jobs as itself.
    """
    return os.environ.get(UNITS) == "1"


def has_systemd() -> bool:
    """As sd_booted(3): systemd is this machine's init (and the machine is no local cloud's VM)."""
    return INIT not in os.environ and Path("/run/systemd/system").is_dir()


def shutting_down() -> bool:
    """Whether the whole machine goes down, or only the agent is being restarted."""
    if not has_systemd():
        return True
    state = subprocess.run(["systemctl", "is-system-running"], capture_output=True, text=True, timeout=5, check=False)
    return state.stdout.strip() == "stopping"


def off(log: Log) -> None:
    init = os.environ.get(INIT, "")
    if init.isdigit() and int(init) > 1:
        log("power.off", by="init", pid=int(init))
        os.kill(int(init), signal.SIGTERM)
    elif has_systemd():
        log("power.off", by="systemd")
        try:
            _ask_systemd()
        except RefusedError as error:
            log("power.trouble", error=str(error))
    else:
        log("power.off", by="nobody", detail=f"neither systemd nor {INIT}; the agent just ends")


def _ask_systemd() -> None:
    from spotkeeper.vm import roothelper_client  # it asks this file whether there is a systemd

    if roothelper_client.needed():
        roothelper_client.ask("power-off")
    else:
        command("power-off", "systemctl", "poweroff", "--no-block")
