"""The share of small faults that the tests notice, as ``make mutants`` measured it last."""

from __future__ import annotations

import json
from pathlib import Path

REPORT = Path(__file__).parents[1] / ".spotkeeper" / "mutants.json"
GOAL = 90.0


def figures() -> list[dict[str, object]]:
    try:
        report = json.loads(REPORT.read_text())
        percent, tried = report["killed_percent"], report["tried"]
        seeds = ", ".join(str(row["seed"]) for row in report["samples"])
        against = f"{report['killed']} of {tried} mutants of {report['mutants']}, seeds {seeds}; no equivalent ones"
    except (OSError, ValueError, KeyError):
        percent, against = None, "not measured: make mutants"
    holds = None if percent is None else percent >= GOAL
    figure = {"name": "mutants.killed_percent", "value": percent, "unit": "%", "goal": f">= {GOAL:.0f}"}
    return [figure | {"holds": holds, "against": against}]
