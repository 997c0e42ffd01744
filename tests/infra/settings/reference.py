"""Write the table of fields in `docs/stack-file.md`: ``python -m tests.infra.settings.reference``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, inspect

from infra.settings.model import Settings, Team

PAGE = Path(__file__).resolve().parents[3] / "docs/stack-file.md"
BEGINS, ENDS = "<!-- fields: python -m tests.infra.settings.reference -->\n", "<!-- end of fields -->\n"
HEAD = "| Field | Is | Unset | Means |\n|---|---|---|---|\n"


def table() -> str:
    return HEAD + "".join(f"| `{path}` | {kind} | {unset} | {words} |\n" for path, kind, unset, words in rows())


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(path, kind, default, words) of every field that one may write, in the model's order."""
    yield from _of(inspect.type_info(Settings), "")


def _of(struct: Any, path: str) -> Iterator[tuple[str, str, str, str]]:
    for field in struct.fields:
        kind, words, offered = _unwrapped(field.type)
        if not offered:
            continue
        here = f"{path}{field.encode_name}"
        if isinstance(kind, inspect.StructType):
            yield from _of(kind, f"{here}.")
        elif isinstance(kind, inspect.VarTupleType) and isinstance(kind.item_type, inspect.StructType):
            yield from _of(kind.item_type, f"{here}[].")
        elif isinstance(kind, inspect.DictType) and getattr(kind.value_type, "cls", None) is Team:
            yield from _of(kind.value_type, f"{here}.<name>.")
        else:
            yield here, _words(kind), _unset(field), words.replace("<", "&lt;")


def _unwrapped(kind: Any) -> tuple[Any, str, bool]:
    """(the type, its words, whether messages offer it), without what is around it."""
    words, offered = "", True
    while True:
        if isinstance(kind, inspect.Metadata):
            words = words or (kind.extra_json_schema or {}).get("description", "")
            offered = offered and (kind.extra or {}).get("offered", True)
            kind = kind.type
        elif isinstance(kind, inspect.UnionType) and len(some := _some(kind)) == 1:
            kind = some[0]
        else:
            return kind, words, offered


def _some(union: inspect.UnionType) -> list[Any]:
    return [one for one in union.types if not isinstance(one, inspect.NoneType)]


def _words(kind: Any) -> str:
    match kind:
        case inspect.LiteralType() | inspect.EnumType():
            values = kind.values if isinstance(kind, inspect.LiteralType) else (one.value for one in kind.cls)
            return ", ".join(sorted(map(str, values)))
        case inspect.BoolType():
            return "true, false"
        case inspect.IntType() | inspect.FloatType():
            least = "" if kind.ge is None else f"{kind.ge:,}"
            least = f"above {kind.gt:,}" if kind.gt is not None else least
            return f"{least} to {kind.le:,}" if kind.le is not None else f"{least} or more" if kind.ge else least
        case inspect.VarTupleType():
            item = _words(_unwrapped(kind.item_type)[0])
            return "texts" if item == "text" else f"list of {item}"
        case inspect.DictType():
            return "names to " + ("prices" if isinstance(kind.value_type, inspect.StructType) else "texts")
    return "text"


def _unset(field: Any) -> str:
    if field.required:
        return "required"
    if field.default is NODEFAULT or field.default in (None, "", ()):
        return ""
    return f"`{json.dumps(field.default)}`".replace('"', "")


def written(page: str) -> str:
    """The table as the page has it."""
    return page.partition(BEGINS)[2].partition(ENDS)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(BEGINS + written(text) + ENDS, BEGINS + table() + ENDS))
