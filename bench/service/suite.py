"""Minutes of ``make test`` and seconds of ``make quick``, as these targets noted them when they last passed."""

from __future__ import annotations

import json
from pathlib import Path

NOTED = Path(__file__).resolve().parents[2] / ".spotkeeper" / "tests.json"
MINUTES, QUICK_S = 8.0, 90.0


def figures() -> list[dict[str, object]]:
    noted = json.loads(NOTED.read_text()) if NOTED.exists() else {}
    return [
        figure("tests.minutes", "test", noted.get("test"), 60.0, "min", MINUTES),
        figure("tests.quick_s", "quick", noted.get("quick"), 1.0, "s", QUICK_S),
    ]


def figure(
    name: str, target: str, took: dict[str, float] | None, seconds: float, unit: str, goal: float
) -> dict[str, object]:
    value = round(took["wall_s"] / seconds, 1) if took else None
    against = f"not measured: make {target}"
    if took:
        against = f"{took['processor_s'] / seconds:.1f} {unit} of processor on {took['cores']} cores"
    holds = None if value is None else value <= goal
    return {"name": name, "value": value, "unit": unit, "goal": f"<= {goal:g}", "holds": holds, "against": against}
