"""A job's forecast: bands, the rule replayed on the shipped market, own history, what is assumed. Virtual time."""

from __future__ import annotations

from dataclasses import replace as with_
from statistics import mean
from typing import Any

import pytest
from msgspec.structs import replace

from bench.market.forecast import halves
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, Observation
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from spotkeeper.replay.model import Case, PlayedOutcome, play
from spotkeeper.replay.recording import SHIPPED, RecordedZone, Recording, read_folder
from spotkeeper.report.forecast.forecast import (
    Band,
    Library,
    Values,
    band,
    cost_usd,
    forecast,
    markdown,
    outlook,
    replays,
    rows,
    weigh,
)
from spotkeeper.report.forecast.player import Chooser, Shop
from spotkeeper.report.forecast.recordings import RecordingPart, Task, outcomes, own_recording, parts

ZONES = ("r1-a", "r1-b")
RESTART_H = 1 / 6


def task(*, on_demand: int = 100, zones: int = 2, work_h: float = 6.0, deadline_h: float | None = None,
         spot: float = 1.0, **spec: Any) -> Task:  # fmt: skip
    names = ZONES[:zones]
    pool = PoolState(
        name="burst", kind="spot", machine_type="m", zones=names, nproc=1, max_machines=100, max_on_demand=on_demand,
        disk_gb=1, disk_type="d", prices=dict.fromkeys(names, Price(4.0, spot)),
    )  # fmt: skip
    job = JobSpec(**{"name": "j", "command": ("train.py",), "deadline": "1h" if deadline_h else None, **spec})
    stack = StackState("s", "gcp", "", "r1", "", (pool,))
    return Task(job, Shop.of(job, stack, pool), (spot,) * zones, 4.0, work_h, RESTART_H, deadline_h)


def part(*zones: str, hours: float = 1.0, gang: int = 1) -> RecordingPart:
    """``"1101"`` by zone: up or not, by tick."""
    series = [tuple(int(mark) * gang for mark in zone) for zone in zones]
    made = tuple(RecordedZone(f"r1-{n}", "r1", up, (0.25,) * len(up)) for n, up in enumerate(series))
    return RecordingPart("c.m r1", Recording("c", "m", hours, gang, made))


def one(job: Task, *zones: str) -> Any:
    return next(iter(outcomes(job, part(*zones), 1)))


# -- bands


def test_a_band_is_the_shortest_with_enough_weight() -> None:
    values = Values(tuple((float(value), 0.1) for value in (*range(9), 100)), 0.8)
    found = band(values)
    assert (found.low, found.high) == (0.0, 7.0)
    assert found.mid == pytest.approx(13.6), "one outcome puts the mean outside, and does not stretch the range"
    whole = band(replace(values, level=1.0))
    assert (whole.low, whole.high) == (0.0, 100.0)
    crowd = weigh([[5.0] * 1000, [1.0], [2.0]])
    assert band(crowd).mid == pytest.approx(8 / 3)


def test_few_markets_make_wider_bands_and_a_known_one_narrower() -> None:
    few, many = weigh([[0.0]] * 2), weigh([[0.0]] * 50)
    assert few.level == 1.0
    assert 0.8 < many.level < 0.82
    assert weigh([[0.0]] * 2, [[1.0]]).level == 0.8
    assert band(weigh([[0.0], [4.0]], [[2.0] * 3])).mid == 2.0  # its own market counts as much as both others


def test_a_band_needs_outcomes() -> None:
    with pytest.raises(ValueError, match="outcomes"):
        band(weigh([]))


# -- the replayed rule


def test_uninterrupted_spot_costs_its_start_and_work() -> None:
    out = one(task(nodes=3), "1" * 30, "1" * 30)
    assert (out.preemptions, out.on_demand_h) == (0, 0)
    assert cost_usd(task(nodes=3), out) == pytest.approx(3 * (6.0 + RESTART_H))


def test_reserved_machines_cost_nothing_in_a_forecast() -> None:
    library = Library((part("1" * 30, "1" * 30),))
    some, all_ = (forecast(with_(task(nodes=3), reserved=count), library) for count in (1, 3))
    assert some.expected.usd.mid == pytest.approx(2 * (6.0 + RESTART_H))
    assert some.on_demand.usd.mid == pytest.approx(2 * 4.0 * (6.0 + RESTART_H)), "the same machines"
    assert (all_.expected.usd.mid, all_.expected.preemptions.mid, all_.replays, all_.runs) == (0.0, 0.0, 0, True)
    assert all_.expected.finish_h.mid == pytest.approx(6.0 + RESTART_H)
    assert "3 x m, 6.0 h of training in reserved capacity" in markdown(all_)
    mix = replace(all_, machine_type="m and n")
    assert "3 machines (m and n), 6.0 h of training" in markdown(mix), "not 3 of each"


def test_with_rare_spot_the_job_runs_on_demand() -> None:
    rare = Recording("c", "m", 0.1, 1, (RecordedZone("r1-0", "r1", (0,) * 150 + (1,) * 10, (0.25,) * 160),))
    (out,) = outcomes(task(zones=1), RecordingPart("x", rare), 1)
    assert out.spot_h == 0
    assert out.cost == pytest.approx(4.0 * (6.0 + RESTART_H), rel=0.01)  # refusals beside it


def test_a_gang_that_may_not_be_on_demand_waits_and_moves_to_the_other_zone() -> None:
    out = one(task(on_demand=0), "1111" + "0" * 16, "0000" + "1" * 16)
    assert out.on_demand_h == 0
    assert (out.preemptions > 0) == (out.launches > 1)


def abroad(move_usd: float) -> Task:
    """A job of two machines whose second zone is in another region."""
    made = task(on_demand=0, nodes=2, regions=("r1", "r2"))
    zones = ("r1-a", "r2-a")
    pool = replace(made.shop.pool, zones=zones, prices=dict.fromkeys(zones, Price(4.0, 1.0)))
    stack = replace(made.shop.stack, pools=(pool,), regions=("r1", "r2"))
    return with_(made, shop=Shop.of(made.spec, stack, pool), move_usd=move_usd)


def test_a_move_to_another_region_pays_its_egress_once() -> None:
    """It loses its zone, goes abroad, and stays there. Before the first launch there is nothing to bring."""
    for first, paid in (("110000000000", {0.0, 0.25}), ("000000000000", {0.0})):
        ran = [outcomes(abroad(usd), part(first, "1" * 12), 12) for usd in (1e-9, 0.25)]
        for free, out in (pairs := list(zip(*ran, strict=True))):
            assert out.cost - free.cost == pytest.approx(out.egress)
        assert {round(out.egress, 3) for _, out in pairs} == paid


def test_a_first_start_pays_for_the_jobs_data_unless_it_lies_there() -> None:
    """Spot costs a quarter of on-demand in both regions, so the job starts where its data is, if it can."""
    dear = with_(abroad(1e-9), start_usd={"r2": 2.0})
    for zones, paid in ((("1" * 12, "1" * 12), {0.0}), (("0" * 12, "1" * 12), {0.0, 2.0})):
        ran = [outcomes(made, part(*zones), 12) for made in (abroad(1e-9), dear)]
        for free, out in (pairs := list(zip(*ran, strict=True))):
            assert out.cost == pytest.approx(free.cost + out.egress, abs=1e-6)
        assert {round(out.egress, 3) for _, out in pairs} == paid
    made = forecast(with_(dear, start_usd={"r1": 0.5, "r2": 2.0}), Library((part("1" * 12, "1" * 12),)))
    assert made.on_demand.usd.mid == pytest.approx(2 * (4.0 * (6.0 + RESTART_H) + 0.5))
    assert {name: whole for name, _, _, whole in rows(made)}["of it egress"] == "$1.00"
    assert "egress: a first start transfers the job's data: $1.00 in r1, $4.00 in r2" in made.assumptions


def test_a_forecast_shows_egress_as_a_part_of_the_cost() -> None:
    library = Library((part("110000000000", "1" * 12),))
    made = forecast(abroad(0.25), library)
    found = {name: (mid, whole) for name, mid, _, whole in rows(made)}
    assert made.expected.egress is not None and made.expected.egress.high > 0
    assert found["of it egress"] == (f"${made.expected.egress.mid:.2f}", "$0.00")
    assert any("egress: going to another region costs $0.25 a machine" in line for line in made.assumptions)
    assert forecast(abroad(0.0), library).expected.egress is None


@pytest.mark.parametrize(("policy", "share"), [("spot", 1.0), ("on-demand", 0.0)])
def test_the_job_s_own_policy_is_replayed(policy: str, share: float) -> None:
    out = one(task(policy=policy), "1101" * 8, "1011" * 8)
    assert out.spot_h / (out.spot_h + out.on_demand_h) == share


def test_spot_above_the_job_s_max_price_is_not_bought() -> None:
    assert one(task(max_price=0.5), "1" * 30, "1" * 30).spot_h == 0


def test_on_demand_meets_the_deadline() -> None:
    library = Library(parts(read_folder(SHIPPED)))
    made = forecast(task(deadline_h=9.0), library)
    assert made.expected.late == 0.0
    assert made.expected.finish_h.high <= 9.0


def test_a_gang_that_may_not_be_on_demand_is_late_on_spot_and_buys_none() -> None:
    """Its deadline has no safety net: nothing is bought that it cannot have."""
    job = task(on_demand=0, deadline_h=8.0)
    out = one_at_first(job, "0" * 8 + "1" * 40, "0" * 8 + "1" * 40)
    assert (out.on_demand_h, out.spot_h > 6.0, out.finish_h > 8.0) == (0.0, True, True)
    assert forecast(job, Library(parts(read_folder(SHIPPED)))).expected.late not in (None, 0.0)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("policy", "on_demand"), [("spot", 100), ("balanced", 0)])
def test_the_on_demand_column_is_explained_if_it_is_not_allowed(policy: str, on_demand: int, library: Library) -> None:
    job = task(on_demand=on_demand, deadline_h=8.0, policy=policy)
    (line,) = [line for line in forecast(job, library).assumptions if line.startswith("on-demand: ")]
    assert line.endswith("so the replays buy none; the on-demand column is for comparison")


def begun(job: Task, ups: str, hours: float = 0.5) -> PlayedOutcome:
    """The job begun at the first tick of one zone."""
    made = part(ups, hours=hours)
    case = Case("x", made.recording, 0, 0, job.terms(hours))
    return play(case, Chooser(job.spec, job.shop))


@pytest.mark.parametrize(("max_wait", "waited_h"), [("2h", 2.0), (None, 0.0)])
def test_on_demand_waits_for_max_wait(max_wait: str | None, waited_h: float) -> None:
    out = begun(task(zones=1, max_wait=max_wait), "0" * 40)
    assert (out.waited_h, out.spot_h) == (waited_h, 0.0)


def test_a_fallback_ends_when_spot_returns() -> None:
    out = begun(task(zones=1, work_h=20.0), "0" * 8 + "1" * 72)
    assert 4.0 <= out.on_demand_h <= 6.0
    assert out.spot_h > 10.0


def test_a_gang_on_demand_finds_spot_in_another_zone_by_a_probe() -> None:
    """It moves to the other zone long before spot comes back to its own; the look is billed."""
    out = one_at_first(task(work_h=20.0), "1" * 6 + "0" * 74, "0" * 6 + "1" * 74)
    assert out.on_demand_h <= 2.0 and out.spot_h > 18.0
    stays = one_at_first(task(work_h=20.0), "1" * 6 + "0" * 74, "0" * 80)
    assert stays.spot_h == pytest.approx(3.0) and stays.on_demand_h > 17.0


def one_at_first(job: Task, *zones: str, hours: float = 0.5) -> PlayedOutcome:
    made = part(*zones, hours=hours)
    return play(Case("x", made.recording, 0, 0, job.terms(hours)), Chooser(job.spec, job.shop))


# -- the whole


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a job where their number makes no difference."""
    monkeypatch.setattr("spotkeeper.report.forecast.forecast.REPLAYS", 24)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(parts(read_folder(SHIPPED)))


def test_a_forecast_shows_expectation_on_demand_and_assumptions(library: Library) -> None:
    made = forecast(task(nodes=3, max_usd=1.0), library, ("prices: of a test",))
    ours, whole = made.expected, made.on_demand
    assert whole.usd == Band(*[3 * 4.0 * (6.0 + RESTART_H)] * 3)
    assert ours.usd.low <= ours.usd.mid <= ours.usd.high
    assert 0.0 < made.saves < 0.75
    assert (round(ours.over_budget or 0.0, 9), whole.over_budget) == (1.0, 1.0)
    assert made.replays == replays(task(), library) * len(library.parts)
    assert made.assumptions[0] == "prices: of a test"
    assert {"market", "prices", "capacity", "start", "work", "on-demand", "not included", "range"} == {
        line.partition(":")[0] for line in made.assumptions
    }
    assert [row[0] for row in rows(made)] == ["cost", "done after", "preemptions", "share on spot", "over its max_usd"]


@pytest.mark.usefixtures("few")
def test_the_same_job_has_the_same_forecast(library: Library) -> None:
    assert forecast(task(), library) == forecast(task(), library)


def test_long_jobs_are_replayed_less_often(library: Library) -> None:
    assert replays(task(work_h=2000.0), library) < replays(task(work_h=10.0), library)


def test_a_library_without_spot_is_refused() -> None:
    with pytest.raises(ValueError, match="no recorded market"):
        forecast(task(), Library(()))


def test_bands_cover_left_out_regions(library: Library) -> None:
    """The whole of it, on more markets, is measured by bench/market/forecast.py."""
    jobs = task(zones=1, work_h=12.0), task(on_demand=0, work_h=12.0)
    shares = []
    for job in jobs:
        played = [tuple(outcomes(job, region, 8)) for region in library.parts]
        for at, truth in enumerate(played):
            told = outlook(job, [*played[:at], *played[at + 1 :]])
            shares.append(mean(told.usd.holds(cost_usd(job, out)) for out in truth))
            shares.append(mean(told.finish_h.holds(out.finish_h) for out in truth))
    assert 0.65 < mean(shares) < 0.95


def test_markdown_shows_names_only_as_text(library: Library) -> None:
    made = replace(forecast(task(work_h=1.0), library), job="x`](http://a)|@all")
    text = markdown(made)
    assert "`x'](http://a)¦@all`" in text
    assert text.count("| cost |") == 1


# -- what is replayed


def test_regions_without_spot_are_left_out() -> None:
    assert parts([part("0" * 50, "0" * 50).recording]) == ()
    assert [found.name for found in parts([part("0" * 50, "1" * 50).recording])] == ["c.m r1"]


def test_halves_of_a_part_are_its_hours() -> None:
    both = halves(part("1100"))
    assert both is None  # in the second half spot never was
    first, second = halves(part("1010")) or pytest.fail("both halves have spot")
    assert (first.recording.ticks, second.recording.ticks) == (2, 2)


@pytest.mark.parametrize(("nodes", "spot"), [(4, True), (16, False)])
def test_a_small_gang_needs_fewer_machines_than_were_watched(nodes: int, spot: bool) -> None:
    full = RecordedZone("r1-0", "r1", (4,) * 27 + (16,) * 3, (0.25,) * 30)
    watched = RecordingPart("x", Recording("c", "m", 1.0, 16, (full,)))
    (out,) = outcomes(task(nodes=nodes, zones=1), watched, 1)
    assert (out.on_demand_h == 0) == spot


# -- own history


def observation(machine: str, event: Event, hour: float, zone: str = "r1-a", cause: str = "") -> Observation:
    return Observation(machine, event, (1000 + hour) * HOUR_S, zone, Model.SPOT, cause)


def test_own_history_follows_from_machines_lives() -> None:
    told = (
        observation("a", Event.ADMITTED, 0.0),
        observation("a", Event.LOSS, 60.0, cause="loss"),
        observation("b", Event.ADMITTED, 62.0),
        observation("b", Event.GONE, 72.0),
        observation("c", Event.REFUSED, 5.0, "r1-b", "capacity"),
    )
    found = own_recording("burst", "r1", told)
    assert found is not None
    assert [zone.name for zone in found.zones] == ["r1-a", "r1-b"]
    ups = [sum(up) * found.tick_h for up in found.up]
    assert ups[0] == pytest.approx(70.0)  # the hour in which nothing is known of any zone is left out
    assert found.ticks * found.tick_h == pytest.approx(71.0)
    assert ups[1] == 0
    abroad = (observation("d", Event.ADMITTED, 0.0, "r2-a"), observation("d", Event.LOSS, 90.0, "r2-a", "loss"))
    assert own_recording("burst", "r1", told + abroad) == found, "zones of another region are another market"
    assert own_recording("burst", "r3", told) is None


@pytest.mark.parametrize("hours", [0.0, 10.0])
def test_a_short_history_is_ignored(hours: float) -> None:
    told = (observation("a", Event.ADMITTED, 0.0), observation("a", Event.GONE, hours)) if hours else ()
    assert own_recording("burst", "r1", told) is None
