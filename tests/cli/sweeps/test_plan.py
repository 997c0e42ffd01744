"""`sweep --dry-run`: the values of the trials, and what they may cost; problems of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.client.test_sweep import FILE, drawn, sweep_yaml

__all__ = ["sweep_yaml"]


def test_a_dry_run_shows_values_and_cost_and_writes_nothing(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    (sweep_yaml.parent / "job.yaml").write_text("name: a\ncommand: [train.py, '{lr}']\nsource: code\nwork: 3h\n")
    sweep_yaml.write_text(FILE.replace("trials: 3", "trials: 27\nmax_usd: 50"))
    before = store.list("")
    done = cli("sweep", sweep_yaml, "--dry-run", "--json")
    assert done.code == 0 and store.list("") == before
    told = json.loads(done.out)
    assert told["values"] == list(drawn(27))
    assert [(rung["step"], rung["trials"], rung["continuing"]) for rung in told["rungs"]] == [(10, 27, 9), (30, 9, 3)]
    steps = 27 * 10 + 9 * 20 + 3 * 60
    assert told["steps_share"] == pytest.approx(steps / (27 * 90))
    assert told["whole_usd"] == pytest.approx(27 * 3 * 3.0), "trials * hours * the dearest machine"
    assert told["at_most_usd"] == pytest.approx(27 * 3 * 3.0 * steps / (27 * 90))
    lines = cli("sweep", sweep_yaml, "--dry-run").out.splitlines()
    assert lines[0].split() == ["trial", "lr", "o"] and len(lines) == 1 + 20 + 1 + 1 + 5
    assert lines[-5:] == [
        "lr: 27 trials (random, seed 0), at most 6 at a time, for the smallest loss",
        "step 10: 9 of 27 continue",
        "step 30: 3 of 9 continue",
        "26 % of the steps that all trials to their ends would take",
        "cost: at most $63.00 at the highest on-demand price, and $243.00 for all trials to their ends; it stops at "
        "$50.00 (`max_usd`)",
    ]


@pytest.mark.parametrize(
    ("work", "limit", "line"),
    [
        ("", "", "cost: unknown, since the job file has no `work` (such as 2h)"),
        ("", "max_usd: 5\n", "cost: at most $5.00 (`max_usd`)"),
        ("work: 1h\n", "", "cost: at most $9.00 at the highest on-demand price"),
    ],
)
def test_the_bound_of_the_cost(cli: Cli, store: Store, sweep_yaml: Path, work: str, limit: str, line: str) -> None:
    (sweep_yaml.parent / "job.yaml").write_text(f"name: a\ncommand: [train.py, '{{lr}}']\nsource: code\n{work}")
    sweep_yaml.write_text(FILE.partition("stop:")[0] + limit)
    assert cli("sweep", sweep_yaml, "--dry-run").out.splitlines()[-1] == line


def test_problems_of_the_file_are_printed(cli: Cli, store: Store, sweep_yaml: Path) -> None:
    sweep_yaml.write_text(FILE.replace("trials: 3\n", ""))
    done = cli("sweep", sweep_yaml)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: sweep.yaml:2: trials: missing, want a whole number: `sampler: random` has no end\n"


def test_further_trials_have_a_limit_that_json_can_store(cli: Cli) -> None:
    """Stored as null, an infinite one would have been no limit."""
    for usd in ("inf", "nan"):
        done = cli("sweep", "extend", "lr", "--trials", "+3", "--max-usd", usd)
        assert done.code == 2 and "--max-usd" in done.err
