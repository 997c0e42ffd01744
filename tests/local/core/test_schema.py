"""The structs match Google's schema: no invented field, no field missing without a 501."""

from __future__ import annotations

import msgspec
import pytest

from spotkeeper.local.core import schema as wire
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import parse_body, to_json
from tests import discovery

REQUESTS = [
    (wire.Scheduling, "Scheduling"),
    (wire.AttachedDisk, "AttachedDisk"),
    (wire.InitializeParams, "AttachedDiskInitializeParams"),
    (wire.NetworkInterface, "NetworkInterface"),
    (wire.InstanceProperties, "InstanceProperties"),
    (wire.InstanceBody, "Instance"),
    (wire.DiskBody, "Disk"),
]
ANSWERS = [(wire.Instance, "Instance"), (wire.Disk, "Disk"), (wire.Snapshot, "Snapshot"), (wire.Operation, "Operation")]


def fields(kind: type) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]


def google(schema: str) -> set[str]:
    return set(discovery.document()["schemas"][schema]["properties"])


@pytest.mark.parametrize(("kind", "schema"), REQUESTS)
def test_every_field_of_googles_schema_is_supported_or_listed(kind: type, schema: str) -> None:
    known = fields(kind) | wire.NOT_BUILT[kind] | wire.OUTPUT_ONLY
    assert google(schema) <= known
    assert wire.NOT_BUILT[kind] <= google(schema)


@pytest.mark.parametrize(("kind", "schema"), [*REQUESTS, *ANSWERS])
def test_every_field_exists_in_googles_schema(kind: type, schema: str) -> None:
    assert fields(kind) <= google(schema)


@pytest.mark.parametrize(("kind", "schema"), [*REQUESTS, *ANSWERS, (wire.Duration, "Duration")])
def test_every_64_bit_field_is_written_as_a_string(kind: type, schema: str) -> None:
    described = discovery.document()["schemas"][schema]["properties"]
    wide = {name for name in fields(kind) if described[name].get("format") in ("int64", "uint64")}
    assert wide <= wire.INT64
    assert not {name for name in fields(kind) & wire.INT64 if described[name].get("type") != "string"}


def test_64_bit_integers_are_digits_in_a_string_both_ways() -> None:
    body = parse_body({"sizeGb": "50"}, wire.DiskBody)
    assert body.size_gb == 50
    assert to_json(body) == {"sizeGb": "50"}


def test_explicit_nulls_and_blank_enums_mean_unset() -> None:
    given = {"scheduling": {"instanceTerminationAction": "", "nodeAffinities": [None], "preemptible": None}}
    assert parse_body(given, wire.InstanceBody).scheduling == wire.Scheduling()


def test_misspelt_fields_get_400_and_unsupported_ones_501() -> None:
    with pytest.raises(ApiError, match='Unknown name "provisioning_model"') as unknown:
        parse_body({"scheduling": {"provisioning_model": "SPOT"}}, wire.InstanceBody)
    assert unknown.value.code == 400
    with pytest.raises(ApiError, match="gracefulShutdown") as known:
        parse_body({"scheduling": {"gracefulShutdown": {}}}, wire.InstanceBody)
    assert known.value.code == 501


def test_a_size_with_a_unit_is_refused() -> None:
    with pytest.raises(ApiError, match="sizeGb"):
        parse_body({"sizeGb": "50GB"}, wire.DiskBody)


def test_output_only_fields_in_requests_are_ignored() -> None:
    assert parse_body({"name": "a", "status": "READY", "selfLink": "x"}, wire.DiskBody).name == "a"
