"""The exported JSON Schema accepts what the parser accepts and refuses wrong types with it."""

from __future__ import annotations

import jsonschema
import msgspec
import pytest

from spotkeeper.contract.job import JobSpec, deadline_at
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.parse.schema import Document, schema
from spotkeeper.contract.parse.typed import convert
from tests.contract.samples import STACK

JOBS = [
    ({"name": "a", "command": ["t.py"]}, True),
    ({"name": "a", "command": ["t.py"], "nodes": {"min": 1, "max": 3}, "deadline": "6h"}, True),
    ({"name": "a", "command": []}, False),
    ({"name": "a", "command": ["t.py"], "nodes": 0}, False),
    ({"name": "a", "command": ["t.py"], "polic": "spot"}, False),
    ({"name": "a", "command": ["t.py"], "policy": "cheap"}, False),
    ({"name": "a", "command": ["t.py"], "env": {"A": 1}}, False),
    ({"command": ["t.py"]}, False),
]


@pytest.mark.parametrize(("job", "good"), JOBS)
def test_schema_and_parser_agree(job: dict[str, object], good: bool) -> None:
    valid = jsonschema.Draft202012Validator(schema(Document.JOB)).is_valid(job)
    try:
        convert(job, JobSpec)
        parsed = True
    except SpecError:
        parsed = False
    assert (valid, parsed) == (good, good)


def test_the_stack_document_fits_its_schema() -> None:
    validator = jsonschema.Draft202012Validator(schema(Document.STATE))
    body = msgspec.json.decode(msgspec.json.encode(STACK))
    assert validator.is_valid(body)
    assert not validator.is_valid({**body, "cloud": "azure"})


def test_every_field_of_a_job_is_explained_or_plain() -> None:
    """Editors show descriptions; what has none must be self-evident by its type."""
    properties = schema(Document.JOB)["$defs"]["JobSpec"]["properties"]  # type: ignore[index]
    silent = {name for name, body in properties.items() if "description" not in str(body)}
    assert silent <= {"nodes", "checkpoint", "retry", "seed"}


def test_a_spec_survives_the_bucket() -> None:
    spec = convert({"name": "a", "command": ["t.py"], "nodes": {"min": 1, "max": 3}}, JobSpec)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec


@pytest.mark.parametrize(
    ("text", "at"),
    [("90m", 5400.0 + 1000), ("1.5h", 5400.0 + 1000), ("2d", 172800.0 + 1000), ("1970-01-01T01:00+01:00", 0.0)],
)
def test_deadlines(text: str, at: float) -> None:
    assert deadline_at(text, 1000.0) == at
