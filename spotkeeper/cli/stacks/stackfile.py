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
    """Return the JSON Schema of ``job``, ``stack`` or ``state``.

    Raises:
        CliError: no such document, or (``stack``) this is no checkout.
    """
    from spotkeeper.contract.parse.schema import Document, schema_text

    if document == STACK:
        return json.dumps(stack_schema(), indent=2, ensure_ascii=False)
    known = [Document.JOB.value, STACK, Document.STATE.value]
    if document not in known:
        near = nearest(document, known)
        hint = f" (did you mean {near}?)" if near else ""
        raise CliError(f"{document}: must be {', '.join(known[:-1])} or {known[-1]}{hint}", Exit.USAGE)
    return schema_text(Document(document))


def _cloud(name: str) -> dict[str, Any]:
    return {"properties": {"spotkeeper:cloud": {"const": name}}, "required": ["spotkeeper:cloud"]}


def stack_schema() -> dict[str, object]:
    """Return the schema of a stack file: the fields of ``infra.settings.model.Settings``, as Pulumi names them.

    Raises:
        CliError: this is no checkout.
    """
    import msgspec

    from spotkeeper.contract.parse.schema import by_hand, described

    try:
        from infra.settings.model import Settings
        from infra.settings.read import NAMESPACE
    except ImportError:
        raise no_checkout() from None
    made = by_hand(described(msgspec.json.schema(Settings)))
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
