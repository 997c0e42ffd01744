"""Read YAML text into plain values and record the line of every key.

Scalars follow YAML 1.2's core schema: ``no``, ``on``, ``12:30`` and dates are texts. Three things are errors: duplicate
keys, because one value would be lost; aliases, which can make a small file expand to any size; and ``010``, which
Pulumi's reader takes for eight.
"""

from __future__ import annotations

import re

import yaml

from spotkeeper.contract.parse.problem import Problem, SpecError, join

_INT = re.compile(r"[-+]?[0-9]+\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+\Z")
_BASED = re.compile(r"0(x[0-9a-fA-F]+|o[0-7]+)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
# A pattern of the parser's messages -> the message with a remedy.
_SYNTAX: tuple[tuple[str, str], ...] = (
    (r"\\t", "a tab cannot indent YAML: use spaces"),
    ("mapping values are not allowed", "a ':' where none can be: indent the line as its neighbours, or quote the text"),
    (r"expected <block end>, but found '([]}])'", r"\1 has no opening bracket before it"),
    ("expected <block end>", "does not line up with the lines above: indent it as its neighbours, or quote the text"),
    (r"expected ',' or '\]'", "a list opens with [ and is not closed: a ] is missing before this"),
    (r"expected ',' or '\}'", "a mapping opens with { and is not closed: a } is missing before this"),
    ("unexpected end of stream", "a quote opens and is not closed"),
    (r"character (.+) that cannot start any token", r"a text cannot begin with \1: put it in quotes"),
    ("could not find expected ':'", "a key has no ':' after it"),
    ("another document", "a second document begins here (---), but a file may have only one"),
)
_DIGITS = 300  # longer integers are read as infinity: no field accepts that, and Python refuses to print the integers
_WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{f"{sign}.{inf}": float(f"{sign}inf") for sign in ("", "+", "-") for inf in ("inf", "Inf", "INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


def read(text: str, source: str = "", *, texts: str = "") -> tuple[object, dict[str, int]]:
    """Return the single document of ``text``, and the line (from 1) of every path in it.

    Args:
        texts: the path of a list (``command``, ``job.command``); its values, such as ``3e-4``, stay texts.

    Raises:
        SpecError: no YAML, several documents, a tag, an alias, a duplicate key.
    """
    try:
        node = yaml.compose(text, Loader=_NoAlias)
    except yaml.MarkedYAMLError as error:
        raise SpecError([_syntax(error, source)]) from None
    except yaml.reader.ReaderError as error:
        raise SpecError([Problem("", f"character {error.character!r} is not allowed", source=source)]) from None
    except RecursionError:
        raise SpecError([Problem("", "nested too deep", source=source)]) from None
    lines: dict[str, int] = {}
    if texts:
        _quote(node, texts)
    return (None if node is None else _value(node, "", source, lines)), lines


def _quote(node: yaml.Node | None, key: str) -> None:
    """Mark each nonempty value in the list at the path ``key`` as quoted, so that the value stays a text."""
    first, _, rest = key.partition(".")
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(name, yaml.ScalarNode) and name.value == first:
            if rest:
                _quote(value, rest)
            for item in value.value if isinstance(value, yaml.SequenceNode) and not rest else ():
                if isinstance(item, yaml.ScalarNode) and item.value:
                    item.style = item.style or '"'


class _NoAlias(yaml.SafeLoader):
    """A loader that refuses aliases and tags. It only composes nodes; :func:`_value` makes values of them."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]  # PyYAML's stubs leave it out
            raise yaml.MarkedYAMLError(problem="aliases (*name) are refused: write out the value", problem_mark=mark)
        tag = getattr(self.peek_event(), "tag", None)  # type: ignore[no-untyped-call]
        if tag is not None:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="tags (!name) are refused: remove the tag", problem_mark=mark)
        return super().compose_node(parent, index)


def _syntax(error: yaml.MarkedYAMLError, source: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    message = (error.problem or error.context or "no YAML").strip()
    message = next((found.expand(told) for what, told in _SYNTAX if (found := re.search(what, message))), message)
    line = mark.line + 1 if mark else None
    where = f"line {line}" if line and not source else ""
    return Problem(where, message, source=source, line=line)


def _value(node: yaml.Node, path: str, source: str, lines: dict[str, int]) -> object:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, source, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, join(path, index), source, lines) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.ScalarNode):
        return None
    if node.style is None and _LEADING_ZERO.match(node.value):
        message = f"{node.value[:20]}: YAML readers disagree about a leading zero: remove the zero, or use quotes"
        raise SpecError([Problem(path, message, source=source, line=node.start_mark.line + 1)])
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: str, source: str, lines: dict[str, int]) -> dict[object, object]:
    out: dict[object, object] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise SpecError([Problem(path, "a key must be a text", source=source, line=line)])
        key = _scalar(key_node)
        inner = join(path, str(key_node.value))
        if key in out:
            message = f"given twice (first in line {lines[inner]}): remove one"
            raise SpecError([Problem(inner, message, source=source, line=line)])
        lines[inner] = line
        out[key] = _value(value_node, inner, source, lines)
    return out


def _scalar(node: yaml.ScalarNode) -> object:
    text = str(node.value)
    if node.style is not None:  # quoted, or a block
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text) or _BASED.match(text):
        if len(text) > _DIGITS:
            return float("-inf" if text.startswith("-") else "inf")
        return int(text, 0) if _BASED.match(text) else int(text)
    return float(text) if _FLOAT.match(text) else text
