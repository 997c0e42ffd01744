"""Checks in bounded time whether a machine is fit to train and to be preempted, and names a remedy for each finding.

Run it on a machine of a stack as ``python -m spotkeeper_agent.preflight``; elsewhere ``spotkeeper preflight`` runs the
same checks. It changes nothing (the disk probe deletes its file), needs no rights, and explains each check that it
skips. ``checks.py`` clock, metadata, disk, kernel, network · ``checks_gpu.py`` accelerators · ``findings.py`` results.
"""

from __future__ import annotations

import os
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper_agent import cloud
from spotkeeper_agent.cloud.metadata import EC2_ENDPOINT, GCE_HOST, Metadata, MetadataError
from spotkeeper_agent.core.settings import notice_s
from spotkeeper_agent.preflight.findings import Check, Machine


def all_checks() -> tuple[Check, ...]:
    """Return all checks, in the order of their findings."""
    from spotkeeper_agent.preflight import checks, checks_gpu

    return (*checks.CHECKS, *checks_gpu.CHECKS)


def boot_checks() -> tuple[Check, ...]:
    return tuple(check for check in all_checks() if check.boot)


MOUNT = Path("/mnt/sk-data")


def here(folder: Path | None, peers: tuple[str, ...], notice: float | None, python: str) -> Machine:
    """Return this machine. ``folder``: default the data disk, or else the working directory; ``notice``: the pool's."""
    metadata = _metadata()
    return Machine(
        metadata=metadata,
        folder=folder or (MOUNT if MOUNT.is_dir() else Path.cwd()),
        notice_s=notice_s(_attributes(metadata).get("sk-notice-s")) if notice is None else notice,
        peers=peers,
        python=python,
        fabric=_attributes(metadata).get("sk-fabric", ""),
        environ=dict(os.environ),
    )


def _metadata() -> Metadata | None:
    """Return this machine's metadata client; None (no request) if neither firmware nor environment names a cloud."""
    named = GCE_HOST in os.environ or EC2_ENDPOINT in os.environ
    if not named and not cloud.vendor().startswith(("Google", "Amazon")):
        return None
    return cloud.here(Clock.from_env())


def _attributes(metadata: Metadata | None) -> dict[str, str]:
    try:
        return metadata.instance().attributes if metadata else {}
    except MetadataError:
        return {}
