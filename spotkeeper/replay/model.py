"""Replays one job on a recorded market under one policy: its cost, its end, its preemptions.

Time advances in the recording's ticks. A gang runs in a zone that has capacity for the whole gang during the whole
tick. A zone without that capacity preempts the gang at the start of the tick. A launch begins with a start-up, which is
billed but makes no progress: ``restart_h`` hours, plus ``move_h`` in a zone other than the last, plus ``attempt_h`` for
each request that was refused just before. A launch in another region also costs ``move_price``. If the recording ends
before the job, the recording is played again from its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from spotkeeper.contract.policy import KEEP, ON_DEMAND, SPOT, End, On, PolicyAnswer, PolicyZone, Start, Terms, Tick
from spotkeeper.replay.recording import Recording

HISTORY_H = 48.0  # hours of market history that a policy gets at a job's start
ATTEMPT_H, PROBE_H = 30 / 3600, 1 / 60  # time of a refused launch, and of a probe
LEAST_UP = 0.05  # share of the time that a zone must have capacity to be a job's home


class ReplayPolicy(Protocol):
    """A policy that speaks the protocol of ``contract/policy.py``."""

    def start(self, start: Start) -> None: ...

    def tick(self, tick: Tick) -> PolicyAnswer: ...

    def end(self, end: End) -> None: ...


@dataclass(frozen=True)
class Case:
    """A job that starts at tick ``begins`` of a recording. ``home``: index of the zone where its data is at first.

    ``begun``: whether that data is a checkpoint, so that a first launch in another region has to bring it there.
    ``start_price``: by region, what a first launch costs there besides, if no checkpoint exists.
    """

    name: str
    recording: Recording
    begins: int
    home: int
    terms: Terms
    begun: bool = True
    start_price: Mapping[str, float] = field(default_factory=dict)

    @property
    def on_demand_only(self) -> float:
        """Cost of the job if it used only on-demand machines. Unit: what the whole gang costs on-demand in an hour."""
        return (self.terms.work_h + self.terms.restart_h) * self.terms.on_demand_price

    @cached_property
    def message(self) -> Start:
        names = [f"z{index}" for index in range(len(self.recording.zones))]
        regions = list(dict.fromkeys(zone.region for zone in self.recording.zones))
        places = tuple(
            PolicyZone(name, f"r{regions.index(zone.region)}", self._history(index))
            for index, (name, zone) in enumerate(zip(names, self.recording.zones, strict=True))
        )
        return Start(self.name, names[self.home], self.terms, places)

    def _history(self, zone: int) -> tuple[tuple[float, int], ...]:
        up, ticks = self.recording.up[zone], self.recording.ticks
        hours = range(int(HISTORY_H), 0, -1)
        return tuple((float(h), up[(self.begins - round(h / self.recording.tick_h)) % ticks]) for h in hours)


@dataclass
class PlayedOutcome:
    """Result of a replay.

    ``cost``: in units of what the whole gang costs on-demand in an hour. ``waited_h``: hours without machines.
    ``egress``: what launches in another region cost, a part of ``cost``.
    """

    cost: float = 0.0
    finish_h: float = 0.0
    missed: bool = False
    preemptions: int = 0
    launches: int = 0
    refusals: int = 0
    spot_h: float = 0.0
    on_demand_h: float = 0.0
    waited_h: float = 0.0
    egress: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


def play(case: Case, policy: ReplayPolicy) -> PlayedOutcome:
    """Replay a case to its end."""
    return _Replay(case, policy).play()


class _Replay:
    def __init__(self, case: Case, policy: ReplayPolicy) -> None:
        self.case, self.policy, self.terms = case, policy, case.terms
        self.up = case.recording.up
        self.ids = [place.id for place in case.message.zones]
        self.index = {name: index for index, name in enumerate(self.ids)}
        self.regions = [place.region for place in case.message.zones]
        self.home = case.home
        self.kind, self.zone, self.since, self.pending = "", 0, 0, 0.0
        self.done = 0.0
        self.out = PlayedOutcome()
        self.tried: dict[str, bool] = {}
        self.probed: dict[str, bool] = {}
        self._priced: tuple[float, ...] = ()
        self._prices: dict[str, float] = {}

    def play(self) -> PlayedOutcome:
        terms, out = self.terms, self.out
        last = int(terms.horizon_h / terms.tick_h + 1e-9)
        self.policy.start(self.case.message)
        for tick in range(last):
            event = "start" if tick == 0 else "tick"
            at = (self.case.begins + tick) % self.case.recording.ticks
            if self.kind == "spot" and not self.up[self.zone][at]:
                self.kind, event = "", "preempted"
                out.preemptions += 1
            self._decide(tick, at, event)
            if self._pass(tick, at):
                break
        else:
            self._force(last)
        self.policy.end(End(out.cost, out.finish_h, out.missed, out.preemptions))
        return out

    def _decide(self, tick: int, at: int, event: str) -> None:
        terms = self.terms
        now = tick * terms.tick_h
        on = On(self.kind, self.ids[self.zone], now - self.since * terms.tick_h, self.pending) if self.kind else None  # type: ignore[arg-type]
        left = None if terms.deadline_h is None else terms.deadline_h - now
        answer = self.policy.tick(
            Tick(
                tick,
                now,
                self.done,
                terms.work_h - self.done,
                left,
                event,  # type: ignore[arg-type]
                on,
                self.ids[self.home],
                self._price_at(at),
                self.tried,
                self.probed,
                self.out.preemptions,
                self.out.cost,
            )
        )
        self._probe(answer.probe, at)
        self._try(answer.attempts, tick, at)

    def _price_at(self, at: int) -> dict[str, float]:
        prices = tuple([zone.price[at] for zone in self.case.recording.zones])
        if prices != self._priced:
            self._priced, self._prices = prices, dict(zip(self.ids, prices, strict=True))
        return self._prices

    def _probe(self, zones: Sequence[str], at: int) -> None:
        self.probed = {}
        for name in dict.fromkeys(zones):
            zone = self.index.get(name)
            if zone is not None:
                self.probed[name] = bool(self.up[zone][at])
                if self.up[zone][at]:
                    self.out.cost += self.terms.probe_h * self._prices[name]

    def _try(self, choices: Sequence[str], tick: int, at: int) -> None:
        """Take the first possible choice of a policy: "keep" (its machines), "od" (on-demand) or "spot:<zone>".

        If none is possible, the machines stop. ``at``: the tick of the recording that is played at ``tick``.
        """
        self.tried, refused = {}, 0
        for choice in choices:
            if choice == KEEP:
                if self.kind:
                    return
            elif choice == ON_DEMAND:
                if self.kind != "od":
                    self._launch("od", self.home, tick, refused)
                return
            elif (zone := self.index.get(choice.removeprefix(SPOT))) is not None and choice.startswith(SPOT):
                if self.kind == "spot" and zone == self.zone:
                    return
                self.tried[self.ids[zone]] = bool(self.up[zone][at])
                if self.up[zone][at]:
                    self._launch("spot", zone, tick, refused)
                    return
                refused += 1
                self.out.refusals += 1
        self.kind = ""

    def _launch(self, kind: str, zone: int, tick: int, refused: int) -> None:
        terms = self.terms
        self.pending = terms.restart_h + refused * terms.attempt_h
        if not (self.case.begun or self.out.launches):
            price = self.case.start_price.get(self.case.recording.zones[zone].region, 0.0)
            self.out.cost += price
            self.out.egress += price
        if zone != self.home:
            self.pending += terms.move_h
            if self.regions[zone] != self.regions[self.home] and (self.case.begun or self.out.launches):
                self.out.cost += terms.move_price
                self.out.egress += terms.move_price
            self.home = zone
        self.kind, self.zone, self.since = kind, zone, tick
        self.out.launches += 1

    def _pass(self, tick: int, at: int) -> bool:
        """Advance one tick; return whether the job is done."""
        terms, out = self.terms, self.out
        if not self.kind:
            out.waited_h += terms.tick_h
            out.cost += terms.tick_h * terms.delay_price
            return False
        need = self.pending + terms.work_h - self.done
        used = min(terms.tick_h, need)
        self.done += max(0.0, used - self.pending)
        self.pending = max(0.0, self.pending - used)
        if self.kind == "od":
            out.on_demand_h += used
            out.cost += used * terms.on_demand_price
        else:
            out.spot_h += used
            out.cost += used * self._prices[self.ids[self.zone]]
        out.finish_h = tick * terms.tick_h + used
        return need <= terms.tick_h + 1e-9

    def _force(self, last: int) -> None:
        """Finish, with on-demand machines, a job that is not done after ``horizon_h``. It misses its deadline, if any.

        ``last``: the number of replayed ticks, after which the on-demand machines start.
        """
        terms, out = self.terms, self.out
        start_up = self.pending if self.kind == "od" else terms.restart_h
        hours = start_up + terms.work_h - self.done
        out.cost += hours * terms.on_demand_price
        out.on_demand_h += hours
        out.finish_h = last * terms.tick_h + hours
        out.missed = terms.deadline_h is not None
