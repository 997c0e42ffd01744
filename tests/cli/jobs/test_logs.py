"""`logs`: one node's or all of them, once or while they grow."""

from __future__ import annotations

import json

import msgspec
import pytest

from spotkeeper.cli.jobs.logs import follow
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.uploads import join_log
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import HEAD, JOB, a_job, failed, stdout


def test_logs(cli: Cli, store: Store) -> None:
    a_job(store)
    store.put(f"jobs/{JOB}/logs/0/1.log", b"old\n")
    store.put(f"jobs/{JOB}/logs/0/10.log", b"new\n")
    assert cli("logs", "first").out == "new\n"
    assert cli("logs", "first", "--gen", "1").out == "old\n"
    assert json.loads(cli("logs", "first", "--json").out)["gen"] == 10
    assert cli("logs", "first", "--node", "5").err == "error: node 5: first has nodes 0 to 1\n"
    missing = cli("logs", "first", "--node", "1")
    assert (missing.code, missing.err.splitlines()[0]) == (3, "error: first: node 1 has no log yet")
    held = store.read_record(JOB)
    assert held is not None
    assert store.cas_record(msgspec.structs.replace(held.value, phase=Phase.DONE), held.token)
    told = cli("logs", "first", "--node", "1").err
    assert "no log: nothing was printed\n  try: logs of the other nodes: --node all" in told
    assert "generations with a log: 1, 10" in cli("logs", "first", "--gen", "7").err
    for gen in (1, 10):
        store.delete(f"jobs/{JOB}/logs/0/{gen}.log")
    assert cli("logs", "first", "--node", "all").err == "error: first: no node has a log: nothing was printed\n"


def test_logs_of_all_nodes_say_how_to_read_the_rest(cli: Cli, store: Store) -> None:
    a_job(store)
    for node in (0, 1):
        store.put(f"jobs/{JOB}/logs/{node}/2.log", join_log([stdout(2048 * node, b"said\n", node)]))
    store.put(f"jobs/{JOB}/logs/1/1.log", b"older\n")
    done = cli("logs", "first", "--node", "all")
    second = "... 2.0 KB left out here; the machine has the whole file: /run/0/stdout.log"
    other = f"--- node 1 (sk-prod-{JOB}-n0001-a1) stdout\n"
    assert done.out == f"{HEAD}said\n{other}{second}\nsaid\n"
    assert done.err == f"the rest of the log is lost, since sk-prod-{JOB}-n0001-a1 no longer belongs to the job\n"
    assert [one["node"] for one in json.loads(cli("logs", "first", "--node", "all", "--json").out)] == [0, 1]
    store.put(f"jobs/{JOB}/logs/0/2.log", join_log([stdout(2048, b"said\n")]))
    assert cli("logs", "first").err == ("the whole log: spotkeeper ssh first --node 0 -- cat /run/0/stdout.log\n")
    assert cli("logs", "first", "--node", "every").code == 2


def test_logs_of_a_job_on_hold_end_with_a_note(cli: Cli, store: Store) -> None:
    failed(store)
    for more, said in (((), ()), (("--follow",), ("generation 2, which failed:",))):
        done = cli("logs", "first", "--node", "1", *more)
        assert (done.code, done.out) == (0, "this does not fit\n")
        assert done.err.splitlines() == [
            *said,
            "first is on hold (node 1 exited with 93)",
            "  try: spotkeeper resume first, or spotkeeper cancel first",
        ]
    assert "holds" not in cli("logs", "first", "--node", "1", "--json").err


def test_a_followed_log_names_its_generation(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a resume the newest log is still that of the crash."""
    failed(store)
    cli("resume", "first")
    looks = 0

    def goes_on(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            store.put(f"jobs/{JOB}/logs/1/3.log", b"step 1\n")
            return
        held = store.read_record(JOB)
        assert held is not None
        over = msgspec.structs.replace(held.value, phase=Phase.END, outcome=Outcome.SUCCEEDED, nonce="n2")
        assert store.cas_record(over, held.token)

    monkeypatch.setattr(follow, "__defaults__", (goes_on,))
    done = cli("logs", "first", "--node", "1", "--follow")
    assert done.out == "this does not fit\nstep 1\n"
    assert done.err.splitlines() == ["generation 2, which failed:", "generation 3:"]
