"""Adversarial markets: replays of a job on a market that reacts to the rule's answers.

Seeded: a number is one story. What a story may do is in :data:`TRICKS`; each takes the machine, all zones, the price or
the way back at the moment at which it hurts most. No market is like that: what holds here holds anywhere.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

from spotkeeper.contract.policy import PolicyAnswer, Terms, Tick
from spotkeeper.reconcile.select.player import Player
from spotkeeper.reconcile.select.rule import RULE
from spotkeeper.replay.model import Case, PlayedOutcome, play
from spotkeeper.replay.recording import RecordedZone, Recording

LOOKS_H = 48.0
FAR = 10_000  # ticks


@dataclass(frozen=True)
class Trick:
    """What a market does to a machine on spot.

    Attributes:
        at_work: takes it when so many ticks of its start-up are left: paid for, and nothing done yet.
        at_age: takes it when it is so many ticks old.
        late: takes everything when so many ticks are left before on-demand has to run.
        at_random: takes it with this probability a tick.
        refuses: as soon as it is asked, there is none, with this probability.
        price: with this probability a machine that works costs ``price_to`` times on-demand for ``price_ticks``.
        all_zones, gap: what is taken, and for how many ticks.
    """

    at_work: int = 0
    at_age: int = 0
    late: float = 0.0
    at_random: float = 0.0
    refuses: float = 0.0
    price: float = 0.0
    price_to: float = 1.0
    price_ticks: int = 1
    all_zones: bool = False
    gap: int = 1


TRICKS = (
    Trick(),
    *(Trick(at_work=ticks, gap=gap) for ticks, gap in ((1, 1), (1, 2), (1, 6), (1, 30), (2, 1))),
    *(Trick(at_age=ticks, gap=gap, all_zones=gap > 1 or ticks > 2) for ticks, gap in ((1, 1), (2, 1), (3, 1), (5, 3))),
    *(Trick(late=ticks, all_zones=True, gap=FAR) for ticks in (1e-4, 1.0, 3.0)),
    *(Trick(at_random=chance, all_zones=True, gap=gap) for chance, gap in ((0.1, 5), (0.3, 1))),
    Trick(refuses=0.9),
    Trick(refuses=0.5, at_work=1),
    Trick(price=0.3, price_to=5.0),
    Trick(price=1.0, price_to=3.0, price_ticks=100),
    Trick(price=1.0, price_to=1.2, price_ticks=100),
)
SHAPES = ("up", "short", "was up")


class Hostile(Player):
    """The rule as shipped, on a market that sees its answers. ``beyond``: hours above on-demand's price it was in."""

    def __init__(self, case: Case, trick: Trick, rng: random.Random) -> None:
        super().__init__()
        self.case, self.trick, self.rng = case, trick, rng
        self.beyond = 0.0

    def tick(self, tick: Tick) -> PolicyAnswer:
        at = (self.case.begins + tick.tick) % self.case.recording.ticks
        tick = self._raised(tick, at)
        on = tick.on
        if on is not None and on.kind == "spot":
            self.beyond += self._terms.tick_h * max(0.0, (tick.spot_price[on.zone] or 0.0) - 1.0)
        answer = super().tick(tick)
        if self._strikes(tick):
            here = None if on is None else int(on.zone[1:])
            self._take(at + 1, None if self.trick.all_zones else here)
        if on is None and self.rng.random() < self.trick.refuses:
            self._take(at, None, 1)
        return answer

    def _raised(self, tick: Tick, at: int) -> Tick:
        on, trick, zones = tick.on, self.trick, self.case.recording.zones
        works = on is not None and on.kind == "spot" and on.pending_h == 0
        if on is None or not works or self.rng.random() >= trick.price:
            return tick
        price = zones[int(on.zone[1:])].price
        for ahead in range(trick.price_ticks):
            price[(at + ahead) % len(price)] = trick.price_to  # type: ignore[index]  # lists, in these markets
        told = {f"z{index}": zone.price[at] for index, zone in enumerate(zones)}
        return Tick(**{name: getattr(tick, name) for name in tick.__struct_fields__} | {"spot_price": told})

    def _strikes(self, tick: Tick) -> bool:
        trick, terms, on = self.trick, self._terms, tick.on
        if trick.late and tick.time_left_h is not None:
            late = 2 * terms.restart_h + terms.move_h + len(self._places) * terms.attempt_h
            if tick.time_left_h - tick.left_h < late + trick.late * terms.tick_h:
                return True
        if on is None or on.kind != "spot":
            return False
        if trick.at_work and on.pending_h <= terms.tick_h * trick.at_work:
            return True
        if trick.at_age and round(on.age_h / terms.tick_h) >= trick.at_age:
            return True
        return self.rng.random() < trick.at_random

    def _take(self, at: int, zone: int | None, ticks: int = 0) -> None:
        up = self.case.recording.up
        for index in range(len(up)) if zone is None else (zone,):
            for ahead in range(min(ticks or self.trick.gap, len(up[index]))):
                up[index][(at + ahead) % len(up[index])] = 0  # type: ignore[index]  # bytearrays, in these markets


@lru_cache(maxsize=240)
def story(seed: int) -> tuple[Case, PlayedOutcome, Hostile]:
    """One job on one hostile market, as the shipped rule plays it."""
    rng = random.Random(seed)  # noqa: S311  a seed, so that a story can be told again
    trick, shape = rng.choice(TRICKS), rng.choice(SHAPES)
    case = _case(rng, shape)
    player = Hostile(case, trick, rng)
    return case, play(case, player), player


def feasible(terms: Terms) -> bool:
    """Whether on-demand from the first moment holds the deadline, in whole ticks."""
    if terms.deadline_h is None:
        return False
    ticks = math.floor(terms.deadline_h / terms.tick_h + 1e-9)
    return math.ceil((terms.work_h + terms.restart_h) / terms.tick_h - 1e-9) <= ticks


def bound(case: Case) -> float:
    """What no market makes a job cost more than, in on-demand hours: all work on on-demand, what spot may lose in vain
    (``Rule.hope``), the one start on spot that goes beyond it, and the way back."""
    terms = case.terms
    refused = len(case.recording.zones) * terms.attempt_h
    vain = RULE.hope * terms.work_h + terms.restart_h
    beyond = terms.restart_h + terms.move_h + refused + terms.move_price + terms.tick_h
    return terms.work_h + vain + beyond + terms.restart_h + refused


def _case(rng: random.Random, shape: str) -> Case:
    tick_h = rng.choice((195 / 3600, 300 / 3600, 600 / 3600))
    work, restart = rng.choice((2.0, 6.0, 12.0, 24.0, 48.0)), rng.choice((0.0, 1 / 60, 0.2, 1 / 3, 1.0, 3.0, 24.0))
    slack = rng.choice((-0.5, 0.02, 0.05, 0.083, 0.25, 0.46, 1.0))
    deadline = work * (1 + slack) if rng.random() < 0.8 else None
    horizon = deadline if deadline is not None else 3 * work
    ticks = int((LOOKS_H + horizon) / tick_h) + 50
    price, count = rng.choice((0.1, 0.3, 0.6, 0.85, 0.95)), rng.choice((1, 1, 2, 3, 9))
    noise = (1.0, 1.0, 1.2, 0.8) if rng.random() < 0.3 else (1.0,)
    regions = rng.choice((1, 2))
    zones = tuple(
        RecordedZone(
            f"r{index % regions}{index}",
            f"r{index % regions}",
            _capacity(rng, shape, ticks, round(LOOKS_H / tick_h)),
            [min(0.99, price * rng.choice(noise)) for _ in range(ticks)],  # type: ignore[arg-type]
        )
        for index in range(count)
    )
    recording = Recording("hostile", shape, tick_h, 1, zones)
    recording.__dict__["up"] = tuple(bytearray(zone.capacity) for zone in zones)  # in place of the cached one
    terms = Terms(
        work_h=work,
        deadline_h=deadline,
        horizon_h=horizon,
        restart_h=restart,
        move_h=rng.choice((0.0, 0.05, 0.5)),
        move_price=rng.choice((0.002, 0.3)),
        attempt_h=30 / 3600,
        probe_h=1 / 60,
        delay_price=0.0 if deadline is not None else 0.1,
        tick_h=tick_h,
    )
    return Case(f"hostile/{shape}", recording, round(LOOKS_H / tick_h), 0, terms)


def _capacity(rng: random.Random, shape: str, ticks: int, looks: int) -> tuple[int, ...]:
    if shape == "up":
        return (1,) * ticks
    if shape == "was up":
        return (1,) * looks + tuple(int(rng.random() < 0.3) for _ in range(ticks - looks))
    out: list[int] = []
    while len(out) < ticks:
        out += [0] * rng.randint(1, 4) + [1] * rng.randint(1, 3)
    return tuple(out[:ticks])
