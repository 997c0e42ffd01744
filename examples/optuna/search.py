"""An Optuna study whose trials are jobs. Stop it at any time and start it again, here or on another machine.

    spotkeeper local up                  # or export SPOTKEEPER_STACK=... SPOTKEEPER_BUCKET=...
    python examples/optuna/search.py --study spirals --trials 8 --parallel 2

docs/searches.md, "Optuna", explains it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import optuna
from optuna.storages import JournalStorage

from spotkeeper.integrations.optuna import BucketJournal, JobFailedError, SpotkeeperObjective

JOB = Path(__file__).with_name("job.yaml")


def params(trial: optuna.Trial) -> dict[str, float | int]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "width": trial.suggest_int("width", 8, 64, step=8),
        "momentum": trial.suggest_float("momentum", 0.0, 0.95),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", default="spirals")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--job", type=Path, default=JOB)
    args = parser.parse_args()

    study = optuna.create_study(
        study_name=args.study,
        storage=JournalStorage(BucketJournal(args.study)),
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=50),
    )
    objective = SpotkeeperObjective(args.job, params, metric="loss")
    objective.resume(study)  # the trials that an earlier program left running
    study.optimize(objective, n_trials=args.trials, n_jobs=args.parallel, catch=(JobFailedError,))
    print(f"best: {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
