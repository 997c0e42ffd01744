"""A stack's own history as a recording, so that forecasts replay it beside those that are shipped. Pure.

Only what machines lived through is known: where one ran spot was there, where one was taken or refused it was not,
for an hour at most. Between two such times a zone stays as it was last seen; hours in which nothing is known of any
zone are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from spotkeeper.replay.recording import Recording, Zone
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.market import HOUR_S, Fate, Sight, lives
from spotkeeper.spec.model import Model

TICK_S = 600.0
GONE_S = HOUR_S  # a zone that took or refused a machine is believed to have none for so long, at most
LEAST_H = 48.0  # of known hours, below which a history says nothing
Span = tuple[float, float, bool]  # from, to, whether spot was there


def own_recording(pool: str, region: str, sights: Iterable[Sight]) -> Recording | None:
    """The recording of a pool's zones; None: too little is known. Its gang is 1: a zone has spot, or has none."""
    told = sorted(sights, key=lambda sight: sight.at)
    spans: dict[str, list[Span]] = {}
    for zone, span in _spans(told):
        spans.setdefault(zone, []).append(span)
    if not spans:
        return None
    begin = min(span[0] for zone in spans.values() for span in zone)
    ticks = math.ceil((max(span[1] for zone in spans.values() for span in zone) - begin) / TICK_S)
    states = {zone: _states(found, begin, ticks) for zone, found in sorted(spans.items())}
    kept = [tick for tick in range(ticks) if any(known[tick] is not None for known in states.values())]
    if len(kept) * TICK_S < LEAST_H * HOUR_S:
        return None
    held = {zone: _held(known) for zone, known in states.items()}
    zones = tuple(
        Zone(zone, region, tuple(series[tick] for tick in kept), (1.0,) * len(kept)) for zone, series in held.items()
    )
    return Recording("own history", pool, TICK_S / HOUR_S, 1, zones)


def _spans(sights: list[Sight]) -> Iterable[tuple[str, Span]]:
    last = sights[-1].at if sights else 0.0
    for life in lives(sights):
        if life.model is not Model.SPOT or life.began is None:
            continue
        ended = last if life.ended is None else life.ended
        yield life.zone, (life.began, ended, True)
        if life.fate is not Fate.KEPT:
            yield life.zone, (ended, ended + GONE_S, False)
    for sight in sights:
        if sight.event is Event.REFUSED and sight.cause == "capacity" and sight.model is Model.SPOT:
            yield sight.zone, (sight.at, sight.at + GONE_S, False)


def _states(spans: list[Span], begin: float, ticks: int) -> list[bool | None]:
    """By tick, what is known. A machine that ran all the tick outweighs a refusal of the hour before it."""
    known: list[bool | None] = [None] * ticks
    for start, end, up in sorted(spans, key=lambda span: span[2]):
        first, last = (start - begin) / TICK_S, (end - begin) / TICK_S
        ran = range(math.ceil(first), min(ticks, int(last))) if up else range(int(first), min(ticks, math.ceil(last)))
        for tick in ran:
            known[tick] = up
    return known


def _held(known: list[bool | None]) -> list[int]:
    """Without gaps: as it was last seen; before the first look as it was then."""
    last = next((state for state in known if state is not None), False)
    out = []
    for state in known:
        last = last if state is None else state
        out.append(int(last))
    return out
