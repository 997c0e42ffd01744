"""What was run, for the closing line and ``.spotkeeper/security.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / ".spotkeeper" / "security.json"


@dataclass
class Bodies:
    """Of the generated ones. Times: of handling one, in real milliseconds."""

    sent: int = 0
    taken: int = 0
    refused: int = 0
    median_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0


@dataclass
class Tally:
    """``classes``: cases by area and class; a class that failed is in ``failed`` instead."""

    classes: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    bodies: Bodies = field(default_factory=Bodies)

    def line(self) -> str:
        bodies = self.bodies
        return (
            f"bad input: {len(self.classes)} classes, {sum(self.classes.values())} cases, {len(self.failed)} failed; "
            f"{bodies.sent} generated bodies ({bodies.taken} taken, {bodies.refused} refused), "
            f"median {bodies.median_ms:.2f} ms, p99 {bodies.p99_ms:.2f} ms"
        )

    def write(self) -> None:
        FILE.parent.mkdir(exist_ok=True)
        whole = {"cases": sum(self.classes.values()), **asdict(self)}
        FILE.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


TALLY = Tally()
