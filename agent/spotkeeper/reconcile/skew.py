"""A record whose writer's clock was ahead of ours: what happened "later than now" happened now.

Every round stamps the record with its own clock. Clouds keep them within seconds of each other; one that had jumped
would freeze whatever waits for time since then (an offer that is cold, the hour of the launch fuse, a roll call) until
the others have caught up. A round that finds this writes the record as it is believed before it decides anything. Pure.

Which times those are is written beside them (``spec.record``: ``Past``, ``Until``). Deadlines of machines
(``Slot.notice``, ``Slot.ends``) are not ours to judge, and ``Record.hold_ends``, at which disks go, is never brought
forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

from msgspec import Struct, inspect
from msgspec.structs import replace

from spotkeeper.spec.record import Phase, Record

SKEW_S = 60.0  # of clocks that are as they should be, with room: Google promises less than a second

S = TypeVar("S", bound=Struct)
log = logging.getLogger("spotkeeper.reconcile")


class _Field(NamedTuple):
    """A field with times: itself (``kind`` is "past" or "until"), or in the structs that it holds."""

    name: str
    many: bool
    kind: str


def believed(record: Record, now: float) -> Record:
    """The record itself, unless something in it is said to have happened after ``now`` (virtual unix seconds)."""
    happened = [0.0]
    _collect(record, happened)
    ahead = max(happened) - now
    if ahead <= SKEW_S or record.phase is Phase.DONE:
        return record
    log.warning("job %s: a function's clock was %.0f s ahead; those times are taken as now", record.job, ahead)

    def past(at: float) -> float:
        return min(at, now)

    def until(at: float) -> float:
        """As far away as it was by the clock that said so, or less."""
        return at if at <= now else max(now, at - ahead)

    fuses = record.fuses
    beyond_h = max(0.0, fuses.spent_at - now) / 3600.0
    spent = max(0.0, fuses.spent - beyond_h * (fuses.usd_hour or 0.0))  # of hours that have not been
    return _mended(replace(record, fuses=replace(fuses, spent=spent)), {"past": past, "until": until})


def _collect(one: Struct, into: list[float]) -> None:
    """All times at which something is said to have happened."""
    for name, many, kind in _fields(type(one)):
        value = getattr(one, name)
        if value is None or kind == "until":
            continue
        if kind == "past":
            into.extend(value if many else (value,))
        else:
            for inner in value if many else (value,):
                _collect(inner, into)


def _mended(one: S, how: dict[str, Callable[[float], float]]) -> S:
    changes: dict[str, object] = {}
    for name, many, kind in _fields(type(one)):
        value = getattr(one, name)
        if value is None:
            continue
        mend = how.get(kind, lambda inner: _mended(inner, how))
        changes[name] = tuple(map(mend, value)) if many else mend(value)
    return replace(one, **changes)


@cache
def _fields(of: type[Struct]) -> tuple[_Field, ...]:
    """Where a struct of the record has times, by its types."""
    told = inspect.type_info(of)
    assert isinstance(told, inspect.StructType)
    found = ((field.name, *_inside(field.type)) for field in told.fields)
    return tuple(_Field(name, many, kind) for name, many, kind in found if kind)


def _inside(want: inspect.Type) -> tuple[bool, str]:
    """(a tuple of them?, what kind of time, "struct" for a struct with times, "" for none)."""
    match want:
        case inspect.Metadata():
            return False, str((want.extra or {}).get("clock", ""))
        case inspect.UnionType():
            return max(map(_inside, want.types))
        case inspect.VarTupleType():
            return True, _inside(want.item_type)[1]
        case inspect.StructType():
            return False, "struct" if _fields(want.cls) else ""
    return False, ""


__all__ = ["SKEW_S", "believed"]
