"""HTML elements. All text and all attributes are escaped, for much of it comes from jobs and machines."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence

_SHORT = 16  # characters that fit into a third of a narrow screen
_TAG = re.compile(r"<[^>]*>")
_VOID = frozenset({"br", "col", "meta", "path", "rect", "line", "circle", "polyline"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None
Attribute = str | float | bool | None


def plain(text: str) -> str:
    """Return text without control characters and marks of text direction; tabs and newlines stay."""
    if text.isprintable():  # no such characters; a thousand times as fast as the line below
        return text
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))


def escape(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(plain(text)))


def el(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element. ``class_`` is the attribute ``class``; other underscores become hyphens; None: left out."""
    given = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        word = key.rstrip("_").replace("_", "-")
        given.append(f" {word}" if value is True else f' {word}="{html.escape(plain(str(value)))}"')
    if name in _VOID and not children:
        return Markup(f"<{name}{''.join(given)}/>")
    return Markup(f"<{name}{''.join(given)}>{join(children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    return Markup(between.join(escape(child) for child in children if child is not None))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Child]],
    caption: str,
    right: Sequence[int] = (),
    empty: str = "",
    *,
    log: bool = False,
) -> Markup:
    """Return a table whose rows become small grids on a narrow screen: each cell knows the name of its column.

    Args:
        caption: names the table for a screen reader.
        right: columns of numbers.
        empty: shown in place of a table without rows.
        log: the last column is a text that needs no name, and the others say when; on a narrow screen, two lines a row.
    """
    last = len(head) - 1 if log else -1
    body = [
        el("tr", *(cell(one, head[at], "right" * (at in right) or "long" * (at == last)) for at, one in enumerate(row)))
        for row in rows
    ]
    if not body and empty:
        return el("p", empty, class_="dim")
    cells = (el("th", word, scope="col", class_="right" if at in right else None) for at, word in enumerate(head))
    return el(
        "table",
        el("caption", caption, class_="unseen"),
        el("thead", el("tr", *cells)),
        el("tbody", *body),
        class_="rows log" if log else "rows",
    )


def cell(content: Child, column: str, kind: str = "") -> Markup:
    """Return a cell of a table as :func:`table` makes it.

    On a narrow screen a long text gets a line of its own, and a cell without a value ("-") is not shown.
    """
    if not content:
        return el("td", class_=f"none {kind}".strip())
    if content == "-":
        kind = f"none {kind}".strip()
    elif len(_TAG.sub("", content)) > _SHORT and "long" not in kind:
        kind = f"{kind} long".strip()
    return el("td", el("div", content), data_label=column, class_=kind or None)


def badge(word: str, kind: str) -> Markup:
    return el("span", word, class_=f"badge {kind}")


def fact(name: str, value: Child, note: Child = None) -> Markup:
    """Return one figure of a row of figures."""
    said = el("div", note, class_="dim small") if note else None
    return el("div", el("div", name, class_="dim small"), el("div", value, class_="figure"), said, class_="fact")
