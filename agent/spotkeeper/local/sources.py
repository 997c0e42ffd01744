"""Which code a control plane runs, so that `local up` after an update does not leave the old one in charge."""

from __future__ import annotations

import hashlib
from pathlib import Path

from spotkeeper.local.host import AGENT

FILE = "code"  # in the cloud's folder: of the control plane that runs
_PARTS = ("local", "spec")


def digest() -> str:
    """Of all that a control plane is made of, as it lies on disk now."""
    found = hashlib.sha256()
    package = AGENT / "spotkeeper"
    for path in sorted(path for part in _PARTS for path in (package / part).rglob("*.py")):
        found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def of(folder: Path) -> str:
    """Of the cloud's control plane; '' where nobody has said so."""
    try:
        return (folder / FILE).read_text()
    except OSError:
        return ""
