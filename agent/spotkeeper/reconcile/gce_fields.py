"""Which fields a list is asked for: those that are read of it, and no others.

An instance is 4 KB of JSON, of which a tenth is read; a look at 10,000 of them is 40 MB without this. The names
come from the structs that the answers are decoded into, so that nothing is read that was not asked for.
The grammar is Google's for partial responses (``items/*/instances(name,disks(source))``).
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import inspect

from spotkeeper.reconcile.gce_wire import Part

MORE = "nextPageToken,warning/code"


def of_a_page(kind: type) -> str:
    """Of a plain list, for pages of this kind of thing."""
    return f"items({_read_of(kind)}),{MORE}"


def of_all_zones(what: str, kind: type) -> str:
    """Of an aggregated list: the things, and by zone and in all who did not answer."""
    return f"items/*/{what}({_read_of(kind)}),items/*/warning/code,unreachables,{MORE}"


@lru_cache(maxsize=16)
def _read_of(kind: object) -> str:
    return _names(inspect.type_info(kind))


def _names(of: inspect.Type) -> str:
    """The fields of a part of an answer, as far down as there are parts; '' for what is wanted whole."""
    if isinstance(of, inspect.UnionType):
        return next((found for one in of.types if (found := _names(one))), "")
    if isinstance(of, inspect.VarTupleType):
        return _names(of.item_type)
    if not isinstance(of, inspect.StructType) or not issubclass(of.cls, Part):
        return ""
    return ",".join(_name(field.encode_name, _names(field.type)) for field in of.fields)


def _name(name: str, within: str) -> str:
    return f"{name}({within})" if within else name
