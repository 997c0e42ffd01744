"""What other tools call a thing that has a name here: for "did you mean" alone, nothing else is read by these words.

Words of SkyPilot, dstack, Determined, SageMaker, torchrun, Kubernetes and the clouds. Of several meanings the first
counts that is asked for where the word stands. What does not quite fit is left out, rather than to promise too much
(dstack's ``max_duration`` and SageMaker's ``max_run`` end a job; nothing here does).
"""

from __future__ import annotations

from collections.abc import Collection

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
    """Which of ``options`` another tool's ``word`` stands for, or None. One of them written otherwise is that one."""
    folded = word.lower().replace("-", "_")
    found = (folded, *MEANT.get(folded, ()))
    return next((ours for ours in found if ours in options), None)
