"""Removes everything that looks like a secret from all text that users see: the last line of defence.

The first line of defence is that no code logs a secret: no header, no body, no value of a job's variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

REMOVED = "[removed]"
_SECRET = re.compile(
    r"(?i:(?:proxy-|x-serverless-|x-forwarded-)?authorization|x-amz-security-token|x-goog-iap-jwt-assertion)"
    r"""["']?\s*[:=]\s*["']?(?:(?i:basic|bearer|aws4-hmac-sha256)\s+)?[^\s"',;]+"""
    r"|(?i:bearer)\s+[^\s\"',;]+"
    r"|eyJ[-A-Za-z0-9_]{4,}(?:\.[-A-Za-z0-9_]*){0,2}"  # JWT, whole or cut
    r"|ya29\.[-A-Za-z0-9._]+"  # Google's access tokens
    r"|GOCSPX-[-A-Za-z0-9_]{8,}|AIza[-A-Za-z0-9_]{20,}"  # its client secrets and keys
    r"|(?:AKIA|ASIA)[A-Z0-9]{8,}|\bhf_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{8,}|\bgithub_pat_[A-Za-z0-9_]{8,}"
    r"|\bsk-(?:proj-|ant-)?[A-Za-z0-9_]{20,}|\bxox[abprs]-[-A-Za-z0-9]{8,}|\bwandb_[A-Za-z0-9]{20,}"
    r"|-----BEGIN [^-]+-----[\s\S]*?(?:-----END [^-]+-----|\Z)"
    r"|(?<=://hooks\.slack\.com/)[^\s\"']+|(?<=/api/webhooks/)[^\s\"']+"  # Slack's and Discord's webhooks
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password of an address
    r"|(?i:(?<=x-goog-signature=)|(?<=x-amz-signature=)|(?<=x-amz-security-token=)|(?<=x-amz-credential=)"
    r"|(?<=[?&]sig=)|(?<=[?&]token=))[^&\s]+"
)


_known: set[str] = set()


def learn(values: Iterable[str]) -> None:
    """Make :func:`redact` remove these values too, even if they do not look like secrets."""
    _known.update(values)


def known() -> frozenset[str]:
    return frozenset(_known)


def redact(text: str) -> str:
    """Return ``text`` without anything that looks like a secret."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, REMOVED)
    return _SECRET.sub(REMOVED, text)
