"""What people write and what they mean: other tools' words, and shell lines where a command is a list of words.

Used for "did you mean" only; nothing else is read by these words.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import PurePosixPath

# Words of SkyPilot, dstack, Determined, SageMaker, torchrun, Kubernetes and the clouds. Of several meanings the first
# that fits the place counts. A word without a close match is left out: dstack's max_duration and SageMaker's max_run
# end a job, and no field here does.
MEANT: dict[str, tuple[str, ...]] = {
    "accelerator": ("pools",), "accelerators": ("pools",), "attempts": ("retry",), "auto": ("balanced",),
    "bid": ("max_price",), "budget": ("max_usd",), "budget_usd": ("max_usd",),
    "capacity_type": ("policy",), "checkpoint_interval": ("checkpoint",), "checkpoint_interval_s": ("checkpoint",),
    "checkpoint_s3_uri": ("checkpoint",), "commands": ("command",), "cost_limit": ("max_usd",),
    "dependencies": ("requirements",), "due": ("deadline",), "duration": ("work",),
    "entry_point": ("command",), "entrypoint": ("command",), "environment": ("env",), "environment_variables": ("env",),
    "envs": ("env",),
    "gpu": ("nproc", "pools"), "gpus": ("nproc", "pools"), "gpus_per_node": ("nproc",),
    "instance_count": ("nodes",), "instance_type": ("machine_type", "pools"), "instance_types": ("pools",),
    "job_recovery": ("retry",), "machine_type": ("pools",),
    "max_cost": ("max_usd",), "max_restarts": ("retry", "crashes"), "max_restarts_on_errors": ("retry", "crashes"),
    "max_retry_attempts": ("retry",), "max_spend": ("max_usd",), "max_time": ("deadline",),
    "min_checkpoint_period": ("checkpoint",),
    "nnodes": ("nodes",), "nproc_per_node": ("nproc",), "num_gpus": ("nproc",), "num_machines": ("nodes",),
    "num_nodes": ("nodes",), "num_workers": ("nodes",),
    "on_demand": ("on-demand", "policy"), "preemptible": ("spot", "policy"), "provisioning_model": ("policy",),
    "region": ("pools",), "replicas": ("nodes",), "resource_pool": ("pools",), "resources": ("pools",),
    "retries": ("retry", "crashes"), "run": ("command",), "script": ("command",), "setup": ("requirements",),
    "slots_per_trial": ("nodes",), "source_dir": ("source",), "spot": ("policy",), "spot_max_price": ("max_price",),
    "spot_policy": ("policy",), "standard": ("on-demand",), "time_limit": ("deadline",), "timeout": ("deadline",),
    "use_spot": ("policy",), "use_spot_instances": ("policy",),
    "workdir": ("source",), "workers": ("nodes",), "working_dir": ("source",), "zone": ("zones", "pools"),
    "zones": ("pools",),
}  # fmt: skip


def meant(word: str, options: Collection[str]) -> str | None:
    """Which of ``options`` a ``word`` of another tool stands for, or None. Case, ``-`` and ``_`` do not matter."""
    folded = word.lower().replace("-", "_")
    found = (folded, *MEANT.get(folded, ()))
    return next((ours for ours in found if ours in options), None)


SHELL_WORDS = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "&", "2>&1"})
_RUNNERS = {
    "python": "`python:` names the interpreter",
    "torchrun": "Spotkeeper runs torchrun itself",
    "accelerate": "Spotkeeper runs torchrun itself, and its processes are accelerate's",
    "deepspeed": "Spotkeeper runs torchrun itself",
    "srun": "Spotkeeper runs torchrun itself, on all machines",
    "mpirun": "Spotkeeper runs torchrun itself, on all machines",
    "uv": "`python:` names the interpreter",
    "bash": "it runs Python under torchrun",
    "sh": "it runs Python under torchrun",
}


def runner(word: str) -> str | None:
    """Why a word that runs scripts (``torchrun``) is not the script; None: it does not."""
    return _RUNNERS.get(PurePosixPath(word).name.rstrip("0123456789."))


def argv(line: str) -> tuple[str, ...]:
    """A shell line as an accepted command, without what runs the script; empty if none is possible."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    if words and runner(words[0]):
        words = words[next((at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words)) :]
    well = words and words[0] and not SHELL_WORDS.intersection(words)
    return tuple(words) if well else ()
