"""Where a run is: its step, its place in the data, the order of its gradients. Taken with the parts, and given back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spotkeeper.train import gradorder, rng
from spotkeeper.train.feed import Feed, Position
from spotkeeper.train.gang import Gang
from spotkeeper.train.keep import Found
from spotkeeper.train.pace import Pace
from spotkeeper.train.parts import Parts


class Course:
    """All that changes while a run goes on.

    ``step``: optimizer steps done. ``feed``: of the loop under way, else None, and
    ``position`` is that of the last one. ``data``: this rank's place in its loader, as it
    was restored, until a loop takes it.
    """

    def __init__(self, parts: Parts, gang: Gang, pace: Pace, seed: int) -> None:
        self._parts = parts
        self._gang = gang
        self._pace = pace
        self._seed = seed
        self._order: gradorder.Recorder | gradorder.Replayed | None = None
        self.step = 0
        self.position = Position()
        self.feed: Feed | None = None
        self.data: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        return self.position.epoch if self.feed is None else self.feed.position.epoch

    def begin(self) -> None:
        """Nothing was found: this is step 0."""
        if (ddp := self._parts.ddp) is not None:
            self._order = gradorder.Recorder(ddp)

    def load(self, found: Found) -> None:
        """In this order: DDP's buckets, state, random state; each would disturb the one after it."""
        rest = found.rest
        ddp = self._parts.ddp
        if ddp is not None and rest["order"]:
            gradorder.replay(ddp, rest["order"], rest["synced"])
            self._order = gradorder.Replayed(rest["order"], rest["synced"])
        else:
            self.begin()
        self._parts.load(found.model, rest, found.local)
        self.step = rest["step"]
        self.position = Position(**rest["position"])
        self.data = found.local["data"] if found.same_world else None
        self._pace.stalls.extend(rest["stalls"])
        if found.same_world:
            rng.restore(found.local["rng"])
        else:
            rng.seed_all(self._seed, self.step, self._gang.rank)

    def stepped(self) -> None:
        """An optimizer step is whole."""
        if self._order is not None:
            self._order.stepped()

    def take_common(self) -> tuple[object, dict[str, object]]:
        model, rest = self._parts.take_common()
        rest |= {
            "step": self.step,
            "position": asdict(self.position if self.feed is None else self.feed.position),
            "order": self._order.order if self._order else (),
            "synced": self._order.synced if self._order else 0,
            "stalls": list(self._pace.stalls),
        }
        return model, rest

    def take_local(self) -> dict[str, object]:
        return self._parts.take_local() | {"data": {} if self.feed is None else self.feed.local()}
