"""The function's log: one JSON object a line, fields from a list, nothing secret, nothing that forges a line.

A cloud's logging reads ``severity`` and ``message``; the rest are plain fields to filter by.
"""

from __future__ import annotations

import json
import logging
import sys

from spotkeeper.spec.redact import redact

FIELDS = (
    "path",
    "status",
    "ms",
    "job",
    "event",
    "caller",
    "reason",
    "ended",
    "rounds",
    "passes",
    "writes",
    "calls",
    "jobs",
)
MAX_TEXT = 500


def shown(text: str) -> str:
    """Without secrets, and cut; control characters are escaped by JSON."""
    return redact(text[: 8 * MAX_TEXT])[:MAX_TEXT]


class JsonLines(logging.Formatter):
    """One line of ASCII: CR, LF, ANSI and U+2028 arrive as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, object] = {"severity": record.levelname, "message": shown(record.getMessage())}
        if record.exc_info:
            out["error"] = redact(self.formatException(record.exc_info)[-8 * MAX_TEXT :])[-MAX_TEXT:]
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                out[name] = value if isinstance(value, int | float | bool) else shown(str(value))
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
