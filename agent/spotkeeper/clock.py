"""The one clock. In a real cloud it is the wall clock; on one machine it runs faster.

Every duration that is not training itself (boots, notices, ticks, leases, polls)
goes through here, so that a two-hour story fits into four minutes. The scale
travels in ``SPOTKEEPER_CLOCK`` as ``<real epoch>:<virtual epoch>:<scale>``, so all
processes of a local cloud agree on the time without talking to each other.

All times in records, facts and tokens are *virtual* unix seconds.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from datetime import datetime

ENV = "SPOTKEEPER_CLOCK"


@dataclass(frozen=True)
class Clock:
    """Virtual time = ``virtual_epoch + (real now - real_epoch) * scale``, seconds."""

    real_epoch: float = 0.0
    virtual_epoch: float = 0.0
    scale: float = 1.0

    @classmethod
    def from_env(cls) -> Clock:
        """The clock of this process: ``SPOTKEEPER_CLOCK``, or the wall clock.

        Raises:
            ValueError: the variable is set to something else than three numbers.
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
        """Virtual unix time, seconds."""
        return self.virtual_epoch + (time.time() - self.real_epoch) * self.scale

    def steady(self) -> float:
        """Virtual seconds since some moment of this boot, for durations: nobody sets this clock right, or wrong."""
        return time.monotonic() * self.scale

    def real_s(self, virtual_s: float) -> float:
        """How many real seconds a virtual duration takes."""
        return virtual_s / self.scale

    def sleep(self, virtual_s: float) -> None:
        time.sleep(max(0.0, self.real_s(virtual_s)))

    def wait(self, event: threading.Event, virtual_s: float) -> bool:
        """``event.wait`` with a virtual timeout."""
        return event.wait(max(0.0, self.real_s(virtual_s)))


def from_rfc3339(text: str) -> float:
    """``2026-09-18T08:22:00.123456789Z`` as unix seconds; a fraction counts for nothing.

    Python 3.10 reads neither a ``Z`` nor nanoseconds. Raises ValueError, also where no zone is said.
    """
    moment = datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))
    if moment.tzinfo is None:
        raise ValueError(f"{text!r}: a time without its zone")
    return moment.timestamp()
