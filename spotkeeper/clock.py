"""Virtual time: equal to wall-clock time in a real cloud, faster in the one-machine cloud.

Only training takes real time. All other durations are virtual: a machine's boot, a notice, a lease, the time between
two ticks. So the one-machine cloud plays two hours in four minutes. The environment variable ``SPOTKEEPER_CLOCK``, with
the value ``<real epoch>:<virtual epoch>:<scale>``, gives all processes of a one-machine cloud the same clock.

All times in records, facts and tokens are virtual unix seconds.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

ENV = "SPOTKEEPER_CLOCK"


class Now(Protocol):
    """The part of a clock that reconcile uses."""

    @property
    def scale(self) -> float: ...

    def now(self) -> float: ...


@dataclass(frozen=True)
class Clock:
    """A clock: virtual time = ``virtual_epoch + (real now - real_epoch) * scale``, seconds."""

    real_epoch: float = 0.0
    virtual_epoch: float = 0.0
    scale: float = 1.0

    @classmethod
    def from_env(cls) -> Clock:
        """Return the clock that ``SPOTKEEPER_CLOCK`` describes, or the wall clock if it is not set.

        Raises:
            ValueError: the variable has another form than three numbers, or a scale that is not above 0.
        """
        text = os.environ.get(ENV, "")
        if not text:
            return cls()
        try:
            real, virtual, scale = (float(part) for part in text.split(":"))
        except ValueError:
            raise ValueError(f"{ENV}={text!r}: want <real epoch>:<virtual epoch>:<scale>") from None
        if scale <= 0:
            raise ValueError(f"{ENV}={text!r}: the scale must be above 0")
        return cls(real, virtual, scale)

    def to_env(self) -> str:
        return f"{self.real_epoch!r}:{self.virtual_epoch!r}:{self.scale!r}"

    def now(self) -> float:
        """Return virtual unix time, seconds."""
        return self.virtual_epoch + (time.time() - self.real_epoch) * self.scale

    def steady(self) -> float:
        """Return virtual seconds for measuring durations. They count from no known moment, and are never set back."""
        return time.monotonic() * self.scale

    def real_s(self, virtual_s: float) -> float:
        """Convert virtual to real seconds."""
        return virtual_s / self.scale

    def sleep(self, virtual_s: float) -> None:
        time.sleep(max(0.0, self.real_s(virtual_s)))

    def wait(self, event: threading.Event, virtual_s: float) -> bool:
        """Wait for an event with a timeout in virtual seconds; return whether it is set."""
        return event.wait(max(0.0, self.real_s(virtual_s)))


def from_rfc3339(text: str) -> float:
    """Convert ``2026-09-18T08:22:00.123456789Z`` to unix seconds; a fraction is dropped.

    Python 3.10 parses neither ``Z`` nor nanoseconds.

    Raises:
        ValueError: the text is not a time, or has no time zone.
    """
    moment = datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))
    if moment.tzinfo is None:
        raise ValueError(f"{text!r}: the time has no time zone")
    return moment.timestamp()
