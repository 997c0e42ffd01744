"""The replay: what a launch, a refusal, a move, a probe and a missed deadline cost, on markets of a few ticks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.market._cases import draw, optimum
from spotkeeper.contract.policy import End, PolicyAnswer, Start, Terms, Tick
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.select.player import Player
from spotkeeper.replay.model import Case, PlayedOutcome, play
from spotkeeper.replay.recording import SHIPPED, RecordedZone, Recording, RecordingError, read, read_folder

TERMS = Terms(
    work_h=4.0,
    deadline_h=10.0,
    horizon_h=10.0,
    restart_h=0.5,
    move_h=0.25,
    move_price=0.3,
    attempt_h=0.1,
    probe_h=0.1,
    delay_price=0.0,
    tick_h=1.0,
)


class Script:
    """Answers as told, the last answer for ever; keeps what it was asked."""

    def __init__(self, *answers: PolicyAnswer) -> None:
        self.answers, self.asked = list(answers), list[Tick]()

    def start(self, start: Start) -> None:
        self.zones = start.zones

    def tick(self, tick: Tick) -> PolicyAnswer:
        self.asked.append(tick)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def end(self, end: End) -> None:
        self.told = end


def market(*zones: str, price: float = 0.25) -> Recording:
    """``"1101"`` by zone: up or not, by tick. Every zone is a region of its own."""
    series = [tuple(int(mark) for mark in zone) for zone in zones]
    return Recording(
        "c", "m", 1.0, 1, tuple(RecordedZone(f"r{n}-a", f"r{n}", up, (price,) * len(up)) for n, up in enumerate(series))
    )


def outcome(script: Script, *zones: str, **terms: object) -> PlayedOutcome:
    return play(Case("case", market(*zones), 0, 0, replace(TERMS, **terms)), script)


def test_spot_to_the_end_costs_its_start_up_and_its_work() -> None:
    out = outcome(Script(PolicyAnswer(("spot:z0",))), "1" * 20)
    assert (out.cost, out.finish_h, out.missed, out.launches) == (0.25 * 4.5, 4.5, False, 1)


def test_on_demand_is_always_there() -> None:
    out = outcome(Script(PolicyAnswer(("od",))), "0" * 20)
    assert (out.cost, out.finish_h) == (4.5, 4.5)


def test_a_loss_costs_another_start() -> None:
    script = Script(PolicyAnswer(("spot:z0",)))
    out = outcome(script, "11011111111111111111")
    assert [tick.event for tick in script.asked[:4]] == ["start", "tick", "preempted", "tick"]
    assert script.asked[2].on is None
    assert script.asked[3].tried == {"z0": False}
    assert (out.preemptions, out.spot_h, out.waited_h) == (1, 2 + 3.0, 1.0)


def test_each_refusal_delays_the_launch_that_follows_and_a_move_costs_its_egress() -> None:
    script = Script(PolicyAnswer(("spot:z0", "spot:z1")), PolicyAnswer(("keep",)))
    out = outcome(script, "0" * 20, "1" * 20)
    assert script.asked[1].on is not None
    assert script.asked[1].home == "z1"
    assert out.finish_h == pytest.approx(4 + 0.5 + 0.25 + 0.1)
    assert out.cost == pytest.approx(0.3 + 0.25 * out.finish_h)
    assert out.refusals == 1


def test_a_successful_probe_costs_and_is_answered_at_the_next_tick() -> None:
    script = Script(PolicyAnswer((), ("z0", "z1", "z9")), PolicyAnswer(("od",)))
    out = outcome(script, "1" * 20, "0" * 20)
    assert script.asked[1].probed == {"z0": True, "z1": False}
    assert out.cost == pytest.approx(0.1 * 0.25 + 4.5)


def test_launches_not_named_stop_and_failed_attempts_keep_the_rest() -> None:
    script = Script(PolicyAnswer(("od",)), PolicyAnswer(("spot:z1", "keep")), PolicyAnswer())
    outcome(script, "1" * 20, "0" * 20)
    kinds = [tick.on.kind if tick.on else None for tick in script.asked[:4]]
    assert kinds == [None, "od", "od", None]


def test_a_missed_deadline_is_paid_to_the_end() -> None:
    out = outcome(Script(PolicyAnswer()), "0" * 20)
    assert (out.missed, out.cost, out.finish_h) == (True, 4.5, 14.5)


def test_without_a_deadline_waiting_costs_and_nothing_is_missed() -> None:
    out = outcome(Script(PolicyAnswer()), "0" * 20, deadline_h=None, delay_price=0.1)
    assert not out.missed
    assert out.cost == pytest.approx(10 * 0.1 + 4.5)


def test_a_recording_that_ends_begins_again() -> None:
    assert outcome(Script(PolicyAnswer(("spot:z0",))), "1").finish_h == 4.5


# -- the optimum


@pytest.mark.parametrize(
    ("zones", "horizon_h", "best"),
    [
        (["11111"], 5.0, 0.25 * 4.5),
        (["00000"], 5.0, 4.5),
        (["0011111"], 7.0, 0.25 * 4.5),  # it waits
        (["1110000"], 7.0, 0.25 * 3 + 1.0 * (1.5 + 0.5)),  # the rest on-demand, with a start of its own
        (["00000", "11111"], 5.0, 0.3 + 0.25 * 4.75),
    ],
)
def test_the_optimum_knows_the_future(zones: list[str], horizon_h: float, best: float) -> None:
    """A lower bound: on markets as short as these it lies a little below what can be done."""
    terms = replace(TERMS, deadline_h=horizon_h, horizon_h=horizon_h)
    assert 0.85 * best < optimum(Case("case", market(*zones), 0, 0, terms)) <= best + 1e-9


def test_no_policy_beats_the_optimum() -> None:
    player = Player()
    for case in list(draw(read(SHIPPED / "gcp-2025-10-h100.json"), 3))[::2]:
        assert play(case, player).cost >= optimum(case) - 1e-6


# -- recordings


def file(tmp_path: Path, *zones: dict[str, object], gap_seconds: float = 600) -> Path:
    body = {"collection": "c", "market": "m", "gap_seconds": gap_seconds, "gang": 2, "zones": list(zones)}
    path = tmp_path / "market.json"
    path.write_text(json.dumps(body))
    return path


def test_a_gap_is_no_capacity_at_the_last_price(tmp_path: Path) -> None:
    zone = {"zone": "us-east-1a", "capacity": [[2, 2], [None, 1], [2, 1]], "price": [None, 0.2, None, 0.3]}
    read_one = read(file(tmp_path, zone), ratio=0.4)
    assert read_one.up == (bytes([1, 1, 0, 1]),)
    assert read_one.zones[0].price == (0.4, 0.2, 0.2, 0.3)


@pytest.mark.parametrize(
    "zones",
    [
        (),
        ({"zone": "a", "capacity": []},),
        ({"zone": "a", "capacity": [1]}, {"zone": "b", "capacity": [1, 1]}),
        ({"zone": "a", "capacity": [1, 1], "price": [0.3]},),
        ({"zone": "a", "capacity": ["many"]},),
    ],
)
def test_invalid_recordings_are_refused_by_name(tmp_path: Path, zones: tuple[dict[str, object], ...]) -> None:
    with pytest.raises(RecordingError, match=r"market\.json"):
        read(file(tmp_path, *zones))


@pytest.mark.parametrize(("gap_seconds", "price"), [(0, 0.3), (1e-6, 0.3), (1e9, 0.3), (600, 1e308), (600, 1e4)])
def test_ticks_and_prices_of_another_unit_are_refused(tmp_path: Path, gap_seconds: float, price: float) -> None:
    with pytest.raises(RecordingError, match=r"market\.json: (gap_seconds|prices)"):
        read(file(tmp_path, {"zone": "a", "capacity": [1], "price": [price]}, gap_seconds=gap_seconds))


@pytest.mark.parametrize("price", [0.0, -0.3, None])
def test_a_zero_price_counts_as_a_gap(tmp_path: Path, price: float | None) -> None:
    recording = read(file(tmp_path, {"zone": "a", "capacity": [1] * 4, "price": [price, 0.4, price, 0.5]}), ratio=0.2)
    assert recording.zones[0].price == (0.2, 0.4, 0.4, 0.5)


def test_a_folder_without_recordings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no recording"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("zone", "region"), [("us-east-1a", "us-east-1"), ("us-central1-b", "us-central1"), ("here", "here")]
)
def test_regions_of_both_clouds(zone: str, region: str) -> None:
    assert region_of(zone) == region
