"""Settings of a run: environment variables set by the agent, or defaults on a laptop."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spotkeeper.clock import Clock
from spotkeeper.train.core.errors import AttachError, CallError

MEAN_LIFE_S = 6 * 3600.0  # default mean time between losses of one spot machine
LOCAL_FOLDER = Path(".spotkeeper/ckpt")
LOCAL_OUTPUT = Path("output")
ARGV = "argv"  # key in a manifest's versions: command line of the script that saved; missing under an agent
_UNLOOPED: set[tuple[Path | None, int | None, Path | None]] = set()  # this process's runs that have not looped so far
_ATTACHED: set[tuple[Path | None, int | None]] = set()  # run folders and generations of this process's runs


@dataclass(frozen=True)
class RunSettings:
    """Settings of this process. ``managed``: whether an agent started the process."""

    managed: bool
    run: Path | None  # run folder, which holds the control file; None without an agent
    gen: int | None  # generation; None: one more than the newest found
    slot: int | None  # this node's number in the job
    folder: Path | None  # checkpoint folder; None: this node writes none
    late: Path | None  # checkpoint folder to use once the agent has mounted the disk
    output: Path  # folder for results, kept after the job
    saver: Path | None  # the saver's unix socket; None: start a private saver
    interval_s: float | None  # seconds between saves; None: by Young's formula
    mean_life_s: float  # mean time between losses, real seconds
    keep: int  # number of checkpoints kept
    seed: int
    snapshots: bool  # saves copy parameters and optimizer state while training continues, and images are kept
    overhead: float  # largest share of the training time that images may cost
    peers_mb_s: float | None  # most that a machine sends for a copy of sharded state in a neighbour's memory, megabytes
    # per second; None: no copies, as without ``snapshots``
    replicated: bool  # the job file says `checkpoint: {replicated: true}`
    max_world: int | None  # ranks at the job's largest size, if it may change its size
    until: int | None  # step after which a trial of a search saves and stops; None: it trains to its end
    metric: str  # the metric by which the search compares its trials; "": the job is no trial

    def alone(self) -> None:
        """Refuse a second run of this generation in this process: both would save into the same folder.

        Without an agent, a second run may begin once the script loops over the first; in a notebook, at any time.

        Raises:
            CallError: this process has begun another run.
        """
        notebook = hasattr(sys, "ps1") or "ipykernel" in sys.modules  # a notebook may run a cell again
        if (self.run, self.gen) in _ATTACHED or (self._key in _UNLOOPED and not self.managed and not notebook):
            raise CallError(
                "attach() was called twice, but a job has one run. Call attach() once with all models and optimizers "
                "(attach(a, [opt_a, opt_b], other=b)), and call run.steps() once for each loop"
            )

    def attached(self) -> None:
        """Note that the run has begun."""
        if self.managed:
            _ATTACHED.add((self.run, self.gen))
        _UNLOOPED.add(self._key)

    def looped(self) -> None:
        """Note that the script loops over ``run.steps()``."""
        _UNLOOPED.discard(self._key)

    def unlooped(self) -> bool:
        """Whether the run has begun, but the script has not looped over ``run.steps()`` yet."""
        return self._key in _UNLOOPED

    @property
    def _key(self) -> tuple[Path | None, int | None, Path | None]:
        return self.run, self.gen, self.folder and self.folder.absolute()

    @classmethod
    def from_env(cls, env: Mapping[str, str], *, folder: Path | None = None) -> RunSettings:
        """Read the ``SPOTKEEPER_*`` variables. ``folder``: the script's ``checkpoint_dir``, for runs without an agent.

        Raises:
            ValueError: a variable has a wrong value; the message names it.
        """
        managed = "SPOTKEEPER_RUN" in env
        if managed:
            folder = Path(env["SPOTKEEPER_CKPT"]) if env.get("SPOTKEEPER_CKPT") else None
        elif folder is None:
            folder = Path(env["SPOTKEEPER_CKPT"]) if env.get("SPOTKEEPER_CKPT") else LOCAL_FOLDER / _script()
        interval_s = _number(env, "SPOTKEEPER_INTERVAL_S", above=0.0)
        keep = int(_number(env, "SPOTKEEPER_KEEP", above=0) or 2)
        snapshots = env.get("SPOTKEEPER_SNAPSHOTS") == "1"
        return cls(
            managed=managed,
            run=Path(env["SPOTKEEPER_RUN"]) if managed else None,
            gen=_whole(env, "SPOTKEEPER_GEN"),
            slot=_whole(env, "SPOTKEEPER_SLOT"),
            folder=folder,
            late=Path(env["SPOTKEEPER_CKPT_LATE"]) if managed and env.get("SPOTKEEPER_CKPT_LATE") else None,
            output=Path(env.get("SPOTKEEPER_OUTPUT") or LOCAL_OUTPUT).absolute(),
            saver=Path(env["SPOTKEEPER_SAVER"]) if env.get("SPOTKEEPER_SAVER") else None,
            interval_s=interval_s,
            # Losses are counted on the stack's clock, saves on this machine's clock.
            mean_life_s=Clock.from_env().real_s(_number(env, "SPOTKEEPER_MEAN_LIFE_S", above=0.0) or MEAN_LIFE_S),
            keep=max(2, keep),
            seed=_whole(env, "SPOTKEEPER_SEED") or 0,
            snapshots=snapshots,
            overhead=_percent(env, "SPOTKEEPER_OVERHEAD_PERCENT", default=1.0) / 100,
            peers_mb_s=_number(env, "SPOTKEEPER_PEERS_MB_S", above=0.0) if snapshots else None,
            replicated=env.get("SPOTKEEPER_REPLICATED") == "1",
            max_world=_whole(env, "SPOTKEEPER_MAX_WORLD"),
            until=_whole(env, "SPOTKEEPER_UNTIL"),
            metric=env.get("SPOTKEEPER_METRIC", ""),
        )


def params(env: Mapping[str, str] = os.environ) -> dict[str, bool | int | float | str]:
    """Return the values that the job file gives the script (``params``); {} outside a job. See ``spotkeeper.params``.

    Raises:
        ValueError: ``SPOTKEEPER_PARAMS`` has no JSON object of numbers, texts and booleans.
    """
    text = env.get("SPOTKEEPER_PARAMS") or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, bool | int | float | str) for value in found.values()):
        raise ValueError(f"SPOTKEEPER_PARAMS={text[:200]!r}: want a JSON object of numbers, texts and booleans")
    return found


def _script() -> str:
    return Path(sys.argv[0]).stem or "run"


def _number(env: Mapping[str, str], name: str, *, above: float) -> float | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: want a number") from None
    if not above < value < math.inf:
        raise ValueError(f"{name}={text!r}: want a finite number above {above:g}")
    return value


def _percent(env: Mapping[str, str], name: str, *, default: float) -> float:
    value = _number(env, name, above=0.0) or default
    if not 0.01 <= value <= 100.0:  # as in the job file
        raise ValueError(f"{name}={env[name]!r}: want a number from 0.01 to 100")
    return value


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: want a whole number") from None


def own_argv() -> str:
    """Return the script's name and arguments as a shell line; "" under an agent or in a notebook."""
    if "SPOTKEEPER_RUN" in os.environ or not sys.argv[0].endswith(".py"):
        return ""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def make_output(folder: Path, managed: bool) -> Path:
    """Create the output folder if missing. Without an agent, add a .gitignore, so that git and ``submit`` skip it."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        if not managed:
            (folder / ".gitignore").write_text("*\n")
    return folder


def lock(folder: Path) -> IO[str]:
    """Lock ``folder`` against a second run while this process lives. Used only without an agent.

    Raises:
        RuntimeError: another run holds the lock.
        AttachError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / "lock").open("a+")
    except OSError as error:
        raise AttachError(
            f"attach(checkpoint_dir=): {folder} cannot be created or written: {error.strerror or error}; give "
            "attach(checkpoint_dir=...) a writable folder on a disk with free space"
        ) from None
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # DataLoader workers do not inherit this lock
    except OSError:
        stream.close()
        raise RuntimeError(
            f"another run saves into {folder}: wait until it ends, or give attach(checkpoint_dir=...) another folder"
        ) from None
    stream.truncate(0)
    stream.write(f"{os.getpid()}\n")
    stream.flush()
    return stream
