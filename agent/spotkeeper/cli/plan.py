"""``plan``: what `pulumi up` would declare for a stack file, without Pulumi's engine and without a cloud.

The project's own program runs, against a monitor that makes nothing; it compares with no cloud and no state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.show import read_stack_file

WIDEST = 100  # characters of an input's value on one line for people


class Planned(Struct, frozen=True, omit_defaults=True):
    """A resource. ``inputs`` carry Pulumi's names; of a component there are none."""

    type: str
    name: str
    parent: str
    inputs: dict[str, Any]
    protect: bool = False  # a destroy refuses
    retain: bool = False  # a destroy leaves it in the cloud


def plan(file: Path | None, stack: str | None) -> tuple[Planned, ...]:
    """Everything the stack is made of: each component, then what belongs to it.

    Raises:
        SpecError: the stack file is wrong; with its lines.
        CliError: no such stack, no checkout, or the program failed.
    """
    read = read_stack_file(file, stack, "spotkeeper plan --stack-file FILE")
    from spotkeeper.local.deploy import DeployError, runner

    try:
        entries = runner.declared(read.name, read.config)
    except DeployError as error:
        raise CliError(f"the stack {read.name}: {error}", Exit.FAILED) from None
    found = [Planned(one.type, one.name, one.parent, one.inputs, one.protect, one.retain) for one in entries]
    places = {part.name: place for place, part in enumerate(filter(_component, found))}

    def key(one: Planned) -> tuple[int, bool, str, str]:  # of registrations that wait for one another, any may be first
        part = _component(one)
        return places.get(one.name if part else one.parent, len(places)), not part, one.type, one.name

    return tuple(sorted(found, key=key))


def _component(one: Planned) -> bool:
    return one.type.startswith("spotkeeper:")


def lines(planned: Iterable[Planned]) -> Iterator[str]:
    """As ``pulumi preview --diff`` prints it, long values cut."""
    from spotkeeper.local.deploy.show import type_words

    count = 0
    for one in planned:
        marks = " [protect]" * one.protect + " [retain]" * one.retain
        if _component(one):
            yield f"{one.name} ({one.type})"
            continue
        count += 1
        yield f"  + {type_words(one.type)}  {one.name}{marks}"
        yield from (f"      {name}: {_short(value)}" for name, value in sorted(one.inputs.items()))
    yield f"{count} resources; no cloud was asked. Against a stack that is up: pulumi preview"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}... ({len(text):,} characters; all with --json)"
