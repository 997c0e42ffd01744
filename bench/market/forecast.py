"""How often forecasts are right: 80 % bands on markets and hours that were left out; and the time of one forecast.

``SPOTKEEPER_MARKETS`` names a folder of recordings (``*.json``); the default is the shipped one alone.
``python -m bench.market.forecast FOLDER`` prints the result for each left-out region.

    markets   forecast each recording from all others (a single one: each region from its other regions)
    hours     forecast the second half of each recording from the first halves, its own region as the job's own
    shipped   with a folder: every other recording from the shipped one alone, as most stacks have it

The figure is the share of outcomes within their bands (cost, end, preemptions, share on spot), each left-out region
weighing the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.stack import PoolState, Price, StackState
from spotkeeper.replay.model import PlayedOutcome
from spotkeeper.replay.recording import SHIPPED, read_folder
from spotkeeper.report.forecast.forecast import cost_usd, outlook, spot_share
from spotkeeper.report.forecast.player import Shop
from spotkeeper.report.forecast.recordings import RecordingPart, Task, has_spot, outcomes, parts

ROOT = Path(__file__).resolve().parents[2]
REPLAYS = 12  # of a task in a part
LOW, HIGH, SECONDS = 0.7, 0.9, 20.0
RESTART_H = 1 / 6
PROCESSORS = 2


@dataclass(frozen=True)
class Held:
    """Shares of outcomes within bands, by what was left out, where, and quantity."""

    way: str
    where: str
    quantity: str
    share: float


def task(nodes: int, zones: int, work_h: float, deadline: float | None, spot: float, *, demand: bool = True) -> Task:
    """``deadline``: multiple of the work. On-demand costs 1."""
    names = tuple(f"zone-{letter}" for letter in "abcd"[:zones])
    pool = PoolState(
        name="pool",
        kind="spot",
        machine_type="machine",
        zones=names,
        nproc=1,
        max_machines=nodes,
        max_on_demand=nodes if demand else 0,
        disk_gb=1,
        disk_type="disk",
        prices=dict.fromkeys(names, Price(1.0, spot)),
    )
    stack = StackState("stack", "gcp", "", "zone", "", (pool,))
    spec = JobSpec("job", ("train.py",), nodes, deadline="1h" if deadline else None)
    due = None if deadline is None else deadline * work_h
    return Task(spec, Shop(stack, pool, demand), (spot,) * zones, 1.0, work_h, RESTART_H, due)


TASKS = (
    task(1, 1, 24.0, None, 0.3),
    task(1, 3, 24.0, 1.3, 0.3),
    task(16, 3, 12.0, None, 0.4),
    task(1, 2, 48.0, 1.5, 0.5),
    task(1, 2, 24.0, None, 0.3, demand=False),
)
Played = dict[str, tuple[PlayedOutcome, ...]]


def played(task: Task, found: Sequence[RecordingPart]) -> Played:
    return {part.name: tuple(outcomes(task, part, REPLAYS)) for part in found}


def coverage(folder: Path | None) -> Iterator[Held]:
    shipped = parts(read_folder(SHIPPED))
    every = parts(read_folder(folder)) if folder is not None else shipped
    home = {part.name for part in shipped}
    cut = [both for part in every if (both := halves(part)) is not None]
    for task in TASKS:
        whole = played(task, every)
        yield from _markets(task, whole)
        if others := sorted(set(whole) - home):
            known = list(played(task, shipped).values())
            for name in others:
                yield from held("shipped", name, task, whole[name], known)
        before, after = (played(task, [both[half] for both in cut]) for half in (0, 1))
        for name, truth in after.items():
            elsewhere = [market for other, market in before.items() if other != name]
            yield from held("hours", name, task, truth, elsewhere, (before[name],))


def _markets(task: Task, whole: Played) -> Iterator[Held]:
    """The parts; a part's name begins with its recording's."""
    recordings = {name.partition(" ")[0] for name in whole}

    def alike(name: str, other: str) -> bool:
        return name == other if len(recordings) == 1 else name.partition(" ")[0] == other.partition(" ")[0]

    for name, truth in whole.items():
        known = [market for other, market in whole.items() if not alike(name, other)]
        yield from held("markets", name, task, truth, known)


def held(
    way: str,
    where: str,
    task: Task,
    truth: Sequence[PlayedOutcome],
    others: Sequence[Sequence[PlayedOutcome]],
    own: Sequence[Sequence[PlayedOutcome]] = (),
) -> Iterator[Held]:
    told = outlook(task, others, own)
    for name, band, value in (
        ("cost", told.usd, lambda out: cost_usd(task, out)),
        ("end", told.finish_h, lambda out: out.finish_h),
        ("preemptions", told.preemptions, lambda out: out.preemptions),
        ("spot", told.spot_share, spot_share),
    ):
        yield Held(way, where, name, mean(band.holds(value(out)) for out in truth))


def seconds() -> tuple[float, float]:
    """Time of one forecast as a command, on two processors: wall time and processor time."""
    job = str(ROOT / "examples" / "gpt" / "job.yaml")
    code = f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{PROCESSORS}])\n"
    code += f"from spotkeeper.cli.main import main; main(['forecast', {job!r}, '--work', '100h', '--json'])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")}
    began, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=environment, cwd="/")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, used


def figures() -> list[dict[str, object]]:
    named = os.environ.get("SPOTKEEPER_MARKETS")
    found = list(coverage(Path(named) if named else None))
    places = len({one.where for one in found})
    against = f"0.8, {places} regions left out, {len(TASKS)} jobs"
    rows = [_coverage("forecast.band_coverage", [one for one in found if one.way != "shipped"], against)]
    for way in dict.fromkeys(one.way for one in found):
        rows.append(_coverage(f"forecast.band_coverage_{way}", [one for one in found if one.way == way], against))
    for quantity in dict.fromkeys(one.quantity for one in found):
        some = [one for one in found if one.quantity == quantity and one.way != "shipped"]
        rows.append(_coverage(f"forecast.band_coverage_{quantity}", some, against))
    took, used = seconds()
    against = f"100 h of work; {used:.1f} s of {PROCESSORS} processors"
    return [
        *rows,
        _figure("forecast.seconds", round(took, 1), "s", f"<= {SECONDS:g}", took <= SECONDS, against),
    ]


def _coverage(name: str, found: Sequence[Held], against: str) -> dict[str, object]:
    share = mean(one.share for one in found)
    return _figure(name, round(share, 3), "", f"{LOW}-{HIGH}", LOW <= share <= HIGH, against)


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds, "against": against}


def main(folder: Path | None) -> None:
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in coverage(folder):
        shares[one.way, one.where].append(one.share)
        shares[one.way, one.quantity].append(one.share)
        shares[one.way, "all"].append(one.share)
    for (way, what), found in sorted(shares.items()):
        print(f"{way:8} {what:45} {mean(found):.2f}")


def halves(part: RecordingPart) -> tuple[RecordingPart, RecordingPart] | None:
    """Split a part into the first and second half of its hours; None if one of them never has spot capacity."""
    middle = part.recording.ticks // 2
    both = _cut(part, slice(0, middle)), _cut(part, slice(middle, None))
    spot = all(any(has_spot(half.recording, zone) for zone in range(len(half.recording.zones))) for half in both)
    return both if spot else None


def _cut(part: RecordingPart, ticks: slice) -> RecordingPart:
    zones = tuple(
        replace(zone, capacity=zone.capacity[ticks], price=zone.price[ticks]) for zone in part.recording.zones
    )
    return RecordingPart(part.name, replace(part.recording, zones=zones))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
