"""The condensed history of zones: condensing is deterministic, happens once, and follows a changing market quickly."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, MarketPast, Observation, PriceRun, Prices, Watch
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from spotkeeper.reconcile.select import market, zone_history
from spotkeeper.reconcile.select.offers import Need, select
from spotkeeper.reconcile.select.zone_history import Track
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import OfferHistory
from spotkeeper.replay.recording import SHIPPED, read
from tests.reconcile.memory import MemoryStore
from tests.reconcile.world import World, stack

HOUR = 500_000  # an hour of the virtual clock
SPOT = Model.SPOT


def observation(
    machine: str, event: Event, at_h: float, zone: str = "z-a", cause: str = "", **more: object
) -> Observation:
    return Observation(machine, event, (HOUR + at_h) * HOUR_S, zone, SPOT, cause, **more)  # type: ignore[arg-type]


LIFE = (
    observation("m1", Event.ADMITTED, 0.5, started=(HOUR + 0.4) * HOUR_S),
    observation("m1", Event.LOSS, 5.5, cause="loss"),
    observation("m2", Event.REFUSED, 5.6, cause="capacity"),
    observation("m3", Event.ADMITTED, 6.0, started=(HOUR + 5.95) * HOUR_S),
)


def watch(past: MarketPast, observations: tuple[Observation, ...], at_h: float) -> Watch:
    return zone_history.now(past, observations, (HOUR + at_h) * HOUR_S)[0]["z-a"]


def test_a_life_counts_from_launch_to_loss() -> None:
    found = watch(MarketPast("pool", HOUR), LIFE, 8.0)
    assert found.losses == 1
    assert found.up is True and found.seen_h == HOUR + 8.0
    assert HOUR + 5.6 < found.since_h < HOUR + 6.0, "it came back between the refusal and the launch"
    assert found.exposure > 2.0


def test_a_released_machine_is_no_loss() -> None:
    given = (LIFE[0], observation("m1", Event.GONE, 3.0))
    found = watch(MarketPast("pool", HOUR), given, 3.5)
    assert (found.losses, found.up) == (0, True)
    crashed = (LIFE[0], observation("m1", Event.LOSS, 3.0, cause="silence"))
    assert watch(MarketPast("pool", HOUR), crashed, 3.5).losses == 0


def test_a_notice_counts_as_a_loss() -> None:
    warned = (LIFE[0], observation("m1", Event.NOTICE, 3.0))
    assert watch(MarketPast("pool", HOUR), warned, 3.001).losses == 1
    lost = (*warned, observation("m1", Event.LOSS, 3.03, cause="notice"))
    assert watch(MarketPast("pool", HOUR), lost, 3.1).losses == 1, "once"


@pytest.mark.parametrize(
    ("losses", "up_h", "observed_h", "raised"),
    [
        (1.0, 10.0, 20.0, 5.0 * -math.log(0.8)),  # a tenth of its hours up end, and it is up for half of the time
        (2.0, 8.0, 10.0, 2.0 / 0.95 * -math.log(0.05)),  # more than chance allows: at most 95% are hidden
        (0.01, 10.0, 10.0, 0.5 * -math.log(0.98)),  # never seen down
        (0.5, 0.5, 10.0, 0.95 * -math.log(1.0 - 0.5 / 0.95)),  # for less than an hour up
        (0.0, 10.0, 20.0, 0.0),
        (1.0, 0.0, 20.0, 1.0),
    ],
)
def test_hourly_observations_miss_losses(losses: float, up_h: float, observed_h: float, raised: float) -> None:
    track = Track.of(Watch("z-a", True, HOUR, HOUR - 1.0, losses, 0.25, observed_h, up_h))
    track.unhide()
    assert track.losses == pytest.approx(raised)
    assert track.losses >= losses and (track.exposure, track.up_h, track.observed_h) == (0.25, up_h, observed_h)


def test_folding_changes_no_choice() -> None:
    whole = watch(MarketPast("pool", HOUR), LIFE, 8.0)
    folded = zone_history.fold(MarketPast("pool", HOUR), LIFE, HOUR + 6)
    later = tuple(one for one in LIFE if one.at >= (HOUR + 6) * HOUR_S)
    parts = watch(folded, later, 8.0)
    assert (parts.up, parts.since_h, parts.seen_h) == (whole.up, whole.since_h, whole.seen_h)
    assert 0.9 < parts.losses < 1.0, "it counts a little less for being old"
    assert folded.boots_s == (0.1 * HOUR_S,) or abs(folded.boots_s[0] - 360.0) < 1e-3
    assert zone_history.fold(folded, LIFE, HOUR + 6) is folded


def test_an_observation_at_the_full_hour_is_of_the_hour_that_begins() -> None:
    """An hour is folded once: what two folds both counted would count twice."""
    at_nine = (observation("m1", Event.ADMITTED, 9.0),)
    assert zone_history.fold(MarketPast("pool", HOUR), at_nine, HOUR + 9).alive == ()
    assert len(zone_history.fold(MarketPast("pool", HOUR + 9), at_nine, HOUR + 10).alive) == 1
    assert zone_history.now(MarketPast("pool", HOUR + 9), at_nine, (HOUR + 9.0) * HOUR_S)[0].keys() == {"z-a"}


def test_a_machine_without_a_reported_end_is_forgotten() -> None:
    folded = zone_history.fold(MarketPast("pool", HOUR), LIFE[:1], HOUR + 300)
    assert folded.alive == ()


def test_past_hours_are_folded_once_into_one_object() -> None:
    world = World(nodes=1)
    store, the_stack = world.memory, world.stack
    for one in LIFE:
        store.add_observations("pool", int(one.at // HOUR_S), (one,))
    read_hours: list[tuple[int, ...]] = []
    reads = store.read_observations
    store.read_observations = lambda pools, hours: read_hours.append(hours) or reads(pools, hours)  # type: ignore[method-assign, func-returns-value]
    at = (HOUR + 9.5) * HOUR_S
    first = _watch(market.read(store, world, the_stack, at))
    assert [len(hours) for hours in read_hours] == [2, 3], "those that there are"
    again = _watch(market.read(store, world, the_stack, at + 60))
    assert [len(hours) for hours in read_hours] == [2, 3, 2]
    assert first.since_h == again.since_h
    store.put("market/past/pool", b"{")  # somebody's hand
    assert _watch(market.read(store, world, the_stack, at)).since_h == first.since_h


def test_boot_times_of_pools_are_the_medians_of_past_and_recent_boots() -> None:
    store = MemoryStore(stack())
    store.put("market/past/pool", msgspec.json.encode(MarketPast("pool", HOUR, boots_s=(100.0, 200.0, 300.0))))
    for number, (at_h, boot_s) in enumerate(((0.5, 500.0), (1.5, 700.0), (2.5, 90_000.0))):
        began = (HOUR + at_h) * HOUR_S - boot_s
        store.add_observations(
            "pool", HOUR + int(at_h), (observation(f"m{number}", Event.ADMITTED, at_h, started=began),)
        )
    asked: list[tuple[int, ...]] = []
    reads = store.read_observations
    store.read_observations = lambda pools, hours: asked.append(hours) or reads(pools, hours)  # type: ignore[method-assign, func-returns-value]
    assert market.boots(store, ("pool", "none"), (HOUR + 1.9) * HOUR_S) == {"pool": 300.0}, "of five boots"
    assert asked == [(HOUR + 1, HOUR)]
    assert market.boots(store, ("none",), (HOUR + 1.9) * HOUR_S) == {}


def test_many_pools_are_folded_a_few_at_a_time() -> None:
    names = tuple(f"p{number}" for number in range(market.FOLDS + 5))
    store, asked = MemoryStore(stack()), 0
    real = store.get_all

    def counted(wanted: tuple[str, ...]) -> tuple[bytes | None, ...]:
        nonlocal asked
        asked += 1
        return real(wanted)

    store.get_all = counted  # type: ignore[method-assign]
    assert len(market._pasts(store, names, HOUR)) == market.FOLDS
    assert len(market._pasts(store, names, HOUR)) == len(names) and asked == 2


def _watch(seen: tuple[OfferHistory, ...]) -> Watch:
    (found,) = [one.watch for one in seen if one.watch is not None]
    return found


def test_a_removed_zone_is_ignored() -> None:
    store, world = MemoryStore(stack()), World(nodes=1)
    gone = observation("m1", Event.ADMITTED, 9.0, zone="z-old")
    store.add_observations("pool", HOUR + 9, (gone,))
    assert market.read(store, world, world.stack, (HOUR + 9.5) * HOUR_S) == ()


def test_an_empty_history_chooses_by_price() -> None:
    found = select(JobSpec("job", ("x",)), stack(), Need(HOUR * HOUR_S, on_demand_left=1))
    assert [choice.offer.zone for choice in found.choices[:3]] == ["z-a", "z-b", "z-c"]


# -- a market that turns


def test_a_change_of_the_market_changes_the_choice_within_minutes() -> None:
    """us-east4-a, October 2025: hours of calm, then it comes and goes. The other zone is dearer, and stays."""
    recording = read(SHIPPED / "gcp-2025-10-h100.json")
    names = [zone.name for zone in recording.zones]
    up = recording.up[names.index("us-east4-a")]
    turn = next(
        at for at in range(60, len(up)) if not up[at] and all(up[at - 24 : at]) and 3 <= sum(up[at : at + 12]) <= 9
    )
    first = turn - 60
    observations = [Observation("calm", Event.ADMITTED, (HOUR + first / 6) * HOUR_S, "steady", SPOT)]
    for at, (was, there) in enumerate(itertools.pairwise(up[first : turn + 18])):
        moment = HOUR + (first + at + 1) / 6
        if there and not was:
            observations.append(Observation(f"m{at}", Event.ADMITTED, moment * HOUR_S, "us-east4-a", SPOT))
        elif was and not there:
            observations += [
                Observation(one.machine, Event.LOSS, moment * HOUR_S, "us-east4-a", SPOT, "loss")
                for one in observations[-1:]
            ]
    if up[first]:
        observations.insert(0, Observation("m", Event.ADMITTED, (HOUR + first / 6) * HOUR_S, "us-east4-a", SPOT))
        loss = next(one for one in observations if one.event is Event.LOSS)
        observations[observations.index(loss)] = Observation("m", Event.LOSS, loss.at, "us-east4-a", SPOT, "loss")
    assert best(observations, turn - 1) == "us-east4-a", "it is cheaper"
    back = next(at for at in range(turn, turn + 18) if up[at])
    assert best(observations, turn) == "steady"
    assert best(observations, back) == "steady", "also when it is to be had again"


def best(observations: list[Observation], tick: int) -> str:
    """The first choice three minutes after a tick begins."""
    at = (HOUR + tick / 6 + 0.05) * HOUR_S
    prices = {"us-east4-a": Price(on_demand=1.0, spot=0.18), "steady": Price(on_demand=1.0, spot=0.23)}
    pool = PoolState("pool", "spot", "m", tuple(prices), 1, 9, 9, 10, "pd", prices)
    the_stack = StackState("t", "gcp", "p", "z", "b", (pool,))
    told = tuple(one for one in observations if one.at <= at)
    seen = market.offers_seen((pool,), {}, {"pool": told}, at, {"pool": MarketPast("pool", HOUR)})
    found = select(JobSpec("job", ("x",)), the_stack, Need(at, on_demand_left=1, market=seen))
    return found.choices[0].offer.zone


def test_observations_from_a_clock_ahead_hide_nothing() -> None:
    world = World(nodes=1)
    hour, now = int(world.t // HOUR_S), world.t
    store = world.memory
    store.put(paths.market_past("pool"), msgspec.json.encode(MarketPast("pool", hour + 9000)))
    refused = Observation("m1", Event.REFUSED, now - 60.0, "z-a", SPOT, "capacity")
    assert store.add_observations("pool", hour, (refused,))
    (seen,) = (one for one in market.read(store, world, world.stack, now) if one.zone == "z-a")
    assert seen.watch is not None and seen.watch.up is False
    kept = msgspec.json.decode(store.get(paths.market_past("pool")) or b"", type=MarketPast)
    assert kept.hour <= hour, "and it was made anew"


def test_future_prices_are_requested_again_and_ignored() -> None:
    world = World(nodes=1)
    ahead = Prices("pool", asked=world.t + 9e7, told=world.t + 9e7, runs=(PriceRun(world.t - 10.0, 0.01),))
    assert ahead.now(world.t) is None
    assert world.memory.cas_prices(ahead, "") is not None
    market.read(world.memory, world, world.stack, world.t)
    assert world.price_questions == 1


def test_an_invalid_history_breaks_no_choice() -> None:
    watch = Watch("z-a", True, 499_999.0, 499_000.0, losses=-9.0, exposure=-2.0, observed_h=-1.0, up_h=-1.0)
    track = Track.of(watch)
    assert (track.losses, track.exposure, track.observed_h, track.up_h) == (0.0, 0.0, 0.0, 0.0)
    seen = OfferHistory("pool", "z-a", SPOT, watch=watch)
    found = select(JobSpec("job", ("x",)), stack(), Need(500_000.0 * HOUR_S, market=(seen,), on_demand_left=1))
    assert len(found.choices) == 6


def test_all_that_was_observed_fades_alike() -> None:
    track = Track(zone_history.SHAPE)
    track.losses, track.exposure, track.observed_h, track.up_h = 1.0, 2.0, 4.0, 8.0
    track.fade(0.5)
    assert (track.losses, track.exposure, track.observed_h, track.up_h) == (0.5, 1.0, 2.0, 4.0)
