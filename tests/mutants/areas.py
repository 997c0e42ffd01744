"""What is mutated, and which tests a mutant meets that coverage cannot name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

RECONCILE, AGENT, TRAIN = "spotkeeper/reconcile", "agent/spotkeeper_agent", "spotkeeper/train"
AREAS: dict[str, tuple[str, ...]] = {  # folders and files; the last area that has a file counts
    "decide": (f"{RECONCILE}/decide",),
    "queue": (f"{RECONCILE}/decide/queue", "spotkeeper/contract/allocation.py"),
    "searches": ("spotkeeper/contract/sweep.py", f"{RECONCILE}/decide/gang/rungs.py", "spotkeeper/report/sweep.py"),
    "select": (f"{RECONCILE}/select",),
    "rounds": (f"{RECONCILE}/controller", f"{RECONCILE}/service/rounds.py"),
    "stores": (f"{RECONCILE}/store",),
    "clouds": (f"{RECONCILE}/clouds",),
    "auth": (f"{RECONCILE}/service/auth.py", f"{RECONCILE}/service/auth_aws.py"),
    "agent": (f"{AGENT}/agent/notices.py", f"{AGENT}/agent/upgrade.py", f"{AGENT}/cloud/notice.py"),
    "mirror": (f"{AGENT}/job/mirror.py", f"{AGENT}/job/mirror_transfer.py"),
    "roothelper": tuple(f"{AGENT}/host/{name}.py" for name in ("roothelper", "roothelper_fence", "mounting")),
    "checkpoint": (f"{TRAIN}/checkpoint", f"{TRAIN}/core/headroom.py"),
    "sampler": (f"{TRAIN}/data/sampler.py", f"{TRAIN}/core/division.py", f"{TRAIN}/core/microbatch.py"),
    "settings": ("infra/settings",),
    "infra": ("infra/aws", "infra/gcp", "infra/shared.py"),
}

# Code that tests start in processes of its own, where coverage does not look: file, or folder -> tests.
PROCESSES: dict[str, tuple[str, ...]] = {
    f"{TRAIN}/checkpoint": tuple(f"tests/train/checkpoint/test_{name}.py" for name in ("saver", "part", "restore")),
    f"{TRAIN}/checkpoint/sharded.py": ("tests/train/checkpoint/test_sharded.py",),
    f"{TRAIN}/checkpoint/exchange.py": ("tests/train/checkpoint/test_sharded.py",),
    f"{TRAIN}/checkpoint/reshard.py": ("tests/train/checkpoint/test_sharded.py",),
    f"{TRAIN}/data/sampler.py": ("tests/train/data/test_sampler.py",),
    f"{AGENT}/host": ("tests/agent/host/test_roothelper.py", "tests/agent/systemd/test_systemd.py"),
    f"{AGENT}/agent": ("tests/agent/agent/test_upgrade.py", "tests/agent/agent/test_notices.py"),
    f"{AGENT}/job": ("tests/agent/job/test_mirror.py",),
}

# The tests that mutants meet: those of the areas. Left out are whole runs and searches, loads and tables of minutes,
# and parts that are not mutated.
TESTS = (
    "tests/reconcile",
    "tests/infra",
    "tests/train/checkpoint",
    "tests/train/core/test_pace.py",
    "tests/train/core/test_division.py",
    "tests/train/core/test_headroom.py",
    "tests/train/core/test_micro.py",
    "tests/train/data",
    "tests/train/loop/test_boundary.py",
    "tests/train/loop/test_run.py",
    "tests/train/loop/test_update.py",
    "tests/agent/agent/test_notices.py",
    "tests/agent/agent/test_upgrade.py",
    "tests/agent/cloud",
    "tests/agent/host",
    "tests/agent/job",
    "tests/agent/systemd/test_systemd.py",
    "tests/cli/stacks/test_check.py",
    "tests/cli/stacks/test_schema.py",
    "tests/cli/jobs/test_queue.py",
    "tests/cli/sweeps",
    "tests/client",
    "tests/contract/test_sweep.py",
    "tests/report/test_queue.py",
    "tests/report/test_sweep.py",
    "tests/security/test_lambda.py",
    "tests/security/test_table.py",
    "tests/sim/test_ledger.py",
    "tests/sim/test_polls.py",
)

# An area whose mutants meet these tests alone while no other area is asked for: recording all takes long.
NEAR = {
    "queue": (
        *("tests/reconcile/decide/queue", "tests/reconcile/store/test_allocation.py"),
        *("tests/reconcile/controller/test_queue_rounds.py", "tests/cli/jobs/test_queue.py"),
        "tests/report/test_queue.py",
    ),
    "searches": (
        *("tests/reconcile/decide/gang/test_rungs.py", "tests/reconcile/decide/gang/test_rung_decisions.py"),
        *("tests/contract/test_sweep.py", "tests/report/test_sweep.py", "tests/cli/sweeps"),
    ),
}


def sources(root: Path, names: list[str]) -> dict[str, str]:
    """File -> area, relative to ``root``; ``names`` empty: all areas."""
    found = {}
    for area in names or AREAS:
        for entry in AREAS[area]:
            path = root / entry
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                found[str(file.relative_to(root))] = area
    return found


def tests(root: Path, names: Sequence[str] = ()) -> list[str]:
    """The files of tests that the mutants of these areas meet; ``names`` empty: of all."""
    places = TESTS
    if names and all(area in NEAR for area in names):
        places = tuple(place for area in names for place in NEAR[area])
    found = (str(path.relative_to(root)) for path in sorted((root / "tests").rglob("test_*.py")))
    return [name for name in found if any(name == entry or name.startswith(entry + "/") for entry in places)]


def by_hand(file: str) -> list[str]:
    places = (place for place in PROCESSES if file == place or file.startswith(place + "/"))
    return [test for place in places for test in PROCESSES[place]]


def nearness(file: str, test: str) -> int:
    """How many folders a test shares with a file: ``tests/`` mirrors the sources."""
    mirror = file.replace("agent/spotkeeper_agent/", "agent/").removeprefix("spotkeeper/").split("/")
    shared = (one == other for one, other in zip(mirror, test.removeprefix("tests/").split("/"), strict=False))
    return len(list(itertools.takewhile(bool, shared)))
