"""Stack files as Pulumi's engine would hand them to the program, with this cloud's addresses added."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from spotkeeper.spec import codec
from spotkeeper.spec.parse import load
from spotkeeper.spec.problem import Problem, SpecError

ROOT = Path(__file__).resolve().parents[4]
PROJECT_FILE = ROOT / "Pulumi.yaml"
NAMESPACE = "spotkeeper"


class _Key(msgspec.Struct):
    """A key of ``Pulumi.yaml``'s ``config``; what else stands there is for the engine."""

    default: object = None


class _Project(msgspec.Struct):
    config: dict[str, _Key] = {}


class _Stack(msgspec.Struct):
    config: dict[str, object] = {}


def read_config(config_file: Path, endpoint: str | None = None) -> dict[str, str]:
    """Flat configuration (``spotkeeper:pools`` -> JSON), defaults of ``Pulumi.yaml`` included.

    Raises:
        SpecError: the file is missing, no YAML, or no stack file; with its lines.
    """
    project = codec.convert(msgspec.yaml.decode(PROJECT_FILE.read_bytes()), _Project)
    values = {f"{NAMESPACE}:{key}": known.default for key, known in project.config.items() if known.default is not None}
    values |= stack_config(config_file, endpoint)
    return {key: _text(value) for key, value in values.items()}


def _text(value: object) -> str:
    """A value as the engine hands it over: of a key without one, nothing."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def stack_config(config_file: Path, endpoint: str | None = None) -> dict[str, object]:
    """What the stack file says, plus where this cloud answers."""
    values = _of_this_project(load(config_file, _Stack).config, config_file.name)
    if endpoint is None:
        return values
    given = values.get(f"{NAMESPACE}:endpoints")
    written = dict(given) if isinstance(given, Mapping) else {}
    return {**values, f"{NAMESPACE}:endpoints": {**addresses(endpoint), **written}}


def _of_this_project(config: Mapping[str, object], file: str) -> dict[str, object]:
    """A key without a namespace is the project's, as Pulumi has it."""
    short = {f"{NAMESPACE}:{key}": value for key, value in config.items() if ":" not in key}
    if twice := sorted(short.keys() & config.keys()):
        raise SpecError([Problem(key, "given twice, with and without its namespace: remove one", source=file)
                         for key in twice])  # fmt: skip
    return {**{key: value for key, value in config.items() if ":" in key}, **short}


def addresses(endpoint: str) -> dict[str, str]:
    """The services of a one-machine cloud, by the names of ``endpoints:`` in a stack file."""
    root = endpoint.rstrip("/")
    return {"compute": f"{root}/compute/v1", "storage": root, "jwks": f"{root}/local/v1/jwks"}
