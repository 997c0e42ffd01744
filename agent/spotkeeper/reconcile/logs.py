"""The function's log: one JSON object a line, fields from a list, nothing secret, nothing that forges a line.

A cloud's logging reads ``severity`` and ``message``; the rest are plain fields to filter by.
"""

from __future__ import annotations

import json
import logging
import re
import sys

FIELDS = ("path", "status", "ms", "job", "caller", "reason", "ended", "rounds", "passes", "writes", "calls", "jobs")
MAX_TEXT = 500
_SECRET = re.compile(
    r"eyJ[-A-Za-z0-9_]{4,}(?:\.[-A-Za-z0-9_]*){0,2}"  # JWT, whole or cut
    r"|ya29\.[-A-Za-z0-9._]+"  # Google's access tokens
    r"|(?:AKIA|ASIA)[A-Z0-9]{8,}|\bhf_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9]{20,}"
    r"|-----BEGIN [^-]+-----[\s\S]*?(?:-----END [^-]+-----|\Z)"
    r"|(?i:bearer)\s+\S+"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password of an address
    r"|(?i:(?<=x-goog-signature=)|(?<=x-amz-signature=)|(?<=x-amz-security-token=))[^&\s]+"
)


def redact(text: str) -> str:
    """Without secrets, and cut; control characters are escaped by JSON."""
    return _SECRET.sub("[removed]", text[: 8 * MAX_TEXT])[:MAX_TEXT]


class JsonLines(logging.Formatter):
    """One line of ASCII: CR, LF, ANSI and U+2028 arrive as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, object] = {"severity": record.levelname, "message": redact(record.getMessage())}
        if record.exc_info:
            out["error"] = redact(self.formatException(record.exc_info)[-MAX_TEXT:])
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                out[name] = value if isinstance(value, int | float | bool) else redact(str(value))
        return json.dumps(out)


def setup() -> None:
    """Once per process: everything under ``spotkeeper`` goes to standard error as JSON lines."""
    logger = logging.getLogger("spotkeeper")
    if not any(isinstance(handler.formatter, JsonLines) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
