"""What a static node's disk may still have of jobs that it served once, and when to ask whether they are over.

Only the node that serves a job hears that it is over; a job may end while its checkpoints lie here and the node
serves another, or none. It only counts and chooses; the function knows, ``mounting.py`` deletes.
"""

from __future__ import annotations

from collections.abc import Iterable

from spotkeeper.spec.generation import MAX_KEPT

EVERY_S = 3600.0  # steady virtual seconds between two questions


class Kept:
    """Of one node. ``serving``: the job it is there for; that one's end is told otherwise."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._last = ""  # asked about: the next question begins behind it
        self._not_before = float("-inf")

    def found(self, jobs: Iterable[str]) -> None:
        """What the disk has, just looked at. They are asked about soon."""
        self._jobs = set(jobs)
        self._not_before = float("-inf")

    def left(self, job: str) -> None:
        """The node lets go of a job, and its files stay."""
        self._jobs.add(job)

    def gone(self, jobs: Iterable[str]) -> None:
        self._jobs.difference_update(jobs)

    def question(self, now: float, serving: str | None) -> tuple[str, ...]:
        """Whom to ask about now: often nobody, never more than a sync takes, each of them in turn."""
        jobs = sorted(self._jobs - {serving})
        if not jobs or now < self._not_before:
            return ()
        self._not_before = now + EVERY_S
        chosen = [job for job in jobs if job > self._last] + [job for job in jobs if job <= self._last]
        self._last = chosen[:MAX_KEPT][-1]
        return tuple(chosen[:MAX_KEPT])

    def over(self, asked: Iterable[str], ended: Iterable[str], serving: str | None) -> tuple[str, ...]:
        """What may be deleted, by an answer: nothing that was not asked about, is not here, or is being served."""
        return tuple(sorted(self._jobs.intersection(asked, ended) - {serving}))
