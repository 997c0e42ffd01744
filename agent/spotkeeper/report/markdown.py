"""Text from anywhere, as Markdown that cannot be taken for more than text.

What is said of a change comes from a branch that nobody has read yet: a resource may be called
``](javascript:...)``, a message may close the table it stands in, or call half of a company by @.
GitHub undoes entities and backslashes before it looks for mentions, so only code is safe: all that
is not this project's own wording goes through ``code`` or ``block``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

LONGEST = 200  # characters of a code span
LONGEST_BLOCK = 4000


def code(text: str, longest: int = LONGEST) -> str:
    """One line as a code span: nothing in it is a link, a mention, an image, HTML, or the end of a table's cell."""
    line = " ".join("".join(map(_visible, text)).split())
    line = line if len(line) <= longest else f"{line[: longest - 3]}..."
    return f"`{line.replace('`', chr(39)).replace('|', '¦')}`" if line else ""


def block(text: str, longest: int = LONGEST_BLOCK) -> str:
    """Lines as they are, in a code block that they cannot close."""
    kept = "".join(char if char == "\n" else _visible(char) for char in text)[:longest].rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", kept)), default=0))
    return f"{fence}text\n{kept}\n{fence}"


def _visible(char: str) -> str:
    """Controls, and what turns the direction of text, become spaces: what is read is what is there."""
    return " " if unicodedata.category(char)[0] in "CZ" else char


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of a table; cells are Markdown already. ``right``: columns of numbers."""
    marks = ["---:" if at in right else "---" for at in range(len(head))]
    return [f"| {' | '.join(line)} |" for line in (head, marks, *rows)]
