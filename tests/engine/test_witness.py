"""What stands between the engine and Google's own provider, without either: whose a call is, and what is no answer of
Google's."""

from __future__ import annotations

import json

import pytest
import requests
from pulumi.runtime.proto import provider_pb2

from tests.engine.standin.both import THEIRS, type_of
from tests.engine.standin.witness import judge

NETWORK = {"kind": "compute#network", "id": "7", "name": "n"}
URL = "/compute/beta/projects/p/global/networks/n"


def answer(status: int, body: str) -> requests.Response:
    made = requests.Response()
    made.status_code, made._content = status, body.encode()
    return made


def test_a_recorded_call_has_its_resources_type() -> None:
    urn = "urn:pulumi:demo::spotkeeper::spotkeeper:gcp:Network$gcp:compute/network:Network::network"
    request = provider_pb2.DeleteRequest(id="projects/p/global/networks/n", urn=urn).SerializeToString()
    assert type_of("Delete", request) == "gcp:compute/network:Network"
    assert type_of("Delete", request).startswith(THEIRS)
    role = provider_pb2.CheckRequest(urn="urn:pulumi:demo::p::gcp:projects/iAMMember:IAMMember::m")
    assert not type_of("Check", role.SerializeToString()).startswith(THEIRS)


def test_answers_are_checked_against_googles_schema() -> None:
    judge("GET", URL, answer(200, json.dumps(NETWORK)))
    judge("GET", f"{URL}?alt=json", answer(200, json.dumps(NETWORK)))
    judge("GET", "/storage/v1/b/x/anywhereCaches/?alt=json", answer(200, '{"kind": "storage#anywhereCaches"}'))
    judge("DELETE", "/storage/v1/b/x/o/a%2Fb?generation=1", answer(204, ""))
    with pytest.raises(AssertionError, match="deleteBgpAlwaysCompareMed"):
        judge("GET", URL, answer(200, json.dumps({**NETWORK, "routingConfig": {"deleteBgpAlwaysCompareMed": False}})))
    with pytest.raises(AssertionError, match="no such method"):
        judge("GET", "/compute/beta/projects/p/global/netwroks/n", answer(200, "{}"))
    with pytest.raises(AssertionError, match="not built"):
        judge("GET", URL, answer(501, '{"error": {"message": "not built"}}'))
    with pytest.raises(AssertionError):
        judge("POST", "/upload/storage/v1/b/x/o?uploadType=multipart", answer(200, '{"nmae": "x"}'))
