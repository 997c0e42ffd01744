"""``spotkeeper trace``: the newest recovery, all of them, and JSON."""

from __future__ import annotations

import json

from msgspec.structs import replace

from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.trace import RecoveryTrace
from spotkeeper.report.text.waterfall import slowest
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job
from tests.report.job.test_trace import ANNOUNCED
from tests.report.ledgers import lost


def test_the_newest_recovery_or_all(cli: Cli, store: Store) -> None:
    a_job(store)
    later = [one for one in lost(1) if one.gen != 1]
    for entry in (*ANNOUNCED, *later):
        moved = {"at": entry.at + 1000.0, "id": f"x{entry.id}", "gen": entry.gen + 1 if entry.gen else 0}
        store.append_ledger(JOB, replace(entry, **moved) if entry in later else entry)
    newest, every = cli("trace", "first").out, cli("trace", "first", "--all").out
    assert "recovery 2, " in newest and "recovery 1, " not in newest
    assert "recovery 1, " in every and "recovery 2, " in every
    found = json.loads(cli("trace", "first", "--json").out)
    assert [one["number"] for one in found["recoveries"]] == [1, 2]
    assert found["recoveries"][0]["spans"][2]["machine"] == f"sk-prod-{JOB}-n0000-a2"


def test_without_recorded_parts_a_recovery_says_so() -> None:
    one = RecoveryTrace(1, 2, "crash", (), began=0.0, end=100.0, idle_s=100.0, steps_again=None, spans=())
    assert slowest(one) == "the times of the parts of this recovery are not recorded"
    assert slowest(replace(one, idle_s=0.0)) == "training has not stopped"
