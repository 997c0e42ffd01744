"""The helper refuses bodies that Google's schema refuses."""

from __future__ import annotations

import pytest

from tests import discovery

INSERT = "compute.instances.insert"


def test_a_valid_body_passes() -> None:
    discovery.validate_request(INSERT, {"name": "a", "labels": {"sk-stack": "s"}, "scheduling": {"preemptible": True}})
    discovery.validate_response(INSERT, {"name": "op", "status": "RUNNING", "targetId": "123", "progress": 0})
    discovery.validate_query(INSERT, {"requestId": "x", "sourceInstanceTemplate": "global/instanceTemplates/t"})
    discovery.validate_request("compute.instances.delete", None)


@pytest.mark.parametrize(
    ("method", "body"),
    [
        (INSERT, {"provisioning_model": "SPOT"}),
        (INSERT, {"scheduling": {"provisioningModel": "SPOTT"}}),
        (INSERT, {"labels": ["a"]}),
        (INSERT, {"labels": {"a": 1}}),
        (INSERT, {"disks": [{"diskSizeGb": 50}]}),
        (INSERT, {"name": None}),
        ("compute.disks.insert", {"sizeGb": "50GB"}),
        ("compute.instances.delete", {"name": "x"}),
        ("compute.instances.inzert", {}),
    ],
)
def test_a_wrong_request_is_refused(method: str, body: object) -> None:
    with pytest.raises(AssertionError):
        discovery.validate_request(method, body)


def test_wrong_answers_and_queries_are_refused() -> None:
    with pytest.raises(AssertionError, match="status"):
        discovery.validate_response(INSERT, {"status": "FINE"})
    with pytest.raises(AssertionError, match="request_id"):
        discovery.validate_query(INSERT, {"request_id": "x"})
    with pytest.raises(AssertionError, match="boolean"):
        discovery.validate_query("compute.instances.aggregatedList", {"includeAllScopes": "True"})
    with pytest.raises(KeyError):
        discovery.validate_error({"oops": 1})


def test_paths_find_their_method() -> None:
    found = discovery.match("POST", "/compute/v1/projects/p/zones/us-x1-a/instances/12345/attachDisk")
    assert found == discovery.Match(
        "compute.instances.attachDisk", {"project": "p", "zone": "us-x1-a", "instance": "12345"}
    )
    assert discovery.match("POST", "/compute/v1/projects/p/zones/US/instances") is None
    assert discovery.match("PATCH", "/compute/v1/projects/p/zones/z/instances") is None
    assert discovery.match("GET", "/storage/v1/b/x") is None
