"""Suggestions for "did you mean": field names of other tools, and shell lines in place of a list of words."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import PurePosixPath

# Words of SkyPilot, dstack, Determined, SageMaker, torchrun, Kubernetes and the clouds -> fields or values. The first
# that is valid in its place is suggested. Words without an equivalent are missing: dstack's max_duration and
# SageMaker's max_run end a job, and no field here does that.
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
    """Return the option that another tool's word stands for, or None. Ignores case and ``-`` versus ``_``."""
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
    """Return why a word such as ``torchrun`` cannot be the script; None if it can."""
    return _RUNNERS.get(PurePosixPath(word).name.rstrip("0123456789."))


def argv(line: str) -> tuple[str, ...]:
    """Return a shell line as a valid `command`, without ``python`` or ``torchrun``; () if that is impossible."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    if words and runner(words[0]):
        words = words[next((at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words)) :]
    well = words and words[0] and not SHELL_WORDS.intersection(words)
    return tuple(words) if well else ()
