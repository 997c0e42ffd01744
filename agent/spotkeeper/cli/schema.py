"""``schema``: JSON Schema of what people write, and of the document that a stack is known by."""

from __future__ import annotations

import json
from typing import Any

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.show import no_checkout
from spotkeeper.spec.problem import nearest

STACK = "stack"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def text(document: str) -> str:
    """
    Raises:
        CliError: no such document; or no checkout is at hand, which a stack file belongs to.
    """
    from spotkeeper.spec.schema import Document, schema_text

    if document == STACK:
        return json.dumps(stack_file(), indent=2, ensure_ascii=False)
    known = [Document.JOB.value, STACK, Document.STATE.value]
    if document not in known:
        near = nearest(document, known)
        hint = f" (did you mean {near}?)" if near else ""
        raise CliError(f"{document}: want {', '.join(known[:-1])} or {known[-1]}{hint}", Exit.USAGE)
    return schema_text(Document(document))


def _cloud(name: str) -> dict[str, Any]:
    return {"properties": {"spotkeeper:cloud": {"const": name}}, "required": ["spotkeeper:cloud"]}


def stack_file() -> dict[str, object]:
    """Of ``infra/stacks/Pulumi.<stack>.yaml``: the fields of ``infra.settings.Settings``, as Pulumi names them.

    Raises:
        CliError: as above.
    """
    import msgspec

    from spotkeeper.spec.schema import by_hand, described

    try:
        from infra.settings import NAMESPACE, Settings
    except ImportError:
        raise no_checkout() from None
    made = by_hand(described(msgspec.json.schema(Settings)))
    types = made["$defs"]
    settings = types.pop(Settings.__name__)
    ours = {f"{NAMESPACE}:{name}": body for name, body in settings["properties"].items()}
    required = [f"{NAMESPACE}:{name}" for name in settings["required"]]
    for name in ("stack", "project"):  # the file's name says the one, `gcp:project` the other
        del ours[f"{NAMESPACE}:{name}"]
        required.remove(f"{NAMESPACE}:{name}")
    config = {
        "type": "object",
        "description": "the stack's settings; keys of other namespaces are their providers'",
        "properties": {"gcp:project": {"type": "string", "description": "gcp: the project's id"}, **ours},
        "required": required,
        "allOf": [
            {"if": _cloud("gcp"), "then": {"required": ["gcp:project"]}},
            {"if": _cloud("aws"), "then": {"required": [f"{NAMESPACE}:account"]}},
        ],
        "patternProperties": {f"^(?!{NAMESPACE}:)": {}},
        "additionalProperties": False,
    }
    return {
        "$schema": DRAFT,
        "title": "Spotkeeper stack file (Pulumi.<stack>.yaml)",
        "type": "object",
        "properties": {"config": config},
        "required": ["config"],
        "$defs": types,
    }
