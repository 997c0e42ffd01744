"""Reads a stack file in the form that Pulumi's engine gives the program, and adds this cloud's addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.parse.problem import Problem, SpecError
from spotkeeper.contract.parse.typed import load
from spotkeeper.local.core.catalog import ZONES

ROOT = Path(__file__).resolve().parents[3]
PROJECT_FILE = ROOT / "Pulumi.yaml"
NAMESPACE = "spotkeeper"
# Environment variables of the provider that the engine starts: the control plane's root, and the operator's token.
ENDPOINT = "SPOTKEEPER_LOCAL_ENDPOINT"
TOKEN = "SPOTKEEPER_COMPUTE_TOKEN"  # noqa: S105 - the name of a variable
ANY_ENDPOINT = "http://127.0.0.1:9"  # makes the stack one of a one-machine cloud
PLUGIN = "pulumi-resource-gcp"  # the name under which the engine finds the provider on PATH


class _Key(msgspec.Struct):
    """A key in the ``config`` of ``Pulumi.yaml``, without the fields that only Pulumi's engine needs."""

    default: object = None


class _Project(msgspec.Struct):
    config: dict[str, _Key] = {}


class _Stack(msgspec.Struct):
    config: dict[str, object] = {}


def read_config(config_file: Path, endpoint: str | None = None) -> dict[str, str]:
    """Return the flat configuration (``spotkeeper:pools`` -> JSON), including defaults of ``Pulumi.yaml``.

    Raises:
        SpecError: the file is missing or invalid; the problems have line numbers.
    """
    project = codec.convert(msgspec.yaml.decode(PROJECT_FILE.read_bytes()), _Project)
    values = {f"{NAMESPACE}:{key}": known.default for key, known in project.config.items() if known.default is not None}
    values |= stack_config(config_file, endpoint)
    return {key: _text(value) for key, value in values.items()}


def _text(value: object) -> str:
    """Convert a setting to text as Pulumi's engine does: text as it is, "" for None, all else as JSON."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def stack_config(config_file: Path, endpoint: str | None = None) -> dict[str, object]:
    """Return the stack file's configuration, with this cloud's addresses as ``endpoints``."""
    values = _of_this_project(load(config_file, _Stack).config, config_file.name)
    if endpoint is None:
        return values
    given = values.get(f"{NAMESPACE}:endpoints")
    written = dict(given) if isinstance(given, Mapping) else {}
    return {**values, f"{NAMESPACE}:endpoints": {**addresses(endpoint), **written}}


def zones_for(config_file: Path) -> tuple[str, ...]:
    """Return the zones of a cloud for this stack file: the usual ones, and those of the file that are in other regions.

    A file with errors gives none, since the deployment reports them.
    """
    from infra.settings.read import from_config

    try:
        found = from_config(read_config(config_file, ANY_ENDPOINT), "local").zones
    except SpecError:
        found = ()
    return tuple(dict.fromkeys((*ZONES, *found)))


def _of_this_project(config: Mapping[str, object], file: str) -> dict[str, object]:
    """Put keys without a namespace into the project's namespace, as Pulumi does."""
    short = {f"{NAMESPACE}:{key}": value for key, value in config.items() if ":" not in key}
    if twice := sorted(short.keys() & config.keys()):
        raise SpecError([Problem(key, "given twice, with and without its namespace: remove one of them", source=file)
                         for key in twice])  # fmt: skip
    return {**{key: value for key, value in config.items() if ":" in key}, **short}


def addresses(endpoint: str) -> dict[str, str]:
    """Return the URLs of this cloud's services, by their names in ``endpoints:`` of a stack file."""
    root = endpoint.rstrip("/")
    return {"compute": f"{root}/compute/v1", "storage": root, "jwks": f"{root}/local/v1/jwks"}
