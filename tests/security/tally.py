"""What was run, for the closing line and ``.spotkeeper/security.json``, which is of whole runs only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

BODIES = 100_000  # of a whole run
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

    def told(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    def add(self, told: str | None) -> None:
        """What another process has counted; the bodies are one test's, so one process has them all."""
        if told is None:
            return
        other = json.loads(told)
        self.classes |= other["classes"]
        self.failed += other["failed"]
        if other["bodies"]["sent"]:
            self.bodies = Bodies(**other["bodies"])

    def line(self) -> str:
        bodies = self.bodies
        return (
            f"bad input: {len(self.classes)} classes, {sum(self.classes.values())} cases, {len(self.failed)} failed; "
            f"{bodies.sent} generated bodies ({bodies.taken} taken, {bodies.refused} refused), "
            f"median {bodies.median_ms:.2f} ms, p99 {bodies.p99_ms:.2f} ms"
        )

    def missing(self, classes: int) -> str:
        """What a whole run of so many classes has and this one has not; nothing where it is whole."""
        ran, sent = len(self.classes) + len(self.failed), self.bodies.sent
        out = [f"{ran} of {classes} classes"] if ran != classes else []
        return ", ".join(out + ([f"{sent} of {BODIES} bodies"] if sent < BODIES else []))

    def write(self, classes: int, file: Path = FILE) -> str:
        """Keep it, if it is whole: a part must not stand where all of it stood. What was done, in words."""
        if missing := self.missing(classes):
            return f"{file.name} is left as it was: {missing} were run"
        file.parent.mkdir(exist_ok=True)
        times = {"median_ms": self.bodies.median_ms, "p99_ms": self.bodies.p99_ms}
        whole = {"cases": sum(self.classes.values()), **times, **asdict(self)}
        file.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
        return f"written to {file.parent.name}/{file.name}"


TALLY = Tally()
