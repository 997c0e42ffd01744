"""The rule that chooses machines, on recorded markets: its distance from the omniscient optimum, and its cost.

``SPOTKEEPER_MARKETS`` names a folder of recordings (``*.json``); the default is the shipped market alone, and the
figures say so. ``python -m bench.market.policy FOLDER`` prints the table of ``docs/selection.md``.

    way    (on-demand - cost) / (on-demand - optimum), summed over cases
    score  the same after one more whole on-demand run for each missed deadline
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.market._cases import draw, optimum
from bench.market._rules import Greedy, OnDemand, SpotOnly, Tuned, Uniform
from spotkeeper.contract.policy import PolicyAnswer, Start, Tick
from spotkeeper.reconcile.select.player import JOB, Player, market
from spotkeeper.reconcile.select.rule import RULE, Rule
from spotkeeper.replay.model import Case, ReplayPolicy, play
from spotkeeper.replay.recording import SHIPPED, read_folder
from spotkeeper.report.forecast.player import Chooser, Shop

STARTS = 24  # a recording
GOAL, TICK_MS = 0.875, 2.0
PUBLISHED = 0.858  # the best known rule on the development markets
SHIPPED_GOAL = 0.75
SEEDS = ("", "b")  # of the table

WITHOUT: dict[str, Rule] = {
    "the shipped rule": RULE,
    "without age (every zone half an hour old)": replace(RULE, by_age=False),
    "without losses seen": replace(RULE, by_losses=False),
    "without restart time (12 min for all)": replace(RULE, by_restart=False),
    "without caution (the hazard as believed)": replace(RULE, caution=1.0),
    "without the price of the way back": replace(RULE, back=0.0),
    "without probes": replace(RULE, probe_every_h=1e9),
    "without moves from dear zones": replace(RULE, switches=False),
    "without waiting": replace(RULE, wait_left=1e9),
    "waiting to the end": replace(RULE, wait_left=0.0, wait_planned=0.0),
    "without giving up on rare spot (no deadline)": replace(RULE, gives_up=False),
    "without an end to what spot may lose": replace(RULE, hope=1e9),
    "no start at a small loss": replace(RULE, least=0.0),
    "with six restarts' stay on on-demand": replace(RULE, stay_restarts=6.0),
}
KNOWN: dict[str, Callable[[], ReplayPolicy]] = {
    "on-demand": OnDemand,
    "spot only, home zone, no safety net": SpotOnly,
    "greedy, one zone (NSDI'24)": Greedy,
    "Uniform Progress, one zone (NSDI'24)": Uniform,
    "Uniform Progress, all zones": lambda: Uniform(all_zones=True),
    "15 tuned lines": lambda: Tuned(all_zones=True),
}


@dataclass
class Sum:
    """Sum over cases, in on-demand hours."""

    cost: float = 0.0
    best: float = 0.0
    whole: float = 0.0
    fines: float = 0.0
    missed: int = 0
    cases: int = 0

    @property
    def way(self) -> float:
        return (self.whole - self.cost) / (self.whole - self.best)

    @property
    def score(self) -> float:
        return (self.whole - self.cost - self.fines) / (self.whole - self.best)

    def add(self, case: Case, best: float, policy: ReplayPolicy) -> None:
        out = play(case, policy)
        self.cost += out.cost
        self.best += best
        self.whole += case.on_demand_only
        self.fines += case.on_demand_only * out.missed
        self.missed += out.missed
        self.cases += 1


class Timed(Player):
    """The same, with each tick's processor time in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.took: list[float] = []

    def tick(self, tick: Tick) -> PolicyAnswer:
        began = time.process_time()
        answer = super().tick(tick)
        self.took.append(time.process_time() - began)
        return answer


class Job(Chooser):
    """As a job plays it: with what ``decide()`` adds to ``select()``."""

    def __init__(self) -> None:
        pass

    def start(self, start: Start) -> None:
        stack = market(start.zones, start.job.on_demand_price)
        super().__init__(JOB, Shop(stack, stack.pools[0], on_demand=True))
        super().start(start)


def cases(folder: Path, seed: str = "") -> list[tuple[Case, float]]:
    return [(case, optimum(case)) for recording in read_folder(folder) for case in draw(recording, STARTS, seed)]


def total(of: list[tuple[Case, float]], policy: ReplayPolicy) -> Sum:
    out = Sum()
    for case, best in of:
        out.add(case, best, policy)
    return out


def figures() -> list[dict[str, object]]:
    named = os.environ.get("SPOTKEEPER_MARKETS")
    drawn, player = cases(Path(named) if named else SHIPPED), Timed()
    ours, tuned = total(drawn, player), total(drawn, Tuned(all_zones=True))
    kind, goal = ("development", GOAL) if named else ("h100", SHIPPED_GOAL)
    tick_ms = sorted(player.took)[int(0.999 * len(player.took))] * 1000.0
    against = f"{tuned.score:.3f} for 15 tuned lines, {ours.cases} cases"
    return [
        _figure(f"policy.{kind}_score", round(ours.score, 4), "", f">= {goal}", ours.score >= goal, against),
        _figure(f"policy.{kind}_missed", ours.missed, "", "= 0", ours.missed == 0, f"{ours.cases} cases"),
        _figure("policy.tick_ms", round(tick_ms, 3), "ms", f"<= {TICK_MS:g}", tick_ms <= TICK_MS, "of 999 in 1000"),
    ]


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds, "against": against}


def main(folder: Path) -> None:
    """Print the table line by line: it takes minutes."""
    drawn = [case for seed in SEEDS for case in cases(folder, seed)]
    print(f"{len(drawn)} cases; optimum {sum(best for _, best in drawn) / sum(c.on_demand_only for c, _ in drawn):.3f}")
    rows: list[tuple[str, ReplayPolicy]] = [(name, make()) for name, make in KNOWN.items()]
    rows += [(name, Player(rule)) for name, rule in WITHOUT.items()]
    for name, policy in rows:
        out = total(drawn, policy)
        print(f"| {name} | {out.cost / out.whole:.3f} | {out.way:.3f} | {out.missed} | {out.score:.3f} |", flush=True)
    due = [(case, best) for case, best in drawn if case.terms.deadline_h is not None]
    for name, policy in (("the rule, with a deadline", Player()), ("a job, with a deadline", Job())):
        out = total(due, policy)
        print(f"| {name} | {out.cost / out.whole:.3f} | {out.way:.3f} | {out.missed} | {out.score:.3f} |", flush=True)
    for name in dict.fromkeys(case.recording.name for case, _ in drawn):
        some = [(case, best) for case, best in drawn if case.recording.name == name]
        print(f"| {name} | {total(some, Tuned(all_zones=True)).score:.3f} | {total(some, Player()).score:.3f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
