"""IAM over time: new bindings do not count at once, ids of deleted roles stay taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from spotkeeper.local.access.iam import ACCOUNT, CUSTOM_ROLE
from spotkeeper.local.compute.resources import FUNCTION, Declaration
from spotkeeper.local.core.errors import ApiError
from tests.properties.plane import Plane, Time

DAY_S = 86400.0
BUILDER = "sk-demo-bd@local.iam.gserviceaccount.com"


@pytest.fixture
def plane() -> Iterator[Plane]:
    made = Plane(Time())
    yield made
    made.close()


def declare(plane: Plane, type_: str, name: str, **properties: object) -> dict[str, str]:
    with plane.world.state.transaction():
        return plane.parts.resources.create(type_, Declaration(name, properties)).outputs  # type: ignore[arg-type]


def delete(plane: Plane, type_: str, name: str) -> None:
    with plane.world.state.transaction():
        plane.parts.resources.delete(type_, name)


@pytest.mark.parametrize(("days", "free"), [(1, True), (8, False), (36, False), (38, True)])
def test_the_id_of_a_deleted_role_stays_taken_for_weeks(plane: Plane, days: int, free: bool) -> None:
    declare(plane, CUSTOM_ROLE, "sk_demo_read", permissions=[])
    delete(plane, CUSTOM_ROLE, "sk_demo_read")
    plane.time.now += days * DAY_S
    if free:
        declare(plane, CUSTOM_ROLE, "sk_demo_read", permissions=[])
        return
    with pytest.raises(ApiError, match="marked for deletion"):
        declare(plane, CUSTOM_ROLE, "sk_demo_read", permissions=[])
    declare(plane, CUSTOM_ROLE, "sk_demo_look_12345678", permissions=[])


def test_each_account_has_its_own_number(plane: Plane) -> None:
    first = declare(plane, ACCOUNT, "sk-demo-fn")["uniqueId"]
    with plane.world.state.transaction():
        kept = plane.parts.resources.update(ACCOUNT, Declaration("sk-demo-fn", {"displayName": "other"})).outputs
    assert kept == {"uniqueId": first} and len(first) == 21
    delete(plane, ACCOUNT, "sk-demo-fn")
    assert declare(plane, ACCOUNT, "sk-demo-fn")["uniqueId"] != first


def test_a_build_is_refused_until_its_bindings_take_effect(plane: Plane) -> None:
    plane.world.config = replace(plane.world.config, timing=replace(plane.world.timing, grants_s=90.0))
    plane.declare_identities("demo")
    function = {"buildConfig": {"serviceAccount": f"projects/local/serviceAccounts/{BUILDER}"}}
    functions = plane.parts.functions
    with pytest.raises(ApiError, match=r"Access to bucket gcf-v2-sources-[0-9]+ denied"):
        functions.check(FUNCTION, function)  # type: ignore[arg-type]
    plane.time.now += 91.0
    functions.check(FUNCTION, function)  # type: ignore[arg-type]
