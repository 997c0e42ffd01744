"""``live``: what only a real cloud can tell, as `docs/first-live-hour.md` lists it, with a stack's own names.

Everything else is tested without an account. Reads that page and a stack file; asks no cloud itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.show import CHECKOUT, read_stack_file

PAGE = CHECKOUT / "docs" / "first-live-hour.md"
SECTIONS = {"gcp": "Google Cloud", "aws": "AWS"}
_LOOK = re.compile(r"^\d+\. \*\*(.+?)\.\*\* (.+?)\n\n {7}(\S.*?)\n\n {3}Expect: (.+?)\.$", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"(?<![A-Z_])(STACK|BUCKET|PROJECT|REGION)(?![A-Z_])")


class Look(Struct, frozen=True):
    """One thing to verify. ``command``: for a shell; VM, JOB, ZONE and other words in capitals are the reader's."""

    what: str
    why: str
    command: str
    expect: str


def of_stack(stack: str | None) -> tuple[Look, ...]:
    """The list for a stack of this checkout.

    Raises:
        SpecError, CliError: as :func:`read_stack_file`; or the page is not here.
    """
    settings = read_stack_file(None, stack, "spotkeeper live --stack NAME").settings
    names = {
        "STACK": settings.stack,
        "BUCKET": settings.bucket_name(),
        "PROJECT": settings.owner(),
        "REGION": settings.region,
    }
    try:
        page = PAGE.read_text("utf-8")
    except OSError as error:
        raise CliError(f"{PAGE}: {error.strerror}", Exit.MISSING, "run it in a checkout") from None
    return looks(page, settings.cloud, names)


def looks(page: str, cloud: str, names: Mapping[str, str]) -> tuple[Look, ...]:
    """One cloud's part of the page, and what both share; ``names``: what to write for the page's words in capitals."""
    parts = {head: body for head, _, body in (part.partition("\n") for part in page.split("\n## "))}
    found = _LOOK.findall(parts[SECTIONS[cloud]]) + _LOOK.findall(parts["Both"])
    return tuple(Look(*(_filled(text, names) for text in one)) for one in found)


def _filled(text: str, names: Mapping[str, str]) -> str:
    return _WORD.sub(lambda word: names[word[0]], " ".join(text.split()))


def text(found: Sequence[Look]) -> Iterator[str]:
    """For a terminal: numbered, each with what to type and what to see."""
    for number, one in enumerate(found, 1):
        yield f"{number}. {one.what}\n   {one.why}\n\n       {one.command}\n\n   expect: {one.expect}\n"
