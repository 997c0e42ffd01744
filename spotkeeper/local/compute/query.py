"""Implements query parameters: ``filter``, ``orderBy`` and pages for lists, ``fields`` for any answer.

Filters are the AIP-160 subset that Spotkeeper sends, and the ``eq`` regular expressions of gcloud:

    labels.sk-stack = demo AND labels.sk-job:*         (a key that is set)
    (labels.sk-stack eq "demo") (name eq ".*-n0001-.*") AND status != RUNNING
    (name = "a") OR (name = "b")

An unsupported filter gets 400, as on Compute Engine, so that a list never has more items than the filter allows.
"""

from __future__ import annotations

import base64
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import ApiCall, last
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.core.world import World

MAX_RESULTS = 500
NEWEST = "creationTimestamp desc"
_TOKEN = re.compile(
    r"""\s*(?:(?P<paren>[()])|(?P<op>!=|>=|<=|=|:|<|>|\beq\b|\bne\b)|(?P<word>AND|OR|NOT)\b"""
    r"""|"(?P<quoted>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'|(?P<bare>[^\s()=!:<>"']+))"""
)
_OPEN, _CLOSE = ("paren", "("), ("paren", ")")
_OPERATORS = (("word", "AND"), ("word", "OR"))
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Filter:
    """A parsed filter: groups joined by OR; a group's terms are joined by AND."""

    any_of: tuple[tuple[_Term, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Parse a filter expression; ApiError (400) with the invalid part."""
        groups: list[list[_Term]] = [[]]
        tokens = list(_tokens(text))
        depth, due = 0, bool(tokens)  # open parentheses; whether a term must follow
        while tokens:
            token = tokens[0]
            if token in _OPERATORS or token == _CLOSE:
                if due:
                    raise _invalid(text, "Invalid list filter expression.")
                if token == ("word", "OR"):
                    groups.append([])
                due = token != _CLOSE
                depth -= token == _CLOSE
                if depth < 0:
                    break
                tokens.pop(0)
            elif token == _OPEN:
                depth, due = depth + 1, True
                tokens.pop(0)
            else:
                groups[-1].append(_term(tokens, text))
                due = False
        if depth or due:
            raise _invalid(text, "Invalid list filter expression.")
        if len(groups) > 1 and "(" not in text:  # OR needs parentheses
            raise _invalid(text, "Invalid list filter expression.")
        if len(groups) > 1 and any(len(group) > 1 for group in groups):
            raise _invalid(text, "A filter with both AND and OR is not supported.")
        return cls(tuple(tuple(group) for group in groups))

    def matches(self, resource: JsonObject) -> bool:
        return any(all(term.matches(resource) for term in group) for group in self.any_of)


@dataclass(frozen=True)
class _Term:
    path: str
    op: str
    value: str
    negated: bool = False

    def matches(self, resource: JsonObject) -> bool:
        return self._holds(look_up(resource, self.path)) is not self.negated

    def _holds(self, found: JsonValue) -> bool:
        if self.op == ":" and self.value == "*":
            return found not in (None, "", [], {})
        if isinstance(found, list):
            return any(self._holds(item) for item in found)
        text = _text(found)
        if self.op in ("eq", "ne"):
            return (re.fullmatch(self.value, text) is not None) is (self.op == "eq")
        if self.op == ":":
            return self.value.lower() in text.lower()
        if self.op in ("=", "!="):
            return _same(text, self.value) is (self.op == "=")
        numbers = _number(text) and _number(self.value)
        return _COMPARE[self.op](*((float(text), float(self.value)) if numbers else (text, self.value)))


def look_up(resource: JsonObject, path: str) -> JsonValue:
    """Return the value at a dotted path; None if it is missing."""
    at: JsonValue = resource
    for part in path.split("."):
        at = at.get(part) if isinstance(at, dict) else None
    return at


def _same(text: str, value: str) -> bool:
    """Whether ``=`` matches: ``*`` at either end is a wildcard, and a URL also matches by its last part."""
    pattern = ".*".join(re.escape(part) for part in value.split("*"))
    return bool(re.fullmatch(pattern, text)) or ("://" in text and text.rsplit("/", 1)[-1] == value)


def _number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(?:\.\d+)?", text) is not None


def _text(found: JsonValue) -> str:
    if isinstance(found, bool):
        return str(found).lower()
    return "" if found is None else str(found)


def _invalid(text: str, why: str) -> ApiError:
    return ApiError(400, "invalid", f"Invalid value for field 'filter': '{text}'. {why}")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if not found or found.end() == at:
            raise _invalid(text, f"Syntax error at '{text[at:]}'.")
        kind = found.lastgroup or ""
        value = found[kind]
        if kind in ("quoted", "single", "bare"):
            yield "value", value.replace('\\"', '"') if kind == "quoted" else value
        else:
            yield kind, value
        at = found.end()


def _term(tokens: list[tuple[str, str]], text: str) -> _Term:
    bad = _invalid(text, "Invalid list filter expression.")
    negated = tokens[0] in (("word", "NOT"), ("value", "-"))
    if negated:
        tokens.pop(0)
    if [kind for kind, _ in tokens[:3]] != ["value", "op", "value"]:
        raise bad
    (_, path), (_, op), (_, value) = tokens[:3]
    del tokens[:3]
    if op in ("eq", "ne"):
        try:
            re.compile(value)
        except re.error:
            raise bad from None
    return _Term(path, op, value, negated)


# Pages. The token of a page is the key of its last item, so no item is listed twice, even if the list changes.


class ListAnswers:
    """Builds the answers of list requests. ``down``: tells whether a zone's API is unreachable now."""

    def __init__(self, world: World, down: Callable[[str], bool]) -> None:
        self._world = world
        self._down = down

    def listed(self, call: ApiCall, kind: str, items: Iterable[JsonObject]) -> JsonObject:
        """Answer a request for the resources of one kind in one zone, in one region, or global."""
        page, token = _page(call, items)
        out: JsonObject = {"kind": kind, "id": call.path, "selfLink": self._world.self_link(call.path)}
        if page:
            out["items"] = list(page)
        if token:
            out["nextPageToken"] = token
        return out

    def aggregated(self, call: ApiCall, kind: str, field: str, items: Iterable[JsonObject]) -> JsonObject:
        """List by zone. An unreachable zone has a warning instead of its items."""
        down = [zone for zone in self._world.config.zones if self._down(zone)]
        page, token = _page(call, (item for item in items if _zone(item) not in down))
        scopes: JsonObject = {}
        for zone in self._world.config.zones:
            here: list[JsonValue] = [item for item in page if _zone(item) == zone]
            scopes[f"zones/{zone}"] = {field: here} if here else {"warning": _warning(zone, zone in down)}
        out: JsonObject = {"kind": kind, "id": call.path, "items": scopes, "selfLink": self._world.self_link(call.path)}
        if down:
            out["unreachables"] = [f"zones/{zone}" for zone in down]
            out["warning"] = _warning(down[0], unreachable=True)
        if token:
            out["nextPageToken"] = token
        return out


def _page(call: ApiCall, items: Iterable[JsonObject]) -> tuple[list[JsonObject], str | None]:
    """Filter and order the items; return one page, and the token of the next page (None at the end)."""
    order = call.query.get("orderBy") or "name"
    if order not in ("name", NEWEST):
        raise errors.not_built(f"orderBy={order} is not supported")
    wanted = Filter.parse(call.query["filter"]) if call.query.get("filter") else None
    start, size = _read_token(call.query.get("pageToken")), _size(call.query.get("maxResults"))
    key, newest = (_age, True) if order == NEWEST else (_link, False)
    found = sorted((item for item in items if wanted is None or wanted.matches(item)), key=key, reverse=newest)
    after = [item for item in found if not start or (key(item) < start if newest else key(item) > start)]
    token = base64.urlsafe_b64encode(key(after[size - 1]).encode()).decode() if len(after) > size else None
    return after[:size], token


def _warning(zone: str, unreachable: bool) -> JsonObject:
    scope: JsonValue = [{"key": "scope", "value": f"zones/{zone}"}]
    if unreachable:
        return {"code": "UNREACHABLE", "message": f"The scope 'zones/{zone}' is not reachable.", "data": scope}
    message = f"There are no results for scope 'zones/{zone}' on this page."
    return {"code": "NO_RESULTS_ON_PAGE", "message": message, "data": scope}


def _size(text: str | None) -> int:
    if not text:
        return MAX_RESULTS
    if not (text.isdecimal() and len(text) < 4 and 1 <= int(text) <= MAX_RESULTS):
        raise errors.invalid("maxResults", text, f"Must be between 1 and {MAX_RESULTS}.")
    return int(text)


def _zone(item: JsonObject) -> str:
    return last(str(item["zone"]))


def _link(item: JsonObject) -> str:
    return str(item["selfLink"])


def _age(item: JsonObject) -> str:
    """The sort key for the order of creation: all timestamps are UTC with milliseconds, so text order is time order."""
    return f"{item.get('creationTimestamp') or item.get('insertTime') or ''} {item['selfLink']}"


def _read_token(text: str | None) -> str:
    if not text:
        return ""
    try:
        return base64.urlsafe_b64decode(text).decode()
    except ValueError:
        raise errors.invalid("pageToken", text, "The page token is malformed.") from None


# Partial responses: ``fields=a,b`` selects two fields, ``a/b`` a field of a field, ``a(b,c)`` two such fields, ``*``
# any key of a map. Lists are traversed. A selection that matches no field gives an empty answer, as in Google's APIs.

Mask = dict[str, "Mask"]
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*|[*/(),]")


def parse_mask(text: str) -> Mask:
    """Parse a field mask; ApiError (400) for an invalid one."""
    words = _WORD.findall(text)
    if "".join(words) != text:
        raise _bad_mask(text)
    mask, end = _selectors(iter([*words, ""]), text)
    if end:
        raise _bad_mask(text)
    return mask


def _selectors(words: Iterator[str], text: str) -> tuple[Mask, str]:
    mask: Mask = {}
    while True:
        end = _selector(mask, words, text)
        if end != ",":
            return mask, end


def _selector(mask: Mask, words: Iterator[str], text: str) -> str:
    name = next(words, "")
    if name in ("", "/", "(", ")", ","):
        raise _bad_mask(text)
    below = mask.setdefault(name, {})
    end = next(words, "")
    if end == "/":
        return _selector(below, words, text)
    if end == "(":
        inner, end = _selectors(words, text)
        if end != ")":
            raise _bad_mask(text)
        below.update(inner)
        end = next(words, "")
    return end


def _bad_mask(text: str) -> ApiError:
    return ApiError(400, "invalidParameter", f"Invalid field selection {text}")


def apply_mask(mask: Mask, value: Any) -> Any:
    """Return the selected part of a JSON value; None if it is empty."""
    if not mask:
        return value
    if isinstance(value, list):
        return [left for item in value if (left := apply_mask(mask, item)) is not None] or None
    if not isinstance(value, dict):
        return None
    out = {}
    for name, item in value.items():
        below = mask.get(name, mask.get("*"))
        if below is not None and (left := apply_mask(below, item)) is not None:
            out[name] = left
    return out or None
