"""Which jobs are replayed on a recording: drawn once, the same every time.

As the published comparisons have it: 48 h of work, a restart of 4, 12, 12 or 20 min, deadlines of 52, 60 and 70 h,
and jobs without one, for which a waiting hour costs a tenth of an on-demand hour.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from spotkeeper.replay.model import LOOKS_H, Case
from spotkeeper.replay.recording import Recording
from spotkeeper.spec.policy import Terms

WORK_H = 48.0
LONGEST_H = 70.0
DEADLINES_H = {"tight": 52.0, "mid": 60.0, "loose": LONGEST_H, "soft": None}
RESTARTS_H = (4 / 60, 12 / 60, 12 / 60, 20 / 60)
MOVE_H, ATTEMPT_H, PROBE_H = 3 / 60, 30 / 3600, 1 / 60
CHECKPOINT_GB, EGRESS_USD_GB = 50.0, 0.02
FORCED = 3.0  # times the work: when a job without a deadline is forced
DELAY_PRICE = 0.1
SCOPES = ("all", "region", "one")
LEAST_UP = 0.05  # of the time, for a zone to be somebody's home
USD_H = {
    "k80_1": 0.9,
    "k80_8": 7.2,
    "v100_1": 3.06,
    "v100_8": 24.48,
    "r5_64": 4.032,
    "v100_16n": 48.96,
    "v100_4n": 12.24,
    "c3_88": 4.6,
    "a3_h100": 16 * 88.0,
}  # on-demand, of the gang


def terms(recording: Recording, restart_h: float, deadline_h: float | None, work_h: float = WORK_H) -> Terms:
    return Terms(
        work_h=work_h,
        deadline_h=deadline_h,
        horizon_h=deadline_h or FORCED * work_h,
        restart_h=restart_h,
        move_h=MOVE_H,
        move_price=CHECKPOINT_GB * EGRESS_USD_GB / USD_H.get(recording.market, 3.06),
        attempt_h=ATTEMPT_H,
        probe_h=PROBE_H,
        delay_price=0.0 if deadline_h else DELAY_PRICE,
        tick_h=recording.tick_h,
    )


def draw(recording: Recording, starts: int, seed: str = "") -> Iterator[Case]:
    """``starts`` times four cases, evenly spread over the recording; zones, home and restart are drawn for each.

    A job may use all zones, those of its home's region, or its home alone. A recording that is too short for the
    looks before a job and the longest deadline after them has a third of the cases.
    """
    rng = random.Random(f"{recording.name}/{seed}")  # noqa: S311 - a replay, not a secret
    looks = round(LOOKS_H / recording.tick_h)
    room = recording.ticks - looks - round(LONGEST_H / recording.tick_h)
    if room < 1:
        room, starts = recording.ticks, max(1, starts // 3)
    homes = [index for index, up in enumerate(recording.up) if sum(up) > LEAST_UP * len(up)]
    for number in range(starts):
        begins = looks + int(room * (number + rng.random()) / starts)
        zone, restart = rng.choice(homes), rng.choice(RESTARTS_H)
        zones = _zones(recording, zone, SCOPES[number % len(SCOPES)])
        part = recording.only(zones)
        for kind, deadline in DEADLINES_H.items():
            name = f"{recording.name}/{number}/{kind}"
            yield Case(name, part, begins % recording.ticks, zones.index(zone), terms(recording, restart, deadline))


def _zones(recording: Recording, home: int, scope: str) -> tuple[int, ...]:
    region = recording.zones[home].region
    return tuple(
        index
        for index, zone in enumerate(recording.zones)
        if scope == "all" or index == home or (scope == "region" and zone.region == region)
    )
