"""IAM conditions that are met, and that are not."""

from __future__ import annotations

import pytest

from spotkeeper.local.access.iam import ConditionError, extract, holds

RANK = "projects/p/zones/z/instances/sk-demo-abcd2345-n0000-a1"
OURS = 'resource.name.extract("/instances/sk-demo-{job}-n") != ""'


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("/instances/sk-demo-{job}-n", "abcd2345"),
        ("/zones/{zone}/", "z"),
        ("/instances/{name}", "sk-demo-abcd2345-n0000-a1"),
        ("{before}/zones/", "projects/p"),
        ("/disks/{name}", ""),
        ("/instances/{name}-s", ""),
    ],
)
def test_extract(template: str, found: str) -> None:
    assert extract(RANK, template) == found


def test_operators_have_cels_precedence() -> None:
    yes, no = 'resource.name.startsWith("projects/")', 'resource.name.endsWith("nothing")'
    assert holds(f"{yes} || {yes} && {no}", RANK)
    assert not holds(f"({yes} || {yes}) && {no}", RANK)
    assert holds(f"!{no} && !({no} || !{yes})", RANK)


def test_a_request_that_names_no_resource_meets_no_condition() -> None:
    assert holds(OURS, RANK) and not holds(OURS, None)
    assert not holds('!resource.name.startsWith("projects/")', None), "nor one that says what it is not"


@pytest.mark.parametrize(
    "wrong",
    ["", "resource.name", 'resource.type == "x"', OURS + " &&", "(" + OURS, OURS + ")", OURS.removesuffix(' != ""'),
     'resource.name.startsWith("a") == "b"', 'resource.name.extract("no variable") != ""', OURS + " " + OURS],
)  # fmt: skip
def test_unsupported_conditions_are_refused(wrong: str) -> None:
    with pytest.raises(ConditionError):
        holds(wrong, RANK)
