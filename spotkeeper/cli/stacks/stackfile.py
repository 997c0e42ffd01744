"""Finds a stack file by name, reads and checks it; and makes the JSON Schemas of the files that users write."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.parse.problem import Problem, SpecError, located, nearest
from spotkeeper.contract.parse.typed import read_text

if TYPE_CHECKING:
    from infra.settings.model import Settings

CHECKOUT = Path(__file__).resolve().parents[3]
STAND_IN = "http://127.0.0.1:80"  # placeholder for a one-machine cloud's address, which is known only while it runs
STACK = "stack"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SETTING = re.compile(r'^config\["(?:spotkeeper:)?([^"]+)"\]')


@dataclass(frozen=True)
class StackFile:
    """A stack's name, its flat configuration as Pulumi's engine passes it, and the settings that it means."""

    name: str
    config: dict[str, str]
    settings: Settings


def read_stack_file(file: Path | None, stack: str | None, other: str) -> StackFile:
    """Read and check a stack file. ``other``: the command that names a file by path, for error messages.

    Raises:
        SpecError: the stack file is invalid; the problems have line numbers.
        CliError: no such stack, or this is no checkout.
    """
    try:
        from infra.settings.read import clashes, from_config
        from spotkeeper.local.deploy.config import read_config
    except ImportError:
        raise no_checkout() from None
    path = file or stack_path(stack, other)
    lines = _lines(path)
    name = path.name.removeprefix("Pulumi.").removesuffix(".yaml")
    config = read_config(path, STAND_IN if name == "local" else None)
    try:
        found = from_config(config, name)
        if told := clashes(found, path.parent):
            raise SpecError(told)
    except SpecError as error:
        raise located(error, path.name, lines) from None
    return StackFile(name, config, found)


def no_checkout() -> CliError:
    return CliError("the package `infra` is missing here", Exit.MISSING, "run it in a checkout")


def stack_path(stack: str | None, other: str) -> Path:
    """Return the path of a stack's file, in this folder, else in the checkout.

    Args:
        stack: a name, or the path of a stack file; None: SPOTKEEPER_STACK, else the local stack.
        other: the command that names a file by path, for the error message.

    Raises:
        CliError: no stack of this name.
    """
    stack = stack or os.environ.get("SPOTKEEPER_STACK", "") or "local"
    if stack.endswith((".yaml", ".yml")):
        return Path(stack)
    if (here := Path(f"Pulumi.{stack}.yaml")).is_file():
        return here
    folder = CHECKOUT / "infra" / "stacks"
    names = sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in folder.glob("Pulumi.*.yaml"))
    if stack in names:
        return folder / f"Pulumi.{stack}.yaml"
    near = nearest(stack, names)
    hint = f" (did you mean {near}?)" if near else f" (there are {', '.join(names)})"
    raise CliError(f"no stack {stack} in {folder}{hint}", Exit.MISSING, f"name its file: {other}")


def _lines(path: Path) -> dict[str, int]:
    """The line number of every setting, by the name that messages use.

    Raises:
        SpecError: the file is missing, is not YAML, or has no mapping ``config:``.
    """
    from spotkeeper.contract.parse.yamltext import read

    document, lines = read(read_text(path), path.name)
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        raise SpecError([Problem("config", "missing, must be a mapping with the stack's settings", source=path.name)])
    return {_SETTING.sub(r"\1", key): line for key, line in lines.items()}


# -- JSON Schema


def schema_of(document: str) -> str:
    """Return the JSON Schema of ``job``, ``stack`` or ``state`` (``stack/pools.json``, which Pulumi writes).

    ``# yaml-language-server: $schema=job.schema.json`` at the top of a job file makes an editor complete and check it.
    The schema has types and ranges; only ``spotkeeper submit`` checks how fields go together.

    Raises:
        CliError: no such document, or (``stack``) this is no checkout.
    """
    known = ["job", STACK, "state"]
    if document not in known:
        near = nearest(document, known)
        hint = f" (did you mean {near}?)" if near else ""
        raise CliError(f"{document}: must be {', '.join(known[:-1])} or {known[-1]}{hint}", Exit.USAGE)
    made = {"job": job_schema, STACK: stack_schema, "state": state_schema}[document]()
    return json.dumps(made, indent=2, ensure_ascii=False)


def job_schema() -> dict[str, Any]:
    """Return the schema of a job file."""
    from spotkeeper.contract.job import JobSpec

    return {"$schema": DRAFT, "title": "Spotkeeper job", **_by_hand(_described(JobSpec))}


def state_schema() -> dict[str, Any]:
    """Return the schema of ``stack/pools.json``."""
    from spotkeeper.contract.stack import StackState

    return {"$schema": DRAFT, "title": "Spotkeeper state", **_described(StackState)}


def _cloud(name: str) -> dict[str, Any]:
    return {"properties": {"spotkeeper:cloud": {"const": name}}, "required": ["spotkeeper:cloud"]}


def stack_schema() -> dict[str, Any]:
    """Return the schema of a stack file: the fields of ``infra.settings.model.Settings``, as Pulumi names them.

    Raises:
        CliError: this is no checkout.
    """
    try:
        from infra.settings.model import Settings
        from infra.settings.read import NAMESPACE
    except ImportError:
        raise no_checkout() from None
    made = _by_hand(_described(Settings))
    types = made["$defs"]
    settings = types.pop(Settings.__name__)
    ours = {f"{NAMESPACE}:{name}": body for name, body in settings["properties"].items()}
    required = [f"{NAMESPACE}:{name}" for name in settings["required"]]
    for name in ("stack", "project"):  # given by the file's name, and by `gcp:project`
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


def _described(of: type) -> dict[str, Any]:
    """Move each description to its field, where editors look for it; msgspec puts it at a branch or type."""
    import msgspec

    schema = msgspec.json.schema(of)
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


def _by_hand(schema: dict[str, Any]) -> dict[str, Any]:
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
