"""Partial responses: the grammar of ``fields``, and the selected parts of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from spotkeeper.local.compute.query import apply_mask, parse_mask
from spotkeeper.local.core.errors import ApiError

ANSWER = {
    "kind": "compute#instanceAggregatedList",
    "items": {
        "zones/a": {"instances": [{"name": "x", "disks": [{"source": "d", "boot": True}], "labels": {"k": "v"}}]},
        "zones/b": {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "m"}},
    },
    "nextPageToken": "t",
}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("nextPageToken", {"nextPageToken": "t"}),
        (
            "items/*/instances(name,labels)",
            {"items": {"zones/a": {"instances": [{"name": "x", "labels": {"k": "v"}}]}}},
        ),
        ("items/*/instances/disks/boot", {"items": {"zones/a": {"instances": [{"disks": [{"boot": True}]}]}}}),
        (
            "items/*/instances(name),items/*/warning/code",
            {
                "items": {
                    "zones/a": {"instances": [{"name": "x"}]},
                    "zones/b": {"warning": {"code": "NO_RESULTS_ON_PAGE"}},
                }
            },
        ),
        ("unreachables", None),
        ("items(*(instances(disks(source))))", {"items": {"zones/a": {"instances": [{"disks": [{"source": "d"}]}]}}}),
    ],
)
def test_a_mask_selects_fields(text: str, left: Any) -> None:
    assert apply_mask(parse_mask(text), ANSWER) == left


@pytest.mark.parametrize("text", [",", "a,", "a(", "a(b", "a)", "a//b", "a/", "(a)", "a b", "a(b)c", "a;b", "/a"])
def test_invalid_masks_are_refused(text: str) -> None:
    with pytest.raises(ApiError, match="Invalid field selection"):
        parse_mask(text)
