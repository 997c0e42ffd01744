"""JSON Schemas of the job file, for editors, and of ``stack/pools.json``, for other tools.

``# yaml-language-server: $schema=job.schema.json`` at the top of a job file makes an editor complete and check it. The
schema has types and ranges; only ``spotkeeper submit`` checks rules across fields.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import msgspec

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.stack import StackState


class Document(str, Enum):
    """The schemas that ``spotkeeper schema`` can print."""

    JOB = "job"
    STATE = "state"  # `stack/pools.json`, which Pulumi writes


_TYPES: dict[Document, type[JobSpec] | type[StackState]] = {Document.JOB: JobSpec, Document.STATE: StackState}


def schema(document: Document) -> dict[str, object]:
    """Return the JSON Schema (draft 2020-12) of a document."""
    body = described(msgspec.json.schema(_TYPES[document]))
    if document is Document.JOB:
        body = by_hand(body)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Spotkeeper {document.value}", **body}


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """Move each description to its field, where editors look for it; msgspec puts it at a branch or type."""
    types: dict[str, Any] = schema.get("$defs", {})
    for one in types.values():
        for field in one.get("properties", {}).values():
            for part in (field, *field.get("anyOf", ())):
                words = part.get("description") or types.get(part.get("$ref", "").rpartition("/")[2], {}).get(
                    "description"
                )
                if words and "description" not in field:
                    field["description"] = words
    return schema


def by_hand(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from optional fields: in a file that a user writes, an empty value is a mistake."""
    for one in schema.get("$defs", {}).values():
        for field in one.get("properties", {}).values():
            kinds = [part for part in field.get("anyOf", ()) if part != {"type": "null"}]
            if len(kinds) == len(field.get("anyOf", ())):
                continue
            del field["anyOf"]
            field.update({**kinds[0], **field} if len(kinds) == 1 else {"anyOf": kinds})
            if field.get("default", ...) is None:
                del field["default"]
    return schema


def schema_text(document: Document) -> str:
    return json.dumps(schema(document), indent=2, ensure_ascii=False)
