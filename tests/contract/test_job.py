"""A job's spec as the bucket keeps it, and its deadline."""

from __future__ import annotations

import msgspec
import pytest

from spotkeeper.contract.job import JobSpec, deadline_at
from spotkeeper.contract.parse.typed import convert


def test_a_spec_round_trips() -> None:
    spec = convert({"name": "a", "command": ["t.py"], "nodes": {"min": 1, "max": 3}}, JobSpec)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec


@pytest.mark.parametrize(
    ("text", "at"),
    [("90m", 5400.0 + 1000), ("1.5h", 5400.0 + 1000), ("2d", 172800.0 + 1000), ("1970-01-01T01:00+01:00", 0.0)],
)
def test_deadlines(text: str, at: float) -> None:
    assert deadline_at(text, 1000.0) == at
