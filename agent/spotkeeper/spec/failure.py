"""When a machine's first worker failed, and whether only for a peer's sake: the fact ``failed`` beside an exit."""

from __future__ import annotations

import re

from msgspec import Struct

_TEXT = re.compile(r"(own|peer)-(\d{1,15})-(\d{1,4})\Z")


class Failure(Struct, frozen=True):
    """``follows``: it tells only that a peer is gone. ``at_ms``: by that machine's clock, real unix milliseconds."""

    follows: bool
    at_ms: int
    local_rank: int = 0

    def order(self) -> tuple[bool, int]:
        """The smallest is the root cause: machines' clocks agree within milliseconds, and what follows comes after."""
        return self.follows, self.at_ms

    def __str__(self) -> str:
        return f"{'peer' if self.follows else 'own'}-{self.at_ms}-{self.local_rank}"

    @classmethod
    def parse(cls, text: str) -> Failure | None:
        found = _TEXT.match(text)
        return cls(found[1] == "peer", int(found[2]), int(found[3])) if found else None
