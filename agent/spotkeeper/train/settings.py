"""What a run is told by its surroundings: the agent's environment, or defaults on a laptop."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spotkeeper.clock import Clock
from spotkeeper.train.errors import CallError
from spotkeeper.train.pace import MEAN_LIFE_S

LOCAL_FOLDER = Path(".spotkeeper/ckpt")
LOCAL_OUTPUT = Path("output")
_ATTACHED: set[tuple[Path | None, int | None]] = set()  # run folders and generations of this process's runs


@dataclass(frozen=True)
class Settings:
    """Of this process. ``managed``: an agent started it."""

    managed: bool
    run: Path | None  # holds `ctl`; None without an agent
    gen: int | None  # None: one more than any that is found
    slot: int | None
    folder: Path | None  # checkpoints; None: this node writes none
    late: Path | None  # where they go once the agent says that the disk is there
    output: Path  # what the script leaves there is kept
    saver: Path | None  # None: a private one
    interval_s: float | None
    mean_life_s: float  # real seconds
    keep: int
    seed: int
    replicated: bool  # an agent says that the job's state is
    max_world: int | None  # ranks of the job at its largest, where it may change its size; else None

    def alone(self) -> None:
        """
        Raises:
            CallError: this process has a run of this generation already: two would load, and overwrite, each other's.
        """
        if (self.run, self.gen) in _ATTACHED:
            raise CallError(
                "attach() was called before: a job has one run. Give it all models and optimizers together "
                "(attach(a, [opt_a, opt_b], other=b)), and call run.steps() once for each loop"
            )

    def attached(self) -> None:
        """The run has begun."""
        if self.managed:
            _ATTACHED.add((self.run, self.gen))

    @classmethod
    def from_env(cls, env: Mapping[str, str], *, folder: Path | None = None) -> Settings:
        """Read ``SPOTKEEPER_*``. ``folder``: where the script wants its checkpoints without an agent.

        Raises:
            ValueError: a variable is not what it must be; the message names it.
        """
        managed = "SPOTKEEPER_RUN" in env
        if managed:
            folder = Path(env["SPOTKEEPER_CKPT"]) if env.get("SPOTKEEPER_CKPT") else None
        elif folder is None:
            folder = Path(env["SPOTKEEPER_CKPT"]) if env.get("SPOTKEEPER_CKPT") else LOCAL_FOLDER / _script()
        interval_s = _number(env, "SPOTKEEPER_INTERVAL_S", above=0.0)
        keep = int(_number(env, "SPOTKEEPER_KEEP", above=0) or 2)
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
            # Losses are counted on the stack's clock, saves on this machine's.
            mean_life_s=Clock.from_env().real_s(_number(env, "SPOTKEEPER_MEAN_LIFE_S", above=0.0) or MEAN_LIFE_S),
            keep=max(2, keep),
            seed=_whole(env, "SPOTKEEPER_SEED") or 0,
            replicated=env.get("SPOTKEEPER_REPLICATED") == "1",
            max_world=_whole(env, "SPOTKEEPER_MAX_WORLD"),
        )


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
    if not value > above:
        raise ValueError(f"{name}={text!r}: want a number above {above:g}")
    return value


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: want a whole number") from None


def make_output(folder: Path, managed: bool) -> Path:
    """The folder, made where it is not there. One that is made here on a laptop goes into no commit and no source."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        if not managed:
            (folder / ".gitignore").write_text("*\n")
    return folder


def lock(folder: Path) -> IO[str]:
    """Keep a second run out of ``folder`` for as long as this process lives (without an agent only).

    Raises:
        RuntimeError: another run has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / "lock").open("a+")
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: DataLoader workers do not inherit it
    except OSError:
        stream.close()
        raise RuntimeError(
            f"{folder}: another run saves here; wait for it, or give attach(checkpoint_dir=...) another folder"
        ) from None
    stream.truncate(0)
    stream.write(f"{os.getpid()}\n")
    stream.flush()
    return stream
