"""Fingerprints: what a client must send back to change labels or metadata it has read. Pure."""

from __future__ import annotations

import base64
import hashlib
import json


def fingerprint(value: object) -> str:
    """8 bytes, base64, of the canonical JSON of a value."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()[:8]
    return base64.b64encode(digest).decode()
