"""Checks every Compute Engine and Cloud Storage body of a test against Google's discovery documents.

A document ships inside google-api-python-client; nothing is fetched. Its schemas become JSON
Schema with ``additionalProperties: false``, so a misspelt field, a wrong type or an unknown enum
value fails. It does not hold cross-field rules (spot with automaticRestart) or label characters.

    validate_request("compute.instances.insert", body)
    validate_response("compute.instances.insert", operation)
    validate_query("compute.instances.insert", {"requestId": "..."})
    match("POST", "/compute/v1/projects/p/zones/z/instances") -> Match("compute.instances.insert", {...})

Compute Engine v1 is meant where no other API is named (``BETA``, ``STORAGE``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from spotkeeper.local.compute.query import Mask, parse_mask

Json = Any  # a decoded JSON value

COMPUTE, BETA, STORAGE = "compute.v1", "compute.beta", "storage.v1"
_TYPES: dict[str, Json] = {
    "string": {"type": "string"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "any": {},
}
_FORMATS: dict[str, Json] = {
    # JSON has no 64-bit integers: Google sends and takes them as strings of digits.
    "int64": {"pattern": r"^-?[0-9]+$"},
    "uint64": {"pattern": r"^[0-9]+$"},
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "uint32": {"minimum": 0, "maximum": 2**32 - 1},
    "byte": {"pattern": r"^[-A-Za-z0-9+/_=]*$"},
}


class Match(NamedTuple):
    """The documented method of an HTTP request, with its path parameters."""

    method_id: str
    params: dict[str, str]


@cache
def document(api: str = COMPUTE) -> Json:
    """An API's discovery document (Compute Engine's: 5 MB, 0.1 s, once per process)."""
    import googleapiclient

    path = Path(googleapiclient.__file__).parent / f"discovery_cache/documents/{api}.json"
    return json.loads(path.read_text("utf-8"))


@cache
def methods(api: str = COMPUTE) -> dict[str, Json]:
    """Method id -> its description, for all resources."""
    return {method["id"]: method for method in _walk(document(api))}


def _walk(node: Json) -> Iterator[Json]:
    yield from node.get("methods", {}).values()
    for child in node.get("resources", {}).values():
        yield from _walk(child)


def to_json_schema(node: Json) -> Json:
    """One discovery schema node as JSON Schema; references point into ``$defs``."""
    if "$ref" in node:
        return {"$ref": f"#/$defs/{node['$ref']}"}
    kind = node.get("type", "any")
    if kind == "array":
        return {"type": "array", "items": to_json_schema(node["items"])}
    if kind == "object":
        extra = node.get("additionalProperties")
        return {
            "type": "object",
            "properties": {name: to_json_schema(child) for name, child in node.get("properties", {}).items()},
            "additionalProperties": to_json_schema(extra) if extra else False,
        }
    schema = {**_TYPES[kind], **_FORMATS.get(node.get("format", ""), {})}
    if "enum" in node:
        schema["enum"] = node["enum"]
    if "pattern" in node:
        schema["pattern"] = f"^(?:{node['pattern']})$"
    return schema


@cache
def _definitions(api: str) -> dict[str, Json]:
    return {name: to_json_schema(node) for name, node in document(api)["schemas"].items()}


@cache
def _validator(schema: str, api: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{schema}", "$defs": _definitions(api)})


def validate_schema(schema: str, body: Json, api: str = COMPUTE) -> None:
    """Check a body against a named schema ("Instance", "Operation", ...).

    Raises:
        AssertionError: every error with its JSON path.
    """
    errors = [f"{error.json_path}: {error.message[:300]}" for error in _validator(schema, api).iter_errors(body)]
    if errors:
        raise AssertionError(f"not a {schema}: " + "; ".join(errors))


def _method(method_id: str, api: str = COMPUTE) -> Json:
    found = methods(api).get(method_id)
    if found is None:
        raise AssertionError(f"{method_id}: no such method in {api}")
    return found


def validate_request(method_id: str, body: Json, api: str = COMPUTE) -> None:
    """The request body of a method; None where the method takes none."""
    wanted = _method(method_id, api).get("request")
    if wanted is None:
        assert body in (None, b"", ""), f"{method_id} takes no body, got {body!r}"
        return
    validate_schema(wanted["$ref"], body, api)


def validate_response(method_id: str, body: Json, api: str = COMPUTE) -> None:
    """The body of a successful answer; None where the method gives none."""
    wanted = _method(method_id, api).get("response")
    if wanted is None:
        assert body is None, f"{method_id} answers nothing, got {body!r}"
        return
    validate_schema(wanted["$ref"], body, api)


def validate_error(body: Json) -> None:
    """The envelope of an error answer, which the discovery document does not describe."""
    error = body["error"]
    assert isinstance(error["code"], int) and isinstance(error["message"], str), f"not an error envelope: {body!r}"
    for entry in error["errors"]:
        assert {"message", "domain", "reason"} <= entry.keys(), f"error entry without message/domain/reason: {entry!r}"


def validate_query(method_id: str, query: Mapping[str, str]) -> None:
    """Query parameters, as the strings they are on the wire."""
    known = {name: spec for name, spec in _method(method_id)["parameters"].items() if spec["location"] == "query"}
    known |= document()["parameters"]
    for name, value in query.items():
        assert name in known, f"{method_id}: unknown query parameter {name!r} (known: {', '.join(sorted(known))})"
        kind = known[name].get("type")
        if kind == "boolean":
            assert value in ("true", "false"), f"{method_id}: {name}={value!r} is no boolean"
        if kind == "integer":
            assert re.fullmatch(r"-?\d+", value), f"{method_id}: {name}={value!r} is no integer"
        if name == "fields":
            _validate_mask(_method(method_id)["response"], parse_mask(value), method_id)
        if "enum" in known[name]:
            assert value in known[name]["enum"], f"{method_id}: {name}={value!r} is not one of {known[name]['enum']}"


def _validate_mask(node: Json, mask: Mask, at: str) -> None:
    """Every selected field is one of its schema: an unknown one is a 400 for the whole request."""
    while "$ref" in node or node.get("type") == "array":
        node = document()["schemas"][node["$ref"]] if "$ref" in node else node["items"]
    for name, below in mask.items():
        child = node.get("properties", {}).get(name) or (node.get("additionalProperties") if name == "*" else None)
        assert child, f"{at}: the mask selects {name!r}, which the answer has not"
        _validate_mask(child, below, f"{at}.{name}")


@cache
def _routes(api: str) -> list[tuple[str, re.Pattern[str], str]]:
    routes = []
    for method in methods(api).values():
        pattern = re.sub(r"\{\+?(\w+)\}", lambda m: f"(?P<{m[1]}>[^/]+)", method.get("flatPath", method["path"]))
        routes.append((method["httpMethod"], re.compile(pattern + r"\Z"), method["id"]))
    return routes


def match(http_method: str, path: str, api: str = COMPUTE) -> Match | None:
    """The documented method behind an HTTP request (path without query, names as they are quoted), or None."""
    prefix = f"/{document(api)['servicePath']}"
    if not path.startswith(prefix):
        return None
    for verb, pattern, method_id in _routes(api):
        found = pattern.match(path[len(prefix) :]) if verb == http_method else None
        if found and all(
            re.fullmatch(_method(method_id, api)["parameters"][name].get("pattern", ".*"), value)
            for name, value in found.groupdict().items()
        ):
            return Match(method_id, found.groupdict())
    return None
