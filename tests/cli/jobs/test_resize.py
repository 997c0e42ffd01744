"""`spotkeeper resize NODES --drop NODE`: which nodes go."""

from __future__ import annotations

import pytest

from spotkeeper.contract.job import JobSpec, Nodes
from spotkeeper.contract.record import Node, Phase
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("2", "--drop", "3"), "has no node 3: its nodes are 0, 1, 2"),
        (("2", "--drop", "0", "--drop", "1"), "has 3, so a size of 2 drops 1, but 2 were named"),
        (("1", "--drop", "2", "--drop", "2"), "has 3, so a size of 1 drops 2, but 1 were named"),
        (("4", "--drop", "1"), "has 3, so a size of 4 drops no node: only a smaller size does"),
    ],
)
def test_nodes_that_a_resize_cannot_drop_are_refused_at_once(
    cli: Cli, store: Store, words: tuple[str, ...], why: str
) -> None:
    a_job(store, phase=Phase.RUN, size=3, asked=3, nodes=(Node(),) * 4)
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(1, 4)))
    done = cli("resize", "first", *words)
    assert (done.code, done.err) == (4, f"error: first ({JOB}) {why}\n")
    assert store.list_requests(JOB) == ()


def test_a_resize_names_the_nodes_that_go(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.RUN, nodes=(Node(),) * 4)
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(1, 4)))
    done = cli("resize", "first", "2", "--drop", "3", "--drop", "0")
    assert (done.code, done.out) == (0, f"first ({JOB}): requested: resize to 2 machines without nodes 0, 3\n")
    assert [(request.nodes, request.drop) for request in store.list_requests(JOB)] == [(2, (0, 3))]
