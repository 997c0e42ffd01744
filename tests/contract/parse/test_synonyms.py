"""Words of other tools are answered with ours."""

from __future__ import annotations

import pytest
from msgspec.structs import fields

from infra.settings.model import Settings
from spotkeeper.contract.job import Checkpoint, JobSpec, Retry
from spotkeeper.contract.parse.problem import MEANT, SpecError
from spotkeeper.contract.parse.typed import convert, load_yaml
from spotkeeper.contract.stack import PoolState, Price

JOB = "name: first\ncommand: [/opt/train.py]\n"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("budget: 40", "max_usd"),
        ("max_cost: 40", "max_usd"),  # and not max_wait, which is nearer by its letters
        ("use_spot: true", "policy"),
        ("spot: true", "policy"),
        ("num_nodes: 2", "nodes"),
        ("nnodes: '2:4'", "nodes"),
        ("gpus: 4", "nproc"),
        ("accelerators: A100:8", "pools"),
        ("instance_type: p4d.24xlarge", "pools"),
        ("timeout: 6h", "deadline"),
        ("envs: {A: b}", "env"),
        ("workdir: code", "source"),
        ("max_restarts: 3", "retry"),
        ("Time-Limit: 6h", "deadline"),
    ],
)
def test_a_key_of_another_tool_names_the_equivalent(theirs: str, ours: str) -> None:
    key = theirs.partition(":")[0]
    with pytest.raises(SpecError) as caught:
        load_yaml(f"{JOB}{theirs}\n", JobSpec)
    assert str(caught.value).removeprefix("3: ") == f"{key}: unknown key (did you mean {ours}?)"


@pytest.mark.parametrize(("theirs", "ours"), [("preemptible", "spot"), ("auto", "balanced"), ("standard", "on-demand")])
def test_another_tools_purchase_option_names_the_equivalent(theirs: str, ours: str) -> None:
    with pytest.raises(SpecError, match=rf"\(did you mean {ours}\?\)$"):
        load_yaml(f"{JOB}policy: {theirs}\n", JobSpec)


def test_a_misnamed_required_key_is_not_also_reported_as_missing() -> None:
    with pytest.raises(SpecError) as caught:
        load_yaml("name: first\nentrypoint: [/opt/train.py]\n", JobSpec)
    assert str(caught.value) == "entrypoint: unknown key (did you mean command?)"


def test_a_synonym_depends_on_its_place() -> None:
    with pytest.raises(SpecError, match=r"retry.retries: unknown key \(did you mean crashes\?\)"):
        load_yaml(f"{JOB}retry: {{retries: 3}}\n", JobSpec)


@pytest.mark.parametrize(("theirs", "ours"), [("Region", "region"), ("Budget", "budget"), ("regon", "region")])
def test_a_misspelt_own_key_is_not_taken_for_a_synonym(theirs: str, ours: str) -> None:
    with pytest.raises(SpecError, match=rf"{theirs}: unknown key \(did you mean {ours}\?\)"):
        convert({theirs: "x"}, Settings)


def test_every_synonym_names_an_existing_key() -> None:
    ours = {field.encode_name for kind in (JobSpec, Checkpoint, Retry, PoolState, Price) for field in fields(kind)}
    ours |= {"balanced", "spot", "on-demand", "shuffle"}
    for word, meant in MEANT.items():
        assert word == word.lower() and "-" not in word
        assert ours.issuperset(meant), word
        assert word not in JobSpec.__struct_fields__, word
