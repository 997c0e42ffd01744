"""Whether plain values (dicts, lists, texts, numbers) are of a type, and in words what of them is not.

It knows types, ranges and spelling only, and finds everything at once.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from msgspec import inspect

from spotkeeper.spec import synonyms
from spotkeeper.spec.command import argv
from spotkeeper.spec.problem import Problem, join, nearest, shown

T = TypeVar("T")


def problems_of(obj: object, type: type[T], where: str = "", *, by_hand: bool = False) -> list[Problem]:
    """Everything about plain values that is not a ``type``. Arguments as for :func:`convert`.

    Args:
        by_hand: people wrote it. They who leave a value empty do not mean "none"; a program that writes null does.
    """
    problems: list[Problem] = []
    want = inspect.type_info(type)
    _check(obj, want, where, problems)
    return [*problems, *_blanks(obj, want, where)] if by_hand else problems


def _check(obj: object, want: inspect.Type, path: str, out: list[Problem]) -> None:
    """Add to ``out`` everything about ``obj`` that is not a ``want``."""
    match want:
        case inspect.Metadata():
            before = len(out)
            _check(obj, want.type, path, out)
            if len(out) > before and isinstance(obj, (int, float)) and isinstance(want.type, inspect.UnionType):
                out[before:] = [_explained(problem, want) for problem in out[before:]]
        case inspect.UnionType():
            _check_union(obj, want, path, out)
        case inspect.StructType():
            _check_struct(obj, want, path, out)
        case inspect.DictType():
            _check_dict(obj, want, path, out)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            _check_list(obj, want, path, out)
        case inspect.EnumType() | inspect.LiteralType():
            _check_choice(obj, want, path, out)
        case _ if not _fits(obj, want):
            out.append(_wrong(obj, want, path))
        case inspect.IntType() | inspect.FloatType():
            _check_number(obj, want, path, out)
        case inspect.StrType():
            _check_text(obj, want, path, out)


def _wrong(obj: object, want: inspect.Type, path: str) -> Problem:
    message = f"want {describe(want)}"
    if obj is None:
        return Problem(path, f"empty, {message}")
    if isinstance(obj, str) and isinstance(want, inspect.IntType | inspect.FloatType) and _number(obj):
        message += ", without quotes"
    if isinstance(obj, str) and obj and isinstance(want, inspect.VarTupleType | inspect.ListType):
        words = argv(obj) if path == "command" else obj.split()
        message += f", such as {shown(words)}" if words else ""
    if isinstance(obj, (bool, int, float)) and isinstance(want, inspect.StrType):
        message += ": put it in quotes"
    return Problem(path, message, shown(obj))


def _explained(problem: Problem, want: inspect.Metadata) -> Problem:
    """A number where a text is wanted: quotes alone would not make it one (`work: 10`), what the field is for may."""
    about = (want.extra_json_schema or {}).get("description")
    known = about and problem.message == "want a text"
    return replace(problem, message=f"{problem.message}: {about}") if known else problem


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


_KINDS: tuple[tuple[tuple[type, ...], tuple[type, ...]], ...] = (
    ((inspect.NoneType,), (type(None),)),
    ((inspect.BoolType,), (bool,)),
    ((inspect.IntType,), (int,)),
    ((inspect.FloatType,), (int, float)),
    ((inspect.StrType, inspect.EnumType, inspect.LiteralType), (str,)),
    ((inspect.StructType, inspect.DictType), (Mapping,)),
    ((inspect.VarTupleType, inspect.ListType, inspect.SetType, inspect.FrozenSetType), (list, tuple)),
)


def _fits(obj: object, want: inspect.Type) -> bool:
    """Whether the plain kind of ``obj`` is right, before any range."""
    if isinstance(want, inspect.Metadata):
        return _fits(obj, want.type)
    if isinstance(obj, bool) and isinstance(want, inspect.IntType | inspect.FloatType):
        return False
    return all(isinstance(obj, kinds) for types, kinds in _KINDS if isinstance(want, types))


def _check_union(obj: object, want: inspect.UnionType, path: str, out: list[Problem]) -> None:
    fitting = [option for option in want.types if _fits(obj, option)]
    if not fitting:
        out.append(_wrong(obj, want, path))
        return
    best: list[Problem] | None = None  # of the option that fits most
    for option in fitting:
        found: list[Problem] = []
        _check(obj, option, path, found)
        if not found:
            return
        best = found if best is None or len(found) < len(best) else best
    out.extend(best or ())


def _check_struct(obj: object, want: inspect.StructType, path: str, out: list[Problem]) -> None:
    if not isinstance(obj, Mapping):
        out.append(_wrong(obj, want, path))
        return
    fields = {field.encode_name: field for field in want.fields}
    offered = [name for name, field in fields.items() if _offered(field)]
    meant: set[str] = set()
    for key, value in obj.items():
        if not isinstance(key, str):
            out.append(Problem(path, "a key must be a text: put it in quotes", shown(key)))
        elif key in fields:
            _check(value, fields[key].type, join(path, key), out)
        elif want.forbid_unknown_fields and key != want.tag_field:
            near = nearest(key, (name for name in fields if name not in obj)) or nearest(key, fields)
            hint = synonyms.meant(key, offered) or (near if near in offered else None)
            meant.add(hint or "")
            known = "" if hint else f", want one of {', '.join(offered)}"
            out.append(Problem(join(path, key), f"unknown key{known}", hint=hint))
    for name, field in fields.items():
        if field.required and name not in obj and name not in meant:
            out.append(Problem(join(path, name), f"missing, want {describe(field.type)}"))


def _blanks(obj: object, want: inspect.Type, path: str) -> Iterator[Problem]:
    """Optional fields without a value: somebody began to write a cap, or copies of checkpoints, and would have none."""
    match want:
        case inspect.Metadata():
            yield from _blanks(obj, want.type, path)
        case inspect.UnionType():
            for option in filter(lambda each: _fits(obj, each), want.types):
                yield from _blanks(obj, option, path)
        case inspect.StructType() if isinstance(obj, Mapping):
            for field in want.fields:
                value, inner = obj.get(field.encode_name, field), join(path, field.encode_name)
                if value is None and _may_be_nothing(field.type):
                    yield Problem(inner, f"empty, want {describe(field.type)}, or leave it out")
                elif value is not field:
                    yield from _blanks(value, field.type, inner)
        case inspect.VarTupleType() | inspect.ListType() if isinstance(obj, list | tuple):
            for index, item in enumerate(obj):
                yield from _blanks(item, want.item_type, join(path, index))


def _may_be_nothing(want: inspect.Type) -> bool:
    if isinstance(want, inspect.Metadata):
        return _may_be_nothing(want.type)
    return isinstance(want, inspect.UnionType) and any(isinstance(one, inspect.NoneType) for one in want.types)


def _offered(field: inspect.Field) -> bool:
    """Whether messages may name it to somebody who writes a document."""
    return not (isinstance(field.type, inspect.Metadata) and (field.type.extra or {}).get("offered") is False)


def _check_dict(obj: object, want: inspect.DictType, path: str, out: list[Problem]) -> None:
    if not isinstance(obj, Mapping):
        out.append(_wrong(obj, want, path))
        return
    for key, value in obj.items():
        if not isinstance(key, str):
            out.append(Problem(path, "a key must be a text: put it in quotes", shown(key)))
            continue
        _check(key, want.key_type, join(path, key), out)
        _check(value, want.value_type, join(path, key), out)


def _check_list(
    obj: object,
    want: inspect.VarTupleType | inspect.ListType | inspect.SetType | inspect.FrozenSetType,
    path: str,
    out: list[Problem],
) -> None:
    if not isinstance(obj, (list, tuple)):
        out.append(_wrong(obj, want, path))
        return
    if want.min_length and len(obj) < want.min_length:
        out.append(Problem(path, f"too short, want {describe(want)}", shown(obj)))
    if want.max_length is not None and len(obj) > want.max_length:
        out.append(Problem(path, f"has {len(obj)} entries, at most {want.max_length} are allowed"))
    for index, item in enumerate(obj):
        _check(item, want.item_type, join(path, index), out)


def _check_choice(obj: object, want: inspect.EnumType | inspect.LiteralType, path: str, out: list[Problem]) -> None:
    options = _options(want)
    if isinstance(obj, str) and obj in options:
        return
    if obj is None:
        out.append(Problem(path, f"empty, want {describe(want)}"))
        return
    hint = synonyms.meant(obj, options) or nearest(obj, options) if isinstance(obj, str) else None
    quotes = ": put it in quotes" if isinstance(obj, int | float) and any(map(_number, options)) else ""
    out.append(Problem(path, f"not {describe(want)}{quotes}", shown(obj), hint))


def _options(want: inspect.EnumType | inspect.LiteralType) -> list[str]:
    if isinstance(want, inspect.EnumType):
        return [str(member.value) for member in want.cls]
    return [str(value) for value in want.values]


def _check_number(obj: object, want: inspect.IntType | inspect.FloatType, path: str, out: list[Problem]) -> None:
    assert isinstance(obj, (int, float))
    if isinstance(obj, float) and not math.isfinite(obj):
        out.append(Problem(path, "want a finite number", str(obj)))
        return
    for bound, compare, words in (
        (want.ge, operator.ge, "at least"),
        (want.gt, operator.gt, "more than"),
        (want.le, operator.le, "at most"),
        (want.lt, operator.lt, "less than"),
    ):
        if bound is not None and not compare(obj, bound):
            out.append(Problem(path, f"must be {words} {int(bound) if bound == int(bound) else bound}", shown(obj)))


def _check_text(obj: object, want: inspect.StrType, path: str, out: list[Problem]) -> None:
    assert isinstance(obj, str)
    if any("\ud800" <= letter <= "\udfff" for letter in obj):
        out.append(Problem(path, "holds half a character (a lone surrogate): remove it"))
        return
    if want.min_length and len(obj) < want.min_length:
        out.append(Problem(path, "must not be empty" if not obj else f"want at least {want.min_length} characters"))
    if want.max_length is not None and len(obj) > want.max_length:
        out.append(Problem(path, f"has {len(obj)} characters, at most {want.max_length} are allowed"))
    if want.pattern is not None and not re.search(want.pattern, obj):
        out.append(Problem(path, f"does not match {want.pattern}", shown(obj)))


def describe(want: inspect.Type) -> str:
    """What a type asks for, in words: ``a whole number``, ``a list of texts``."""
    words = _WORDS.get(type(want), "another value")
    match want:
        case inspect.Metadata():
            words = describe(want.type)
        case inspect.UnionType():
            words = " or ".join(describe(option) for option in want.types if not isinstance(option, inspect.NoneType))
        case inspect.StructType():
            names = [field.encode_name for field in want.fields]
            words = f"a mapping with {', '.join(names[:4] + ['...'] * (len(names) > 4))}"
        case inspect.DictType():
            words = f"a mapping of names to {_plural(want.value_type)}"
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType() | inspect.FrozenSetType():
            least = f" with at least {want.min_length}" if want.min_length else ""
            words = f"a list of {_plural(want.item_type)}{least}"
        case inspect.EnumType() | inspect.LiteralType():
            words = f"one of {', '.join(_options(want))}"
    return words


_WORDS: dict[type, str] = {
    inspect.StrType: "a text",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
    inspect.NoneType: "nothing",
}


def _plural(want: inspect.Type) -> str:
    words: dict[type, str] = {
        inspect.StrType: "texts",
        inspect.IntType: "whole numbers",
        inspect.FloatType: "numbers",
        inspect.StructType: "mappings",
    }
    return words.get(type(want), "values")
