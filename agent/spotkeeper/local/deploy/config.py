"""Stack files as Pulumi's engine would hand them to the program, with this cloud's addresses added."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from spotkeeper.spec import codec

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
        OSError, msgspec.DecodeError, msgspec.ValidationError: the file cannot be read.
    """
    project = codec.convert(msgspec.yaml.decode(PROJECT_FILE.read_bytes()), _Project)
    values = {f"{NAMESPACE}:{key}": known.default for key, known in project.config.items() if known.default is not None}
    values |= stack_config(config_file, endpoint)
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def stack_config(config_file: Path, endpoint: str | None = None) -> dict[str, object]:
    """What the stack file says, plus where this cloud answers."""
    values = codec.convert(msgspec.yaml.decode(config_file.read_bytes()), _Stack).config
    if endpoint is None:
        return values
    given = values.get(f"{NAMESPACE}:endpoints")
    written = dict(given) if isinstance(given, Mapping) else {}
    return {**values, f"{NAMESPACE}:endpoints": {**addresses(endpoint), **written}}


def addresses(endpoint: str) -> dict[str, str]:
    """The services of a one-machine cloud, by the names of ``endpoints:`` in a stack file."""
    root = endpoint.rstrip("/")
    return {"compute": f"{root}/compute/v1", "storage": root, "jwks": f"{root}/local/v1/jwks"}
