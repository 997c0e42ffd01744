"""List filters: the AIP-160 subset our own code sends, and the ``eq`` regular expressions of gcloud. Pure.

    labels.sk-stack = demo AND labels.sk-job:*         (a key that is set)
    (labels.sk-stack eq "demo") (name eq ".*-r0001-.*") AND status != RUNNING
    name = "a" OR name = "b"

What it does not understand is a 400, as in Compute Engine; it never lists more than was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from spotkeeper.local.wire import JsonObject, JsonValue

_TOKEN = re.compile(
    r"""\s*(?:(?P<paren>[()])|(?P<op>!=|>=|<=|=|:|<|>|\beq\b|\bne\b)|(?P<word>AND|OR|NOT)\b"""
    r"""|"(?P<quoted>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'|(?P<bare>[^\s()=!:<>"']+))"""
)


class FilterError(ValueError):
    """The filter is not one this cloud can evaluate; the message says where."""


@dataclass(frozen=True)
class Filter:
    """A disjunction of conjunctions of terms."""

    any_of: tuple[tuple[_Term, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Filter:
        """
        Raises:
            FilterError: with the offending part.
        """
        groups: list[list[_Term]] = [[]]
        tokens = list(_tokens(text))
        while tokens:
            kind, value = tokens[0]
            if kind == "word" and value == "OR":
                groups.append([])
                tokens.pop(0)
            elif (kind == "word" and value == "AND") or kind == "paren":
                tokens.pop(0)
            else:
                groups[-1].append(_term(tokens, text))
        if len(groups) > 1 and any(not group for group in groups):
            raise FilterError(f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.")
        if len(groups) > 1 and "(" in text and any(len(group) > 1 for group in groups):
            raise FilterError(f"Invalid value for field 'filter': '{text}'. Mixing AND, OR and parentheses.")
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
        return self._holds(_lookup(resource, self.path)) is not self.negated

    def _holds(self, found: JsonValue) -> bool:
        if self.op == ":" and self.value == "*":
            return found not in (None, "", [], {})
        if isinstance(found, list):
            return any(self._holds(item) for item in found)
        text = _text(found)
        if self.op in ("eq", "ne"):
            same = re.fullmatch(self.value, text) is not None
            return same if self.op == "eq" else not same
        if self.op == ":":
            return self.value.lower() in text.lower()
        if self.op in ("=", "!="):
            return _same(text, self.value) is (self.op == "=")
        return _compare(text, self.op, self.value)


def _same(text: str, value: str) -> bool:
    """``=`` takes ``*`` at either end as a wildcard, and a URL's last part for the URL (zone = us-central1-a)."""
    pattern = ".*".join(re.escape(part) for part in value.split("*"))
    return bool(re.fullmatch(pattern, text)) or ("://" in text and text.rsplit("/", 1)[-1] == value)


def _compare(text: str, op: str, value: str) -> bool:
    left: float | str = float(text) if _number(text) and _number(value) else text
    right: float | str = float(value) if _number(text) and _number(value) else value
    pair = (left, right)
    return {"<": pair[0] < pair[1], ">": pair[0] > pair[1], "<=": pair[0] <= pair[1], ">=": pair[0] >= pair[1]}[op]  # type: ignore[operator]


def _number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(?:\.\d+)?", text) is not None


def _text(found: JsonValue) -> str:
    if isinstance(found, bool):
        return str(found).lower()
    return "" if found is None else str(found)


def _lookup(resource: JsonObject, path: str) -> JsonValue:
    at: JsonValue = resource
    parts = path.split(".")
    while parts:
        if not isinstance(at, dict):
            return None
        # A label key has no dot, a metadata path has; the longest first costs nothing here.
        at = at.get(parts.pop(0))
    return at


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if not found or found.end() == at:
            raise FilterError(f"Invalid value for field 'filter': '{text}'. Cannot read it from '{text[at:]}'.")
        kind = found.lastgroup or ""
        value = found[kind]
        if kind in ("quoted", "single", "bare"):
            yield "value", value.replace('\\"', '"') if kind == "quoted" else value
        else:
            yield kind, value
        at = found.end()


def _term(tokens: list[tuple[str, str]], text: str) -> _Term:
    bad = FilterError(f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.")
    negated = tokens[0] in (("word", "NOT"), ("value", "-"))
    if negated:
        tokens.pop(0)
    if len(tokens) < 3 or [kind for kind, _ in tokens[:3]] != ["value", "op", "value"]:
        raise bad
    (_, path), (_, op), (_, value) = tokens[:3]
    del tokens[:3]
    if op in ("eq", "ne"):
        try:
            re.compile(value)
        except re.error:
            raise bad from None
    return _Term(path, op, value, negated)
