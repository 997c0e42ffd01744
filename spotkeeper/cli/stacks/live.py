"""Reads the checks that need a real cloud from `docs/first-live-hour.md`, and fills in a stack's names.

Tests without an account cover everything else. This module calls no cloud.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from spotkeeper.cli.stacks.stackfile import CHECKOUT, read_stack_file
from spotkeeper.client.errors import CliError, Exit

PAGE = CHECKOUT / "docs" / "first-live-hour.md"
SECTIONS = {"gcp": "Google Cloud", "aws": "AWS"}
_CHECK = re.compile(
    r"^\d+\. \*\*(.+?)\.\*\* (.+?)\n\n {7}(\S.*?)\n\n {3}Expect: (.+?)\.$(?:\n {3}<!-- match: (.+?) -->$)?",
    re.MULTILINE | re.DOTALL,
)
_WORD = re.compile(r"(?<![A-Z_])(STACK|BUCKET|PROJECT|REGION)(?![A-Z]|_[A-Z])")


class LiveCheck(Struct, frozen=True):
    """One check of :data:`PAGE`. ``command``: for a shell, once words such as VM, JOB and ZONE in it are replaced."""

    what: str
    why: str
    command: str
    expect: str
    match: str = ""  # a pattern that the right output matches; "": a person must judge the output


def of_stack(stack: str | None) -> tuple[LiveCheck, ...]:
    """Return a stack's checks. Raises as :func:`read_stack_file`, and CliError if :data:`PAGE` is missing."""
    settings = read_stack_file(None, stack, "spotkeeper live-check --list --stack NAME").settings
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
    return checks(page, settings.cloud, names)


def checks(page: str, cloud: str, names: Mapping[str, str]) -> tuple[LiveCheck, ...]:
    """Return the checks for one cloud, then those for every cloud. ``names``: values of placeholders such as REGION."""
    parts = {head: body for head, _, body in (part.partition("\n") for part in page.split("\n## "))}
    found = _CHECK.findall(parts[SECTIONS[cloud]]) + _CHECK.findall(parts["Both"])
    return tuple(_filled_in(one, names) for one in found)


def _filled_in(one: Sequence[str], names: Mapping[str, str]) -> LiveCheck:
    what, why, command, expect = (_filled(text, names) for text in one[:4])
    return LiveCheck(what, why, command, expect, one[4])


def _filled(text: str, names: Mapping[str, str]) -> str:
    return _WORD.sub(lambda word: names[word[0]], " ".join(text.split()))


def text(found: Sequence[LiveCheck]) -> Iterator[str]:
    """Yield the checks as text: numbered, each with its command and the expected output."""
    for number, one in enumerate(found, 1):
        yield f"{number}. {one.what}\n   {one.why}\n\n       {one.command}\n\n   expect: {one.expect}\n"
