"""The function's log: one JSON object per line, with listed fields only, without secrets or forged lines.

The clouds' logging reads ``severity`` and ``message``; filters use the other fields.
"""

from __future__ import annotations

import json
import logging
import sys

from spotkeeper.contract.redact import redact

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
    "failed",
)
MAX_TEXT = 500


def shown(text: str) -> str:
    """Return the text without secrets, cut to ``MAX_TEXT`` characters; JSON escapes control characters."""
    return redact(text[: 8 * MAX_TEXT])[:MAX_TEXT]


class JsonLines(logging.Formatter):
    """The formatter of log lines, in ASCII: CR, LF, ANSI and U+2028 are escaped."""

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
    """Send all log lines of ``spotkeeper`` to standard error as JSON. Further calls in the process change nothing."""
    logger = logging.getLogger("spotkeeper")
    if not any(isinstance(handler.formatter, JsonLines) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
