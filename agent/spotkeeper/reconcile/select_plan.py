"""Spot, on-demand or waiting, and where: one decision of a job's course, each step with its reason. Pure.

This is the one rule: ``decide()`` asks it about real zones, ``spotkeeper policy`` and the replay about recorded
ones. Hours everywhere; prices are shares of the on-demand price. What it weighs, and what each part is worth on
recorded markets, is in ``docs/selection.md``.

An hour of work is worth what it costs on-demand, 1. A launch on spot is worth its expected work, less what its
expected life costs, and what moving there costs; one that follows on-demand must also pay for the way back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from spotkeeper.reconcile.select_life import SHAPE, Life, Shape, expected
from spotkeeper.reconcile.select_track import Track, common, factor

USUAL_START_H = 0.2
WHOLE = 1.0  # on-demand's price


class Go(str, Enum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"
    KEEP = "keep"  # what runs now


@dataclass(frozen=True, slots=True)
class Step:
    """What to try; ``why`` in a line for people. ``worth``: on-demand hours that an hour of it saves."""

    go: Go
    zone: str = ""
    why: str = ""
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order, the first that works; none: wait. ``why``: what the order as a whole is for.

    ``patience_h``: so long on-demand is no step, if nothing else changes.
    """

    steps: tuple[Step, ...]
    why: str
    probe: tuple[str, ...] = ()
    patience_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Zone:
    """An offer of spot. ``move_h`` and ``move_price``: what it takes to bring the checkpoint there, less the boot of
    machines that are there already. ``doubt``: by how much the cloud's own guess raises the hazard where little was
    seen; 1 where it says nothing.
    """

    id: str
    price: float
    track: Track
    move_h: float = 0.0
    move_price: float = 0.0
    doubt: float = 1.0


@dataclass(frozen=True, slots=True)
class Course:
    """Where a job is. ``slack_h``: the time that is left, less the work that is; ``planned_h``: what it would be if
    the job had kept to its schedule from the start. ``deadline``: whether there is one. ``excess_h``: what it has cost
    beyond on-demand for the work that is done, in on-demand hours.
    """

    now_h: float
    left_h: float
    slack_h: float
    planned_h: float
    deadline: bool
    restart_h: float
    move_h: float
    attempt_h: float
    tick_h: float
    delay_price: float = 0.0
    running: Go | None = None  # SPOT, ON_DEMAND, or nothing
    age_h: float = 0.0  # since when it runs
    zone: str = ""
    done_h: float = 0.0
    excess_h: float = 0.0

    @property
    def late(self) -> float:
        """Slack that a start on on-demand needs now, and one of spot before it that fails."""
        return 2.0 * self.restart_h + self.move_h


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule. They were fitted on recorded markets; ``docs/selection.md`` says how, and how far
    they hold on others.
    """

    shape: Shape = SHAPE
    wait_left: float = 0.14  # wait while slack is above this share of the work that is left ...
    wait_planned: float = 0.22  # ... and this share of the planned slack ...
    wait_ticks: float = 1.0  # ... and so many ticks
    leave_left: float = 0.04  # leave on-demand only with this share of the work left as slack, and ...
    leave_restarts: float = 2.0  # ... so many restarts
    caution: float = 1.5  # times the hazard that is believed: a life that is expected too long costs a restart
    back: float = 1.5  # restarts that the way back to on-demand is worth
    least: float = -0.25  # an hour: what a launch from idle may cost beyond its work; it also shows how the zone is
    dearer: float = 0.05  # another zone must be cheaper than the one that runs by this, and ...
    better: float = 0.1  # ... better by this an hour
    switch_left: float = 0.1  # slack for it, as a share of the work left
    probe_every_h: float = 0.5  # while on on-demand
    stay_restarts: float = 0.0  # on on-demand at least: where lives are foreseen it gains nothing
    by_age: bool = True  # what follows are parts that can be left out, to see what each is worth
    by_losses: bool = True
    by_restart: bool = True
    switches: bool = True
    hope: float = 0.15  # spot may have lost so much of the whole work, and a restart; then it is on-demand to the end
    gives_up: bool = True  # a job without a deadline goes on-demand where spot is so rare that waiting costs more


RULE = Rule()


def plan(course: Course, zones: tuple[Zone, ...], rule: Rule = RULE) -> Plan:
    """What to do until the next tick."""
    if course.running is Go.SPOT:
        return _on_spot(course, zones, rule)
    if _hopeless(course, rule):
        why = f"on-demand to the end: spot has cost {course.excess_h:.1f} h more than it was worth"
        go = Go.ON_DEMAND if course.running is None else Go.KEEP
        return Plan((Step(go, course.zone, why),), why)
    must = _must(course, len(zones))
    if course.running is Go.ON_DEMAND:
        return _on_demand(course, zones, rule, must)
    return _idle(course, zones, rule, must)


def _must(course: Course, zones: int) -> bool:
    """Whether on-demand has to run now for the deadline to hold, in whole ticks."""
    need = course.left_h + course.late + zones * course.attempt_h
    left = course.slack_h + course.left_h
    return math.ceil(need / course.tick_h - 1e-9) >= math.floor(left / course.tick_h + 1e-9)


def _hopeless(course: Course, rule: Rule) -> bool:
    """Whether spot has lost all that it may: what is left on on-demand ends at a cost that is known."""
    return course.excess_h > rule.hope * (course.done_h + course.left_h) + course.restart_h


def weigh(course: Course, zones: tuple[Zone, ...], rule: Rule) -> list[tuple[float, float, Life, Zone]]:
    """By zone, best first: worth an hour, worth in all, what life is expected, the zone.

    Spot that costs what on-demand costs is no offer.
    """
    shape = rule.shape
    mean = common([zone.track for zone in zones], shape.weight) if rule.by_losses else 1.0
    rows = []
    for zone in zones:
        if not zone.price < WHOLE:
            continue
        scale = factor(zone.track, mean * zone.doubt, shape.weight) if rule.by_losses else 1.0
        age = zone.track.age_h(course.now_h) if rule.by_age else 0.5
        start = (course.restart_h if rule.by_restart else USUAL_START_H) + zone.move_h
        life = expected(shape, age, rule.caution * scale, start, max(course.left_h, 0.01))
        worth = life.work_h - zone.price * life.hours - zone.move_price
        rows.append((worth / life.hours, worth, life, zone))
    rows.sort(key=lambda row: -row[0])
    return rows


def guessed(zone: Zone, mean: float, rule: Rule = RULE) -> tuple[float, float]:
    """What is believed of a zone's losses with the cloud's guess and without it, in times of the usual ones.

    The more was seen there, the nearer the two come to each other. ``mean``: of all zones (``select_track.common``).
    """
    return factor(zone.track, mean * zone.doubt, rule.shape.weight), factor(zone.track, mean, rule.shape.weight)


def _on_spot(course: Course, zones: tuple[Zone, ...], rule: Rule) -> Plan:
    """Stay, unless a cheaper zone is so much cheaper that its start-up, and the risk of a new life, pay.

    Above on-demand's price nothing stays while there is time to leave: nobody knows how long that lasts.
    """
    here = next((zone for zone in zones if zone.id == course.zone), None)
    stay = Step(Go.KEEP, course.zone, "it runs")
    if here is None:
        return Plan((stay,), "spot runs")
    room = 2.0 * course.restart_h + rule.switch_left * course.left_h
    moves = rule.switches and course.slack_h > room and not (_must(course, len(zones)) or _hopeless(course, rule))
    steps = _cheaper(course, here, zones, rule) if moves else []
    if here.price > WHOLE and course.slack_h > course.restart_h + 2.0 * course.tick_h:
        why = f"spot costs {here.price:.0%} of on-demand"
        return Plan((*steps, Step(Go.ON_DEMAND, "", why)), why)
    return Plan((*steps, stay), "a cheaper zone is worth a start" if steps else "spot runs")


def _cheaper(course: Course, here: Zone, zones: tuple[Zone, ...], rule: Rule) -> list[Step]:
    """Zones that are worth leaving this one for; where it costs more than on-demand, on-demand is what they beat."""
    if all(zone.price >= here.price - rule.dearer for zone in zones):
        return []
    saves = max(0.0, WHOLE - here.price)
    return [
        Step(Go.SPOT, zone.id, f"{zone.price:.0%} of on-demand instead of {here.price:.0%}", rate)
        for rate, _, _, zone in weigh(course, zones, rule)
        if zone.price < here.price - rule.dearer and rate > saves + rule.better
    ]


def _on_demand(course: Course, zones: tuple[Zone, ...], rule: Rule, must: bool) -> Plan:
    """A bout of on-demand ends when a zone promises more than both ways cost, and there is time for them."""
    keep = Step(Go.KEEP, course.zone, "on-demand runs")
    room = 2.0 * course.restart_h
    if must or course.slack_h <= room:
        return Plan((keep,), _pressed(course))
    steps: list[Step] = []
    stayed = course.age_h >= rule.stay_restarts * course.restart_h
    if stayed and course.slack_h > rule.leave_restarts * course.restart_h + rule.leave_left * course.left_h:
        steps = [
            Step(Go.SPOT, zone.id, _promise(life, zone), rate)
            for rate, worth, life, zone in weigh(course, zones, rule)
            if worth > rule.back * course.restart_h
        ]
    asked = {step.zone for step in steps}
    probe = tuple(
        zone.id
        for zone in zones
        if zone.id not in asked and course.now_h - zone.track.seen_h >= rule.probe_every_h - 1e-9
    )
    why = "spot promises more than both ways cost" if steps else "no zone promises more than both ways cost"
    return Plan((*steps, keep), why, probe)


def _idle(course: Course, zones: tuple[Zone, ...], rule: Rule, must: bool) -> Plan:
    if must:
        why = _pressed(course)
        return Plan((Step(Go.ON_DEMAND, "", why),), why)
    steps = [
        Step(Go.SPOT, zone.id, _promise(life, zone), rate)
        for rate, _, life, zone in weigh(course, zones, rule)
        if rate > rule.least
    ]
    patience, why = _patience(course, zones, rule)
    if patience <= 0:
        return Plan((*steps, Step(Go.ON_DEMAND, "", why)), why)
    asked = {step.zone for step in steps}
    return Plan(tuple(steps), why, tuple(zone.id for zone in zones if zone.id not in asked), patience)


def _patience(course: Course, zones: tuple[Zone, ...], rule: Rule) -> tuple[float, str]:
    """How long to wait where no spot is to be had, hours, and why (not)."""
    need = rule.wait_ticks * course.tick_h + rule.wait_left * course.left_h + rule.wait_planned * course.planned_h
    if course.slack_h <= need:
        return 0.0, f"on-demand if no spot is to be had: {course.slack_h:.1f} h of slack, {need:.1f} h are kept"
    if not course.deadline and rule.gives_up and zones:
        best = max(zones, key=lambda zone: zone.track.share)
        share = best.track.share
        if best.price + course.delay_price * (1.0 - share) / share > 1.0:
            return 0.0, f"on-demand if no spot is to be had: the best zone has it {share:.0%} of the time"
    return course.slack_h - need, f"wait for spot: {course.slack_h:.1f} h of slack, {need:.1f} h are kept"


def _pressed(course: Course) -> str:
    late_h = course.restart_h - course.slack_h
    if late_h > 0:
        return f"on-demand, and the deadline is missed by {late_h:.1f} h all the same"
    return f"on-demand for the deadline: {course.slack_h:.1f} h are left beside the work"


def _promise(life: Life, zone: Zone) -> str:
    return f"{zone.price:.0%} of on-demand, expected to last {life.hours:.1f} h"
