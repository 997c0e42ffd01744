"""Corrects documents that were written by a clock that was ahead: events dated in the future are dated now. Pure.

Every round writes times of its own clock into the record. Clouds keep clocks within seconds of each other. If a clock
jumped ahead, everything that counts from its times (a cold offer, the hour of the launch limit, a roll call) would
stand still until the other clocks reach them. A round that finds such a time writes the corrected record before it
decides anything. A tick does so with the claims of the allocation: else a job would be protected for as long.

The types ``Past`` and ``Until`` in ``contract.record`` mark the times that are corrected. Deadlines of machines
(``Slot.notice``, ``Slot.ends``) do not come from a function's clock, so they stay. ``Record.hold_ends``, the time
when a held job's disks are deleted, is never made earlier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

from msgspec import Struct, inspect
from msgspec.structs import replace

from spotkeeper.contract import codec
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.record import Phase, Record

SKEW_S = 60.0  # most skew between correct clocks, with a margin: Google promises less than a second

S = TypeVar("S", bound=Struct)
log = logging.getLogger("spotkeeper.reconcile")


class _Field(NamedTuple):
    """A field of a struct that has times.

    ``kind``: "past" or "until" if the field is a time; "struct" if its value is another struct that has such fields.
    ``many``: whether the value is a tuple of times or structs.
    """

    name: str
    many: bool
    kind: str


def believed(record: Record, now: float) -> Record:
    """Return the record, corrected if a time in it is after ``now`` (virtual unix seconds)."""
    if record.phase is Phase.DONE or not (ahead := _ahead(record, now, f"job {record.job}")):
        return record
    limits = record.limits
    beyond_h = max(0.0, limits.spent_at - now) / 3600.0
    spent = max(0.0, limits.spent - beyond_h * (limits.usd_hour or 0.0))  # without hours still to come
    return _corrected(replace(record, limits=replace(limits, spent=spent)), _corrections(now, ahead))


def believed_claims(allocation: Allocation, now: float) -> Allocation:
    """Return the allocation, its claims and the teams' use corrected as :func:`believed` corrects a record."""
    ahead = _ahead(allocation, now, "stack/allocation")
    return _corrected(allocation, _corrections(now, ahead)) if ahead else allocation


def _ahead(document: Struct, now: float, name: str) -> float:
    """Return by how many seconds the document's newest event is after ``now``; 0.0 if correct clocks explain it."""
    happened = [0.0]
    _collect(document, happened)
    ahead = max(happened) - now
    if ahead <= SKEW_S:
        return 0.0
    log.warning("%s: a function's clock was %.0f s ahead; its times after now count as now", name, ahead)
    return ahead


def _corrections(now: float, ahead: float) -> dict[str, Callable[[float], float]]:
    def past(at: float) -> float:
        return min(at, now)

    def until(at: float) -> float:
        """Return a planned time, earlier by as much as the writer's clock was ahead, but not earlier than now."""
        return at if at <= now else max(now, at - ahead)

    return {"past": past, "until": until}


def _collect(one: Struct, into: list[float]) -> None:
    """Add the times of all past events in a struct, and in the structs within it, to ``into``."""
    for name, many, kind in _fields(type(one)):
        value = getattr(one, name)
        if value is None or kind == "until":
            continue
        if kind == "past":
            into.extend(value if many else (value,))
        else:
            for inner in value if many else (value,):
                _collect(inner, into)


def _corrected(one: S, how: dict[str, Callable[[float], float]]) -> S:
    changes: dict[str, object] = {}
    for name, many, kind in _fields(type(one)):
        value = getattr(one, name)
        if value is None:
            continue
        correct = how.get(kind, lambda inner: _corrected(inner, how))
        changes[name] = tuple(map(correct, value)) if many else correct(value)
    return replace(one, **changes)


@cache
def _fields(of: type[Struct]) -> tuple[_Field, ...]:
    """Return the fields of a struct that have times, according to their types."""
    told = codec.type_info(of)
    assert isinstance(told, inspect.StructType)
    found = ((field.name, *_inside(field.type)) for field in told.fields)
    return tuple(_Field(name, many, kind) for name, many, kind in found if kind)


def _inside(want: inspect.Type) -> tuple[bool, str]:
    """Return ``many`` and ``kind`` of a field of this type, as in :class:`_Field`; ``kind`` is "" without times."""
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
