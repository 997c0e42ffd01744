"""Read YAML and JSON into strict ``msgspec`` structs, with one line per problem of type, range or spelling::

    job.yaml:7: nodes.mn: unknown key (did you mean min?)
    job.yaml:9: policy: "ballanced": not one of balanced, spot, on-demand, shuffle (did you mean balanced?)

``check.py`` (jobs) and ``infra/settings`` (stacks) check rules that concern several fields and raise the same
``SpecError``. This module uses no network and never replaces an invalid value.
"""

from __future__ import annotations

import io
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import inspect

from spotkeeper.contract import codec
from spotkeeper.contract.parse.problem import Problem, SpecError, argv, join, located, meant, nearest, shown

T = TypeVar("T")

MAX_BYTES = 1_000_000  # largest job or stack file; anything larger is a mistake


def convert(obj: object, type: type[T]) -> T:
    """Convert plain values (from a YAML, JSON or Pulumi configuration reader) to a ``type``.

    Raises:
        SpecError: with every problem.
    """
    if problems := problems_of(obj, type):
        raise SpecError(problems)
    try:
        return codec.convert(obj, type)
    except msgspec.ValidationError as error:  # a rule that problems_of does not know (__post_init__)
        message, _, path = str(error).partition(" - at `$")
        raise SpecError([Problem(path.rstrip("`").strip("."), message)]) from None


def load(path: Path, type: type[T]) -> T:
    """Read a YAML or JSON file as a ``type``.

    Raises:
        SpecError: the file is missing, unreadable, no YAML, or invalid.
    """
    return load_yaml(read_text(path), type, where=path.name)


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        SpecError: the file cannot be read; the message says why.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # bounded: a link to a device would never end
        if len(data) > MAX_BYTES:
            size = f"is larger than {MAX_BYTES // 1000} kB, too much for a job or stack file"
            raise SpecError([Problem("", size, source=str(path))])
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise SpecError([Problem("", "not a text file (UTF-8)", source=str(path))]) from None
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.y*ml"))) if path.parent.is_dir() else None
        raise SpecError([Problem("", "no such file", source=str(path), hint=near)]) from None
    except IsADirectoryError:
        raise SpecError([Problem("", "is a folder, want a file", source=str(path))]) from None
    except OSError as error:
        raise SpecError([Problem("", f"cannot be read: {error.strerror}", source=str(path))]) from None


def load_yaml(text: str, type: type[T], where: str = "") -> T:
    """Read YAML (or JSON) text as a ``type``; ``where`` is the file's name, for messages.

    Raises:
        SpecError: a syntax error (with its line), a duplicate key, or invalid values.
    """
    from spotkeeper.contract.parse.yamltext import read

    document, lines = read(text, where)
    try:
        return convert(document, type)
    except SpecError as error:
        raise located(error, where, lines) from None


def problems_of(obj: object, type: type[T], *, by_hand: bool = False) -> list[Problem]:
    """Return every reason why plain values are not a valid ``type``.

    Args:
        by_hand: whether a user wrote the document, so that an empty value is a mistake. In documents that a program
            wrote, null means "none".
    """
    want = _info(type)  # type: ignore[arg-type]  # mypy looks for __hash__ in the type's values
    return [*_check(obj, want, ""), *(_blanks(obj, want, "") if by_hand else ())]


@cache
def _info(type: type[T]) -> inspect.Type:
    return codec.type_info(type)


def _check(obj: object, want: inspect.Type, path: str) -> Iterator[Problem]:
    match want:
        case inspect.Metadata():
            explain = isinstance(obj, (int, float)) and isinstance(want.type, inspect.UnionType)
            for problem in _check(obj, want.type, path):
                yield _explained(problem, want) if explain else problem
        case inspect.UnionType():
            yield from _check_union(obj, want, path)
        case inspect.EnumType() | inspect.LiteralType():
            yield from _check_choice(obj, want, path)
        case _ if not _fits(obj, want):
            yield _wrong(obj, want, path)
        case inspect.StructType() if isinstance(obj, Mapping):
            yield from _check_struct(obj, want, path)
        case inspect.DictType() if isinstance(obj, Mapping):
            yield from _check_dict(obj, want, path)
        case inspect.VarTupleType() if isinstance(obj, list | tuple):
            yield from _check_list(obj, want, path)
        case inspect.IntType() | inspect.FloatType() if isinstance(obj, int | float):
            yield from _check_number(obj, want, path)
        case inspect.StrType() if isinstance(obj, str):
            yield from _check_text(obj, want, path)


def _wrong(obj: object, want: inspect.Type, path: str) -> Problem:
    message = f"want {describe(want)}"
    if obj is None:
        return Problem(path, f"empty, {message}")
    if isinstance(obj, str) and isinstance(want, inspect.IntType | inspect.FloatType) and _is_number(obj):
        message += ", without quotes"
    if isinstance(obj, str) and obj and isinstance(want, inspect.VarTupleType):
        words = argv(obj) if path == "command" else obj.split()
        message += f", such as {shown(words)}" if words else ""
    if isinstance(obj, (bool, int, float)) and isinstance(want, inspect.StrType):
        message += ": put it in quotes"
    return Problem(path, message, shown(obj))


def _no_key(key: object, path: str) -> Problem:
    return Problem(path, "a key must be a text: put it in quotes", shown(key))


def _explained(problem: Problem, want: inspect.Metadata) -> Problem:
    """Add the field's description, which names the unit, if a number stands in place of a text."""
    about = (want.extra_json_schema or {}).get("description")
    known = about and problem.message == "want a text"
    return replace(problem, message=f"{problem.message}: {about}") if known else problem


def _is_number(text: str) -> bool:
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
    ((inspect.VarTupleType,), (list, tuple)),
)


def _fits(obj: object, want: inspect.Type) -> bool:
    """Whether ``obj`` has the right basic type; ranges are not checked."""
    if isinstance(want, inspect.Metadata):
        return _fits(obj, want.type)
    if isinstance(obj, bool) and isinstance(want, inspect.IntType | inspect.FloatType):
        return False
    return all(isinstance(obj, kinds) for types, kinds in _KINDS if isinstance(want, types))


def _check_union(obj: object, want: inspect.UnionType, path: str) -> Iterator[Problem]:
    """Yield the problems of one option of the union: the option that has the fewest problems."""
    tried = [list(_check(obj, option, path)) for option in want.types if _fits(obj, option)]
    yield from min(tried, key=len) if tried else [_wrong(obj, want, path)]


def _check_struct(obj: Mapping[object, object], want: inspect.StructType, path: str) -> Iterator[Problem]:
    fields = {field.encode_name: field for field in want.fields}
    offered = [name for name, field in fields.items() if _offered(field)]
    hinted: set[str | None] = set()
    for key, value in obj.items():
        if not isinstance(key, str):
            yield _no_key(key, path)
        elif key in fields:
            yield from _check(value, fields[key].type, join(path, key))
        elif want.forbid_unknown_fields and key != want.tag_field:
            near = nearest(key, (name for name in fields if name not in obj)) or nearest(key, fields)
            hint = meant(key, offered) or (near if near in offered else None)
            hinted.add(hint)
            known = "" if hint else f", want one of {', '.join(offered)}"
            yield Problem(join(path, key), f"unknown key{known}", hint=hint)
    for name, field in fields.items():
        if field.required and name not in obj and name not in hinted:
            yield Problem(join(path, name), f"missing, want {describe(field.type)}")


def _check_dict(obj: Mapping[object, object], want: inspect.DictType, path: str) -> Iterator[Problem]:
    for key, value in obj.items():
        if isinstance(key, str):
            yield from _check(key, want.key_type, join(path, key))
            yield from _check(value, want.value_type, join(path, key))
        else:
            yield _no_key(key, path)


def _blanks(obj: object, want: inspect.Type, path: str) -> Iterator[Problem]:
    """Yield a problem for each optional field that a user left empty, since an empty limit would set no limit."""
    match want:
        case inspect.Metadata(extra_json_schema={"minItems": 1}) if isinstance(obj, list | tuple) and not obj:
            yield Problem(path, f"empty, want {describe(want)} with at least 1, or leave it out", shown(obj))
        case inspect.Metadata():
            yield from _blanks(obj, want.type, path)
        case inspect.UnionType():
            for option in filter(lambda each: _fits(obj, each), want.types):
                yield from _blanks(obj, option, path)
        case inspect.StructType() if isinstance(obj, Mapping):
            for field in want.fields:
                value, inner = obj.get(field.encode_name, field), join(path, field.encode_name)
                if value is None and _may_be_none(field.type):
                    yield Problem(inner, f"empty, want {describe(field.type)}, or leave it out")
                elif value is not field:
                    yield from _blanks(value, field.type, inner)
        case inspect.DictType() if isinstance(obj, Mapping):
            for key, value in obj.items():
                yield from _blanks(value, want.value_type, join(path, str(key)))
        case inspect.VarTupleType() if isinstance(obj, list | tuple):
            for index, item in enumerate(obj):
                yield from _blanks(item, want.item_type, join(path, index))


def _may_be_none(want: inspect.Type) -> bool:
    if isinstance(want, inspect.Metadata):
        return _may_be_none(want.type)
    return isinstance(want, inspect.UnionType) and any(isinstance(one, inspect.NoneType) for one in want.types)


def _offered(field: inspect.Field) -> bool:
    """Whether messages may suggest the field to a user."""
    return not (isinstance(field.type, inspect.Metadata) and (field.type.extra or {}).get("offered") is False)


def _check_list(obj: list[object] | tuple[object, ...], want: inspect.VarTupleType, path: str) -> Iterator[Problem]:
    if want.min_length and len(obj) < want.min_length:
        yield Problem(path, f"too short, want {describe(want)}", shown(obj))
    if want.max_length is not None and len(obj) > want.max_length:
        yield Problem(path, f"has {len(obj)} entries, at most {want.max_length} are allowed")
    for index, item in enumerate(obj):
        yield from _check(item, want.item_type, join(path, index))


def _check_choice(obj: object, want: inspect.EnumType | inspect.LiteralType, path: str) -> Iterator[Problem]:
    options = _options(want)
    if obj is None:
        yield Problem(path, f"empty, want {describe(want)}")
    elif not (isinstance(obj, str) and obj in options):
        hint = meant(obj, options) or nearest(obj, options) if isinstance(obj, str) else None
        quotes = ": put it in quotes" if isinstance(obj, int | float) and any(map(_is_number, options)) else ""
        yield Problem(path, f"not {describe(want)}{quotes}", shown(obj), hint)


def _options(want: inspect.EnumType | inspect.LiteralType) -> list[str]:
    values = [member.value for member in want.cls] if isinstance(want, inspect.EnumType) else want.values
    return [str(value) for value in values]


def _check_number(obj: float, want: inspect.IntType | inspect.FloatType, path: str) -> Iterator[Problem]:
    if isinstance(obj, float) and not math.isfinite(obj):
        yield Problem(path, "want a finite number", str(obj))
        return
    for bound, compare, words in (
        (want.ge, operator.ge, "at least"),
        (want.gt, operator.gt, "more than"),
        (want.le, operator.le, "at most"),
        (want.lt, operator.lt, "less than"),
    ):
        if bound is not None and not compare(obj, bound):
            yield Problem(path, f"must be {words} {int(bound) if bound == int(bound) else bound}", shown(obj))


def _check_text(obj: str, want: inspect.StrType, path: str) -> Iterator[Problem]:
    if any("\ud800" <= letter <= "\udfff" for letter in obj):
        yield Problem(path, "contains half a character (a lone surrogate): remove it")
        return
    if want.min_length and len(obj) < want.min_length:
        yield Problem(path, "must not be empty" if not obj else f"want at least {want.min_length} characters")
    if want.max_length is not None and len(obj) > want.max_length:
        yield Problem(path, f"has {len(obj)} characters, at most {want.max_length} are allowed")
    if want.pattern is not None and not re.search(want.pattern, obj):
        yield Problem(path, f"does not match {want.pattern}", shown(obj))


_WORDS: dict[type, tuple[str, str]] = {  # singular, plural
    inspect.StrType: ("a text", "texts"),
    inspect.IntType: ("a whole number", "whole numbers"),
    inspect.FloatType: ("a number", "numbers"),
    inspect.BoolType: ("true or false", "values"),
    inspect.NoneType: ("nothing", "values"),
    inspect.StructType: ("a mapping", "mappings"),
}


def describe(want: inspect.Type) -> str:
    """Return a type in words: ``a whole number``, ``a list of texts``."""
    words = _WORDS.get(type(want), ("another value", ""))[0]
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
        case inspect.VarTupleType():
            least = f" with at least {want.min_length}" if want.min_length else ""
            words = f"a list of {_plural(want.item_type)}{least}"
        case inspect.EnumType() | inspect.LiteralType():
            words = f"one of {', '.join(_options(want))}"
    return words


def _plural(want: inspect.Type) -> str:
    return _WORDS.get(type(want), ("", "values"))[1]
