"""Problems of a document: one line each, with the place and the remedy.

Every validator yields :class:`Problem` values; readers raise all of them in one :class:`SpecError`::

    job.yaml:7: nodes.mn: unknown key (did you mean min?)
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path, PurePosixPath

_PLAIN_KEY = re.compile(r"[A-Za-z_][-A-Za-z0-9_]*\Z")
_SHOWN = 60  # characters of a wrong value that a message repeats
_MOST_CHOICES, _CLOSE = 12, 6


@dataclass(frozen=True)
class Problem:
    """A problem in a document: its place, the value found there (as text, or None) and the remedy."""

    path: str
    message: str
    value: str | None = None
    hint: str | None = None  # the nearest valid name
    source: str = ""  # the file's name
    line: int | None = None

    def __str__(self) -> str:
        place = self.source + (f":{self.line}" if self.source and self.line else "")
        parts = [part for part in (place, self.path, self.value, self.message) if part]
        return ": ".join(parts) + (f" (did you mean {self.hint}?)" if self.hint else "")


class SpecError(ValueError):
    """A document is invalid. ``problems`` lists all problems; ``str()`` has one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def called(file: Path) -> str:
    """Return what messages call a file: the path that a person gave, of an absolute one the name."""
    return file.name if file.is_absolute() else str(file)


def problem(path: str, message: str, value: object = None, hint: str | None = None) -> Problem:
    """Return a problem; ``value`` is shown as JSON, shortened."""
    return Problem(path, message, None if value is None else shown(value), hint)


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Return the option closest to ``word``, or None if none is close."""
    every = list(options)
    if found := _closest(word, every):
        return found
    folded = {option.lower().replace("_", "-"): option for option in every}
    found = _closest(word.lower().replace("_", "-"), list(folded))
    return folded[found] if found else None


def _closest(word: str, options: list[str]) -> str | None:
    """Return the most similar option; of equally similar ones, that with the same beginning: us-eest1 is us-east1."""
    found = difflib.get_close_matches(word, options, n=_CLOSE, cutoff=0.6)
    return max(found, key=lambda one: _likeness(one, word), default=None)


def _likeness(one: str, word: str) -> tuple[float, int]:
    beginning = takewhile(lambda pair: pair[0] == pair[1], zip(one, word, strict=False))
    return difflib.SequenceMatcher(None, one, word).ratio(), len(list(beginning))


def choices(word: str, options: Iterable[str]) -> str:
    """Return the options as text: all if they are few, otherwise those closest to ``word`` and how many more exist."""
    every = list(options)
    if len(every) <= _MOST_CHOICES:
        return ", ".join(every)
    close = difflib.get_close_matches(word.lower(), every, n=_CLOSE, cutoff=0.0)
    return f"{', '.join(close)} and {len(every) - _CLOSE} others"


def shown(value: object) -> str:
    """Return a value for a message: one line of JSON, at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    end = '..."' if isinstance(value, str) else "..."
    return text if len(text) <= _SHOWN else text[: _SHOWN - len(end)] + end


def join(path: str, key: str | int) -> str:
    """Return ``path`` extended by ``key``, as messages write it: ``pools[1].zones``, ``env["a b"]``."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if not _PLAIN_KEY.match(key):
        return f"{path}[{json.dumps(key, ensure_ascii=False)}]"
    return f"{path}.{key}" if path else key


def located(error: SpecError, source: str, lines: Mapping[str, int]) -> SpecError:
    """Return the error with the file's name and, for each problem, the line of its key or nearest parent key."""
    return SpecError(replace(p, source=source, line=_line(p.path, lines)) for p in error.problems)


def _line(path: str, lines: Mapping[str, int]) -> int | None:
    while path and path not in lines:
        path = re.sub(r"(\.[^.\[\]]*|\[[^\[\]]*\]|^[^.\[\]]*)\Z", "", path)
    return lines.get(path)


# --- hints: field names of other tools, and shell lines in place of a list of words

# Words of SkyPilot, dstack, Determined, SageMaker, torchrun, Kubernetes and the clouds -> fields or values of ours. The
# first one that is valid in the word's place is suggested. Words without an equivalent are left out: max_duration
# (dstack) and max_run (SageMaker) end a job, and no field of the job file does that.
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
    "region": ("regions",), "replicas": ("nodes",), "resource_pool": ("pools",), "resources": ("pools",),
    "retries": ("retry", "crashes"), "run": ("command",), "script": ("command",), "setup": ("requirements",),
    "slots_per_trial": ("nodes",), "source_dir": ("source",), "spot": ("policy",), "spot_max_price": ("max_price",),
    "spot_policy": ("policy",), "standard": ("on-demand",), "time_limit": ("deadline",), "timeout": ("deadline",),
    "use_spot": ("policy",), "use_spot_instances": ("policy",),
    "workdir": ("source",), "workers": ("nodes",), "working_dir": ("source",), "zone": ("zones", "pools"),
    "zones": ("pools",),
}  # fmt: skip


def meant(word: str, options: Collection[str]) -> str | None:
    """Return the option that means the same as another tool's word, or None. Case and ``-`` or ``_`` do not matter."""
    folded = word.lower().replace("-", "_")
    found = (folded, *MEANT.get(folded, ()))
    return next((ours for ours in found if ours in options), None)


SHELL_WORDS = frozenset({"&&", "||", "|", ";", ">", ">>", "<", "&", "2>&1"})
_RUNNERS = {
    "python": "`python:` names the interpreter",
    "torchrun": "Spotkeeper runs torchrun itself",
    "accelerate": "Spotkeeper runs torchrun itself, in place of `accelerate launch`",
    "deepspeed": "Spotkeeper runs torchrun itself",
    "srun": "Spotkeeper runs torchrun itself, on all machines",
    "mpirun": "Spotkeeper runs torchrun itself, on all machines",
    "uv": "`python:` names the interpreter",
    "bash": "Spotkeeper runs Python under torchrun",
    "sh": "Spotkeeper runs Python under torchrun",
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
