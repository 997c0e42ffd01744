"""What a resource of the SDK takes, read from its own ``Args`` class, and what is wrong with inputs for it.

A shape is JSON, so that the stand-in provider, a process for each run of the engine, need not load the SDK: ``{}`` is
anything, ``{"type": "str"}`` a scalar, ``{"list": shape}``, ``{"map": shape}``, ``{"fields": {name: shape}}``.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any

Shape = dict[str, Any]
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
_SCALARS = {str: "str", int: "int", float: "float", bool: "bool"}
_FITS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int, float), "float": (int, float), "bool": (bool,)}


def shape_of(type_: str) -> Shape:
    """Of a resource type, ``gcp:compute/disk:Disk``.

    Raises:
        LookupError: the SDK has no such resource.
    """
    package, module, name = type_.split(":")
    folder, file = module.split("/")
    owner = {"lambda": "lambda_"}.get(folder, folder)
    # By attributes, as programs do: the SDK's modules are lazy, and one that is first touched by importing from below
    # it stays half loaded for whoever comes later.
    try:
        getattr(getattr(importlib.import_module(f"pulumi_{package}"), owner), name)
        found = sys.modules[f"pulumi_{package}.{owner}.{_snake(file)}"]
        return _fields(getattr(found, f"{name}Args"))
    except AttributeError:
        raise LookupError(f"{type_}: the SDK has no {name}Args") from None


def _snake(name: str) -> str:
    """As the SDK names its files: ``iAMCustomRole`` -> ``iam_custom_role``, ``bucketObjectv2`` stays."""
    name = re.sub(r"^iAM", "iam_", name) if name.startswith("iAM") else name
    name = re.sub(r"IAM", "_iam_", name)
    return re.sub(r"_+", "_", re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name)).strip("_").lower()


def _fields(args: type) -> Shape:
    from pulumi import _types

    types = _types.input_type_types(args)
    needed = [
        parameter.name
        for parameter in inspect.signature(args.__init__).parameters.values()  # type: ignore[misc]
        if parameter.default is inspect.Parameter.empty and parameter.name not in ("__self__", "self")
    ]
    names = _types.input_type_py_to_pulumi_names(args)
    return {
        "fields": {name: _shape(each) for name, each in types.items()},
        "needed": sorted(names[name] for name in needed if name in names),
    }


def _shape(hint: Any) -> Shape:
    from pulumi import Output, _types

    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if _types.is_input_type(hint):
        return _fields(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        kept = [each for each in arguments if each is not type(None) and not _awaited(each, Output)]
        return _shape(kept[0]) if kept else {}
    if origin is None or not arguments:
        return {}
    if issubclass(origin, Mapping):
        return {"map": _shape(arguments[1])}
    return {"list": _shape(arguments[0])} if issubclass(origin, typing.Sequence) else {}


def _awaited(hint: Any, output: type) -> bool:
    origin = typing.get_origin(hint) or hint
    return inspect.isclass(origin) and issubclass(origin, output | typing.Awaitable)  # type: ignore[operator]


def problems(shape: Shape, value: Any, path: str = "") -> list[str]:
    """What the SDK's types do not know of these inputs: names, and scalars of another kind.

    Of a value that only another resource's creation will tell, a preview has the engine's word for it, whatever it
    will be: it is there, and no more can be said.
    """
    if value is None or value == UNKNOWN or not shape:
        return []
    if "fields" in shape:
        return _of_fields(shape, value, path) if isinstance(value, Mapping) else [f"{path}: want an object"]
    if "list" in shape:
        items = enumerate(value) if isinstance(value, (list, tuple)) else None
        return (
            _each(shape["list"], ((f"[{at}]", item) for at, item in items), path) if items else [f"{path}: want a list"]
        )
    if "map" in shape:
        pairs = ((f".{key}", item) for key, item in value.items()) if isinstance(value, Mapping) else None
        return _each(shape["map"], pairs, path) if pairs else [f"{path}: want a map"]
    return _of_scalar(shape["type"], value, path)


def _each(shape: Shape, items: Iterable[tuple[str, Any]], path: str) -> list[str]:
    return [each for at, item in items for each in problems(shape, item, f"{path}{at}")]


def _of_fields(shape: Shape, value: Mapping[str, Any], path: str) -> list[str]:
    known, before = shape["fields"], f"{path}." if path else ""
    wrong = [f"{before}{key}: unknown" for key in value if key not in known]
    wrong += [f"{before}{key}: missing" for key in shape["needed"] if value.get(key) is None]
    return wrong + [
        each for key in value if key in known for each in problems(known[key], value[key], f"{before}{key}")
    ]


def _of_scalar(kind: str, value: object, path: str) -> list[str]:
    """True and 1 are equal to Python, and not to a provider. An asset stands where a path may: it is let through."""
    fits = isinstance(value, _FITS[kind]) and (not isinstance(value, bool) or kind == "bool")
    if fits or not isinstance(value, (str, int, float, bool)):
        return []
    return [f"{path}: want {kind}, not {value!r}"]
