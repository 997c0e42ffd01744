"""The selection rule: chooses spot, on-demand or waiting, and the zone, and gives its reasons. Pure.

``decide()`` applies the rule to real zones, ``spotkeeper policy`` and the replay to recorded ones. All times are hours;
prices are shares of the on-demand price, so an hour of work is worth 1. A launch on spot is worth its expected work,
less the cost of its expected life and of the move. If the job runs on-demand, the launch must also pay for the later
return to on-demand. ``docs/selection.md`` explains the parts of the rule and what each part saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from spotkeeper.reconcile.select.zone_history import SHAPE, Expected, HazardShape, Track, common, expected, factor

USUAL_START_H = 0.2
WHOLE = 1.0  # the price of on-demand: prices are shares of it


class Go(str, Enum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"
    KEEP = "keep"  # keep the machine that runs


@dataclass(frozen=True, slots=True)
class Proposal:
    """One step of a plan. ``why``: the reason in one line."""

    go: Go
    zone: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order of preference; no step means wait. ``why``: the reason for the order as a whole.

    ``probe``: zones worth probing. ``patience_h``: how many hours on-demand stays out of the steps if nothing changes.
    """

    steps: tuple[Proposal, ...]
    why: str
    probe: tuple[str, ...] = ()
    patience_h: float = 0.0


@dataclass(frozen=True, slots=True)
class SpotZone:
    """A zone with an offer of spot.

    Attributes:
        move_h, move_price: time and cost of moving the checkpoint to the zone. If machines have already booted in the
        zone, ``move_h`` is less by their boot time.
        hazard_factor: the factor, 0.5 to 2, by which the cloud's own estimate changes the hazard; 1: no estimate.
    """

    id: str
    price: float
    track: Track
    move_h: float = 0.0
    move_price: float = 0.0
    hazard_factor: float = 1.0


@dataclass(frozen=True)
class Work:
    """A job's progress, in hours.

    Attributes:
        left_h, done_h: the work left and the work done.
        slack_h: the time until the deadline, less the work left; None: no deadline.
        planned_h: the slack that the job would have now if it were on schedule: the initial slack in proportion to the
        work left.
        excess_h: what the job has cost beyond the same work on-demand, in on-demand hours.
        delay_price: the cost of an hour of waiting, in on-demand hours; None: a deadline limits the slack.
    """

    left_h: float
    slack_h: float | None
    planned_h: float = 0.0
    done_h: float = 0.0
    excess_h: float = 0.0
    delay_price: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobState(Work):
    """A job's progress, the machine on which it runs, and the delays that the rule allows for, in hours.

    Attributes:
        now_h: the present time, on the clock of the zones' tracks.
        restart_h: how long a start takes, from the request for a machine to the next step.
        move_h: how much longer than ``restart_h`` the job waits for a machine that never boots.
        attempt_h: the delay that a refused offer causes.
        tick_h: the longest time until the rule is applied again.
        running: SPOT or ON_DEMAND; None: no machine runs.
        age_h: how long the machine has run.
        zone: the key of the machine's offer, for spot the zone's ``SpotZone.id``; "" if no machine runs.
    """

    slack_h: float
    now_h: float
    restart_h: float
    move_h: float
    attempt_h: float
    tick_h: float
    running: Go | None = None
    age_h: float = 0.0
    zone: str = ""

    @property
    def late(self) -> float:
        """Return the hours that must be left before the deadline so that a start on spot may fail.

        The job must then still be able to start on an on-demand machine.
        """
        return 2.0 * self.restart_h + self.move_h


@dataclass(frozen=True)
class Rule:
    """The parameters, fitted on recorded markets and tested on others (``docs/selection.md``)."""

    shape: HazardShape = SHAPE
    wait_left: float = 0.14  # wait while the slack exceeds this share of the work left ...
    wait_planned: float = 0.22  # ... plus this share of the planned slack ...
    wait_ticks: float = 1.0  # ... plus this many ticks
    leave_left: float = 0.04  # leave on-demand only with this share of the work left as slack ...
    leave_restarts: float = 2.0  # ... plus this many restarts
    caution: float = 1.5  # multiplies the estimated hazard: a life estimated too long costs a restart
    back: float = 1.5  # a later return to on-demand costs this many restarts
    least: float = -0.25  # worth an hour from which an idle job launches; a launch also observes the zone
    cheaper_by: float = 0.05  # another zone must be cheaper than the present zone by this ...
    better: float = 0.1  # ... and worth more by this an hour
    switch_left: float = 0.1  # slack required for that, as a share of the work left
    probe_every_h: float = 0.5  # while the job runs on-demand
    stay_restarts: float = 0.0  # least stay on-demand; useless if lives are predicted
    by_age: bool = True  # these switches turn parts of the rule off, to measure what each is worth
    by_losses: bool = True
    by_restart: bool = True
    switches: bool = True
    hope: float = 0.15  # spot may lose this share of the whole work, plus a restart; then on-demand to the end
    gives_up: bool = True  # without a deadline, go on-demand where spot is so rare that waiting costs more


RULE = Rule()


def plan(job: JobState, zones: tuple[SpotZone, ...], rule: Rule = RULE) -> Plan:
    """Return what to do until the next tick."""
    if job.running is Go.SPOT:
        return _on_spot(job, zones, rule)
    if _hopeless(job, rule):
        why = f"on-demand to the end: spot has cost {job.excess_h:.1f} on-demand hours more than it was worth"
        go = Go.ON_DEMAND if job.running is None else Go.KEEP
        return Plan((Proposal(go, job.zone, why),), why)
    must = _must(job, len(zones))
    if job.running is Go.ON_DEMAND:
        return _on_demand(job, zones, rule, must)
    return _idle(job, zones, rule, must)


def _must(job: JobState, zones: int) -> bool:
    """Whether on-demand has to start in this tick, since the next tick would be too late for the deadline."""
    need = job.left_h + job.late + zones * job.attempt_h
    left = job.slack_h + job.left_h
    return math.ceil(need / job.tick_h - 1e-9) >= math.floor(left / job.tick_h + 1e-9)


def _hopeless(job: JobState, rule: Rule) -> bool:
    """Whether the job has cost so much more than on-demand that the rest of it must run on-demand (``Rule.hope``)."""
    return job.excess_h > rule.hope * (job.done_h + job.left_h) + job.restart_h


def weigh(job: JobState, zones: tuple[SpotZone, ...], rule: Rule) -> list[tuple[float, float, Expected, SpotZone]]:
    """Return (worth per hour, worth in total, expected life, zone), best first, for zones cheaper than on-demand.

    What moving there costs counts, spread over the work left.
    """
    shape = rule.shape
    mean = common([zone.track for zone in zones], shape.weight) if rule.by_losses else 1.0
    rows = []
    for zone in zones:
        if not zone.price + zone.move_price / max(job.left_h, 0.01) < WHOLE:
            continue
        scale = factor(zone.track, mean * zone.hazard_factor, shape.weight) if rule.by_losses else 1.0
        age = zone.track.age_h(job.now_h) if rule.by_age else 0.5
        start = (job.restart_h if rule.by_restart else USUAL_START_H) + zone.move_h
        life = expected(shape, age, rule.caution * scale, start, max(job.left_h, 0.01))
        worth = life.work_h - zone.price * life.hours - zone.move_price
        rows.append((worth / life.hours, worth, life, zone))
    rows.sort(key=lambda row: -row[0])
    return rows


def guessed(zone: SpotZone, mean: float, rule: Rule = RULE) -> tuple[float, float]:
    """Return a zone's expected losses with and without the cloud's estimate, as multiples of the usual losses.

    The more observations the zone has, the less the two differ. ``mean``: the multiple for all of the job's zones
    together, as observed (``zone_history.common``).
    """
    return factor(zone.track, mean * zone.hazard_factor, rule.shape.weight), factor(zone.track, mean, rule.shape.weight)


def _on_spot(job: JobState, zones: tuple[SpotZone, ...], rule: Rule) -> Plan:
    """Plan for a job on spot: stay, unless another zone saves more than the cost and risk of a start there.

    If spot here costs more than on-demand, leave it while there is time for a start, since the price could stay high.
    """
    here = next((zone for zone in zones if zone.id == job.zone), None)
    stay = Proposal(Go.KEEP, job.zone, "spot runs")
    if here is None:
        return Plan((stay,), "spot runs")
    margin = 2.0 * job.restart_h + rule.switch_left * job.left_h
    moves = rule.switches and job.slack_h > margin and not (_must(job, len(zones)) or _hopeless(job, rule))
    steps = _cheaper(job, here, zones, rule) if moves else []
    if here.price > WHOLE and job.slack_h > job.restart_h + 2.0 * job.tick_h:
        why = f"spot costs {_percent(here.price)} of on-demand"
        return Plan((*steps, Proposal(Go.ON_DEMAND, "", why)), why)
    return Plan((*steps, stay), "a cheaper zone is worth the move" if steps else "spot runs")


def _cheaper(job: JobState, here: SpotZone, zones: tuple[SpotZone, ...], rule: Rule) -> list[Proposal]:
    """Propose zones that are worth a move. They must be better than the present zone, and better than on-demand."""
    if all(zone.price >= here.price - rule.cheaper_by for zone in zones):
        return []
    saves = max(0.0, WHOLE - here.price)
    return [
        Proposal(Go.SPOT, zone.id, f"{_percent(zone.price)} of the on-demand price instead of {_percent(here.price)}")
        for rate, _, _, zone in weigh(job, zones, rule)
        if zone.price < here.price - rule.cheaper_by and rate > saves + rule.better
    ]


def _on_demand(job: JobState, zones: tuple[SpotZone, ...], rule: Rule, must: bool) -> Plan:
    """Plan for a job on on-demand: stay until spot in a zone is worth the move to it and the later return.

    ``must``: whether the deadline forbids leaving on-demand (:func:`_must`).
    """
    keep = Proposal(Go.KEEP, job.zone, "on-demand runs")
    margin = 2.0 * job.restart_h
    if must or job.slack_h <= margin:
        return Plan((keep,), _pressed(job))
    steps: list[Proposal] = []
    stayed = job.age_h >= rule.stay_restarts * job.restart_h
    if stayed and job.slack_h > rule.leave_restarts * job.restart_h + rule.leave_left * job.left_h:
        steps = [
            Proposal(Go.SPOT, zone.id, _promise(life, zone))
            for _, worth, life, zone in weigh(job, zones, rule)
            if worth > rule.back * job.restart_h
        ]
    asked = {step.zone for step in steps}
    probe = tuple(
        zone.id for zone in zones if zone.id not in asked and job.now_h - zone.track.seen_h >= rule.probe_every_h - 1e-9
    )
    why = "spot is worth the move and the return" if steps else "no zone is worth the move and the return"
    return Plan((*steps, keep), why, probe)


def _idle(job: JobState, zones: tuple[SpotZone, ...], rule: Rule, must: bool) -> Plan:
    if must:
        why = _pressed(job)
        return Plan((Proposal(Go.ON_DEMAND, "", why),), why)
    steps = [
        Proposal(Go.SPOT, zone.id, _promise(life, zone))
        for rate, _, life, zone in weigh(job, zones, rule)
        if rate > rule.least
    ]
    patience, why = _patience(job, zones, rule)
    if patience <= 0:
        return Plan((*steps, Proposal(Go.ON_DEMAND, "", why)), why)
    asked = {step.zone for step in steps}
    return Plan(tuple(steps), why, tuple(zone.id for zone in zones if zone.id not in asked), patience)


def _patience(job: JobState, zones: tuple[SpotZone, ...], rule: Rule) -> tuple[float, str]:
    need = rule.wait_ticks * job.tick_h + rule.wait_left * job.left_h + rule.wait_planned * job.planned_h
    if job.slack_h <= need:
        return 0.0, f"on-demand if no spot is available: waiting needs {need:.1f} h of slack, {job.slack_h:.1f} h left"
    if job.delay_price is not None and rule.gives_up and zones:
        best = max(zones, key=lambda zone: zone.track.share)
        share = best.track.share
        if best.price + job.delay_price * (1.0 - share) / share > 1.0:
            return 0.0, f"on-demand if no spot is available: the best zone has spot only {_percent(share)} of the time"
    return job.slack_h - need, f"wait for spot: waiting needs {need:.1f} h of slack, {job.slack_h:.1f} h left"


def _pressed(job: JobState) -> str:
    late_h = job.restart_h - job.slack_h
    if late_h > 0:
        return f"on-demand; the deadline will be missed by {late_h:.1f} h"
    return f"on-demand to meet the deadline, which leaves only {job.slack_h:.1f} h more than the work needs"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _promise(life: Expected, zone: SpotZone) -> str:
    return f"{_percent(zone.price)} of the on-demand price, expected to last {life.hours:.1f} h"
