"""How long a start takes, from the order for a machine to the next step. One number, and what takes its place. Pure.

``select()`` reckons with it, ``submit`` holds a deadline and a budget against it, ``forecast`` and ``compare`` bill it
for every launch.
"""

from __future__ import annotations

# Where a job has not shown how long it takes: the machine's boot, its data disk, Python and torch, the data's first
# batch. Nobody has published boots by cloud or machine type; starts of training jobs on new machines are told to take
# "typically over 10 minutes", and comparisons of policies reckon with 4 to 20, 12 most often. What it is too long by, a
# job waits less for spot; what it is too short by, a deadline is missed.
START_S = 600.0


def start_s(boot_s: float | None, begin_s: float | None, save_s: float) -> float:
    """Virtual seconds that a start costs, as far as it was measured.

    Args:
        boot_s: from the order to the hello, as machines of the pool had it; None: none was seen to boot.
        begin_s: from a generation to its first step, as this very job had it last; None: it has not begun yet.
        save_s: what a save takes, before machines are changed.
    """
    if boot_s is None or begin_s is None:
        return max(START_S, (boot_s or 0.0) + (begin_s or 0.0) + save_s)
    return boot_s + begin_s + save_s
