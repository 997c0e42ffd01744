"""List filters as the adapter, the drain and gcloud write them."""

from __future__ import annotations

import pytest

from spotkeeper.local.compute.query import Filter
from spotkeeper.local.core.errors import ApiError

VM = {
    "name": "sk-demo-abcdefgh-n0001-a3",
    "status": "RUNNING",
    "zone": "http://127.0.0.1:1/compute/v1/projects/p/zones/us-central1-a",
    "labels": {"sk-stack": "demo", "sk-job": "abcdefgh", "sk-node": "1"},
    "scheduling": {"preemptible": True},
    "diskSizeGb": "50",
    "disks": [{"deviceName": "boot"}, {"deviceName": "sk-data"}],
}
HITS = [
    "labels.sk-stack=demo",
    'labels.sk-stack = "demo" AND labels.sk-job:*',
    "(labels.sk-stack=demo) (status=RUNNING)",
    "(labels.sk-stack=demo) AND (status=RUNNING)",
    'labels.sk-stack eq "demo"',
    '(name eq ".*-n0001-.*") (labels.sk-job eq abcdefgh)',
    "status ne TERMINATED",
    "status != TERMINATED",
    "name=sk-demo-*",
    "zone=us-central1-a",
    "labels.sk-stack:dem",
    "scheduling.preemptible=true",
    "diskSizeGb > 9",
    "(name=other) OR (status=RUNNING)",
    "NOT status=TERMINATED",
    "",
]
MISSES = [
    "labels.sk-stack=dem",
    "labels.sk-stack=demo AND status=TERMINATED",
    "(labels.sk-stack=demo) (status=TERMINATED)",
    'name eq "r0001"',
    "labels.missing:*",
    "status != RUNNING",
    "diskSizeGb > 60",
    "NOT status=RUNNING",
    "(name=other) OR (status=TERMINATED)",
    "zone=us-central1-b",
]
WRONG = [
    *("labels.sk-stack", "= demo", "name = ", 'name eq "("', "a=1 OR", "a=1 OR b=2", "name ~ x", "(a=1 b=2) OR c=3"),
    *(
        'name = "a" (',
        "(a=1",
        "a=1)",
        ")a=1(",
        "((a=1)",
        "()",
        "(a=1) ()",
        "AND",
        "a=1 AND",
        "(a=1) AND OR (b=2)",
        "NOT",
    ),
]


@pytest.mark.parametrize("text", HITS)
def test_matching_filters(text: str) -> None:
    assert Filter.parse(text).matches(VM)


@pytest.mark.parametrize("text", MISSES)
def test_filters_that_do_not_match(text: str) -> None:
    assert not Filter.parse(text).matches(VM)


@pytest.mark.parametrize("text", WRONG)
def test_unsupported_filters_are_refused(text: str) -> None:
    with pytest.raises(ApiError):
        Filter.parse(text)
