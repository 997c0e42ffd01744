"""``spotkeeper policy``: the protocol as it is written down, and lines that make no sense."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest

from spotkeeper.cli.stacks.policy import serve
from spotkeeper.contract.policy import Start
from spotkeeper.reconcile.select import player
from spotkeeper.reconcile.select.offers import HERE, HOUR_S, MoveCost, Need, Selection
from spotkeeper.reconcile.select.player import Player

JOB = {
    "work_h": 48.0, "deadline_h": 60.0, "horizon_h": 60.0, "restart_h": 0.2, "move_h": 0.05, "move_price": 0.327,
    "attempt_h": 0.008333, "probe_h": 0.016667, "delay_price": 0.0, "tick_h": 0.054167, "on_demand_price": 1.0,
}  # fmt: skip
ZONES = [{"id": f"z{n}", "region": "r0", "history": [[float(h), 1] for h in range(48, 0, -1)]} for n in range(2)]
START = {"type": "start", "case": "9f2c", "home": "z1", "job": JOB, "zones": ZONES}
TICK = {
    "type": "tick", "tick": 17, "now_h": 0.92, "done_h": 0.5, "left_h": 47.5, "time_left_h": 59.08,
    "event": "preempted", "on": None, "home": "z1", "spot_price": {"z0": 0.31, "z1": 0.30},
    "tried": {"z0": False}, "probed": {"z1": True}, "preemptions": 3, "cost": 0.21,
}  # fmt: skip


def talk(*lines: object) -> tuple[list[dict[str, object]], str]:
    """What is answered, and what is said on standard error."""
    asked = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    answers, errors = io.BytesIO(), io.StringIO()
    serve(io.BytesIO(asked), answers, errors)
    return [json.loads(line) for line in answers.getvalue().splitlines()], errors.getvalue()


def test_only_hello_and_ticks_are_answered() -> None:
    end = {"type": "end", "cost": 24.9, "finish_h": 55.2, "missed": False, "preemptions": 7}
    answers, errors = talk({"type": "hello", "protocol": 1}, START, TICK, end, {"type": "bye"}, TICK)
    assert answers[0] == {"type": "ready", "name": "spotkeeper"}
    assert set(answers[1]) == {"try", "probe"}
    assert len(answers) == 2
    assert errors == ""


def test_a_tick_between_two_cases_is_answered_as_one_without_a_case() -> None:
    """It was answered with the zones and terms of the case that had ended."""
    on = {"kind": "spot", "zone": "z1", "age_h": 0.3, "pending_h": 0.0}
    answers, errors = talk(START, {"type": "end"}, {**TICK, "on": on}, {"type": "end"}, START, {**TICK, "on": on})
    assert answers[0] == {"try": ["keep", "od"], "probe": []} and answers[1]["try"] == ["keep"]
    assert [line[:46] for line in errors.splitlines()] == [
        f"spotkeeper policy: line {number}: no case has begun, " for number in (3, 4)
    ]


def test_the_running_launch_is_kept() -> None:
    on = {"kind": "spot", "zone": "z1", "age_h": 0.3, "pending_h": 0.0}
    assert talk(START, {**TICK, "on": on, "event": "tick"})[0] == [{"try": ["keep"], "probe": []}]


def test_without_slack_the_answer_is_on_demand() -> None:
    assert talk(START, {**TICK, "time_left_h": 47.9})[0] == [{"try": ["od"], "probe": []}]


def test_without_a_deadline_the_horizon_counts() -> None:
    soft = {**START, "job": {**JOB, "deadline_h": None, "horizon_h": 144.0, "delay_price": 0.1}}
    assert talk(soft, {**TICK, "time_left_h": None})[0][0]["try"][-1].startswith("spot:")  # type: ignore[index]


def test_unknown_fields_are_ignored() -> None:
    assert len(talk({**START, "more": 1}, {**TICK, "more": {"x": []}})[0]) == 1


def test_an_empty_history_is_no_error() -> None:
    bare = [{"id": "z1", "region": "r0", "history": []}]
    answers, errors = talk({**START, "zones": bare}, {**TICK, "tried": {}, "probed": {}, "spot_price": {"z1": 0.3}})
    assert answers == [{"try": ["spot:z1"], "probe": []}]
    assert errors == ""


def test_a_zone_without_a_price_is_not_tried() -> None:
    answers, _ = talk(START, {**TICK, "spot_price": {"z0": 0.3}, "tried": {}})
    assert answers[0]["try"] == ["spot:z0"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"tick"}',
        json.dumps({**TICK, "tried": {"z9": False}}).encode(),
        json.dumps({**TICK, "left_h": "much"}).encode(),
        json.dumps({**TICK, "on": {"kind": "boat", "zone": "z1", "age_h": 0, "pending_h": 0}}).encode(),
    ],
)
def test_an_invalid_tick_gets_the_safe_answer(line: bytes) -> None:
    answers, errors = talk(START, line, TICK)
    assert answers[0] == {"try": ["keep", "od"], "probe": []}
    assert len(answers) == 2
    assert errors.startswith("spotkeeper policy: line 2: ") and errors.endswith("\n") and errors.count("\n") == 1
    assert "Error" not in errors, "words, not the names of Python's exceptions"


def test_a_tick_before_any_start_is_answered_too() -> None:
    answers, errors = talk(TICK)
    assert answers == [{"try": ["keep", "od"], "probe": []}]
    assert errors.startswith(
        "spotkeeper policy: line 1: no case has begun, send a valid `start` first, so the answer is: keep what runs"
    )


@pytest.mark.parametrize("line", [b"", b"nonsense", b"[1", b'{"type":"boat"}', b"\xff\xfe", b"{" * 100_000])
def test_other_invalid_lines_get_no_answer(line: bytes) -> None:
    assert len(talk(line, START, TICK)[0]) == 1


def test_a_clock_that_jumps_back_harms_nothing() -> None:
    answers, errors = talk(START, TICK, {**TICK, "tick": 2, "now_h": -3.0}, TICK)
    assert len(answers) == 3
    assert errors == ""


def test_the_documented_conversation_is_valid() -> None:
    """Whoever judges the rule copies it from there: each question is understood, and answered as it says."""
    text = (Path(__file__).parents[3] / "docs" / "selection.md").read_text().partition("\n```\n")[2].partition("```")[0]
    said = [line.split(" ", 1) for line in text.splitlines()]
    answers, errors = io.BytesIO(), io.StringIO()
    serve(io.BytesIO("\n".join(line for who, line in said if who == ">").encode()), answers, errors)
    assert errors.getvalue() == ""
    assert answers.getvalue().decode().splitlines() == [line for who, line in said if who == "<"]
    assert {json.loads(line)["type"] for who, line in said if who == ">"} == {"hello", "start", "tick", "end", "bye"}


def test_another_zone_costs_time_and_another_region_money_too() -> None:
    player, near = Player(), {"id": "z2", "region": "r1", "history": []}
    player.start(msgspec.convert({**START, "zones": [*ZONES[:1], {**near, "id": "z1"}, near]}, Start))
    one, other = HERE, MoveCost(JOB["move_h"] * HOUR_S, JOB["move_price"])
    beside = MoveCost(JOB["move_h"] * HOUR_S, 0.0)
    assert player._move_costs == {
        "z0": {"z0": one, "z1": other, "z2": other},
        "z1": {"z0": other, "z1": one, "z2": beside},
        "z2": {"z0": other, "z1": beside, "z2": one},
    }


@pytest.mark.parametrize("word", ["1", 2, None, [1]])
def test_any_hello_is_answered(word: object) -> None:
    assert talk({"type": "hello", "protocol": word})[0] == [{"type": "ready", "name": "spotkeeper"}]


def test_an_invalid_start_discards_the_case() -> None:
    """Its ticks must not be played by the terms of the case before."""
    bad = {**START, "job": {**JOB, "work_h": None}}
    assert talk(START, bad, TICK)[0] == [{"try": ["keep", "od"], "probe": []}]


def test_an_unparsable_start_is_no_tick() -> None:
    """An answer too many, and all that follow are answers to something else."""
    bad = {**START, "home": 7, "zones": [{**ZONES[0], "id": "tick"}]}
    assert len(talk(bad, START, TICK)[0]) == 1


def test_probe_results_may_be_booleans_and_prices_missing() -> None:
    looks = [{**place, "history": [[hour, bool(up)] for hour, up in place["history"]]} for place in ZONES]  # type: ignore[attr-defined]
    answers, errors = talk({**START, "zones": looks}, {**TICK, "tried": {}, "spot_price": {"z0": None, "z1": 0.3}})
    assert errors == ""
    assert answers[0]["try"] == ["spot:z1"]


def test_spot_above_the_on_demand_price_is_neither_started_nor_kept() -> None:
    dear = {"z0": 1.08, "z1": 1.6}
    assert talk(START, {**TICK, "spot_price": dear})[0][0]["try"] == []
    on = {"kind": "spot", "zone": "z1", "age_h": 3.0, "pending_h": 0.0}
    runs = {**TICK, "on": on, "event": "tick", "spot_price": dear}
    assert talk(START, runs)[0][0]["try"] == ["od"]
    assert talk(START, {**runs, "time_left_h": 47.7})[0][0]["try"] == ["keep"], "no time for another start"
    assert talk(START, {**runs, "spot_price": {"z0": 0.3, "z1": 1.6}})[0][0]["try"] == ["spot:z0", "od"]


@pytest.mark.parametrize(
    "terms",
    [
        {"restart_h": 0.0}, {"restart_h": 24.0}, {"deadline_h": -1.0, "horizon_h": -1.0}, {"tick_h": 0.0},
        {"work_h": 0.0}, {"on_demand_price": 0.0}, {"attempt_h": 1e300}, {"move_price": -5.0}, {"horizon_h": 0.0},
    ],
)  # fmt: skip
def test_extreme_terms_are_answered(terms: dict[str, float]) -> None:
    answers, _ = talk({**START, "job": {**JOB, **terms}}, TICK, {**TICK, "time_left_h": -3.0}, {**TICK, "left_h": 0.0})
    assert len(answers) == 3
    assert all({"try", "probe"} == set(answer) for answer in answers)


def test_a_start_takes_what_the_job_says_and_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[Need] = []

    def found(job: object, stack: object, need: Need, rule: object) -> Selection:
        needs.append(need)
        return Selection(())

    monkeypatch.setattr(player, "select", found)
    talk(START, TICK)
    assert [(need.save_s, need.begin_s, need.hung_s) for need in needs] == [(0.0, 0.0, 0.25 * HOUR_S)]
