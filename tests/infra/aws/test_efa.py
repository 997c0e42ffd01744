"""Where a pool's Elastic Fabric Adapters are, by network card: EC2's stand-in takes every layout that is declared."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from infra.catalog import AWS_EFA
from infra.settings.aws import interfaces
from infra.settings.pool import Machine
from spotkeeper.contract.cloud import ResultKind
from spotkeeper.contract.stack import Interface, Model
from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2
from tests.infra.settings import stackfiles
from tests.reconcile.clouds.ec2.region import POOL, STACK, insert, region
from tests.reconcile.clouds.ec2.standin.launch import CARDS
from tests.reconcile.clouds.ec2.standin.things import Template


def layout(kind: str, efa: int) -> tuple[Interface, ...]:
    return interfaces(replace(stackfiles.read("aws").pools[1], machine=Machine(kind, efa=efa)))


@pytest.mark.parametrize("kind", sorted(CARDS))
def test_every_efa_types_interfaces_are_valid_for_ec2(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for efa in {1, AWS_EFA[kind]}:
        cards = layout(kind, efa)
        assert sum(each.kind.startswith("efa") for each in cards) == efa
        pool = replace(POOL, templates={"on-demand": "lt-x"}, template_versions={"on-demand": "1"},
                       interfaces=cards, security_groups=("sg-1",))  # fmt: skip
        with region(monkeypatch) as here:
            here.site.templates["lt-x"] = Template("lt-x", {"1": {"InstanceType": kind}})
            ec2 = open_ec2(replace(STACK, pools=(pool,)), here.engine, here.endpoint)  # type: ignore[arg-type]
            done = ec2.perform(insert(model=Model.ON_DEMAND), 30)
            assert done.kind is ResultKind.ACCEPTED, done.detail


def test_only_the_first_interface_carries_ip() -> None:
    assert layout("p4d.24xlarge", 4) == (
        Interface(0, 0, "interface"),
        *(Interface(0, 1, "efa-only"), Interface(1, 0, "efa-only")),
        *(Interface(2, 0, "efa-only"), Interface(3, 0, "efa-only")),
    )
    assert layout("p6-b300.48xlarge", 16)[:2] == (Interface(0, 0, "interface"), Interface(1, 0, "efa-only"))
    assert layout("g5.12xlarge", 1) == (Interface(0, 0, "efa"),), "one interface: it may have a public address"
    assert layout("g5.12xlarge", 0) == ()
