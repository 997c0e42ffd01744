"""Wrong stack files, one a line in `wrong/<cloud>.txt`: what is changed in a right one, and all that is said of it.

A line says all of it: a mistake that led to a second message, about something that is right, would fail here.
Changed a message on purpose? `python -m tests.infra.settings.test_wrong` writes the lines anew: read the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotkeeper.contract.parse.problem import SpecError
from tests.infra.settings import stackfiles

FOLDER = Path(__file__).with_name("wrong")
CLOUDS = ("gcp", "aws")
LEADS_TO, AND = "  =>  ", "  //  "


def cases() -> Iterator[tuple[str, str, str]]:
    """(cloud, changes, what is said)."""
    for cloud in CLOUDS:
        for line in (FOLDER / f"{cloud}.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                changes, _, told = line.partition(LEADS_TO)
                yield cloud, changes, told


def said(cloud: str, line: str) -> str:
    """Everything that is wrong with a right file after these changes; keys with a $ are not of the file."""
    changes: dict[str, Any] = yaml.safe_load("{" + line + "}")
    around = {key[1:]: changes.pop(key) for key in list(changes) if key.startswith("$")}
    try:
        stackfiles.read(cloud, changes, **around)
    except SpecError as error:
        return AND.join(map(str, error.problems))
    return "nothing"


CASES = list(cases())


@pytest.mark.parametrize(("cloud", "changes", "told"), CASES, ids=[f"{c}-{line[:50]}" for c, line, _ in CASES])
def test_problems_name_path_value_and_remedy(cloud: str, changes: str, told: str) -> None:
    assert said(cloud, changes) == told != "nothing"


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_unchanged_stack_file_is_valid(cloud: str) -> None:
    assert said(cloud, "") == "nothing"


def test_no_case_is_listed_twice() -> None:
    lines = [(cloud, changes) for cloud, changes, _ in CASES]
    assert len(lines) == len(set(lines)) >= 150


def write() -> None:
    for cloud in CLOUDS:
        file = FOLDER / f"{cloud}.txt"
        changes = [line.partition(LEADS_TO)[0] for line in file.read_text().splitlines()]
        lines = [one if not one or one.startswith("#") else one + LEADS_TO + said(cloud, one) for one in changes]
        file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
