"""How long a request works: what it has no time to begin is left to the next round, and to whoever asks next.

The platform ends a request in the middle, its lease and all; ours ends by itself before that. The sums::

    REQUEST_S + CALL_S <= PLATFORM_S     nothing is begun after REQUEST_S, and what is begun ends CALL_S later
    AGAIN_S >= LOOK_S                    a round that is begun again has time for a look at the cloud
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PLATFORM_S = 60.0  # real seconds, as all here; the least that the stack file may set as the function's timeout
REQUEST_S = 50.0  # of a request, from its beginning; no call of the bucket or the cloud is begun after it
CALL_S = 8.0  # the longest call that does not know of it: one of the bucket
LOOK_S = 24.0  # the longest look at the cloud
AGAIN_S = 36.0  # with less than this left, nobody starts over for reports that came in meanwhile: agents wait 30 s
BEGIN_S = 10.0  # with less than this left, a tick begins no further round


class Deadline:
    """The end of one request's time; ``now`` in seconds, of a clock that only rises."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    def left(self) -> float:
        return self._ends - self._now()

    @property
    def up(self) -> bool:
        return self.left() <= 0.0


NEVER = Deadline(math.inf, lambda: 0.0)
