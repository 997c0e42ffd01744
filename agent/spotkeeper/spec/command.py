"""What a job's ``command`` may be: words, the script first. Texts in, texts out; may raise nothing."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

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
    """Why this word, which runs scripts, is none."""
    return _RUNNERS.get(PurePosixPath(word).name.rstrip("0123456789."))


def argv(line: str) -> tuple[str, ...]:
    """A shell line as a command that is accepted: without what runs the script; empty where there is none."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    if words and runner(words[0]):
        words = words[next((at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words)) :]
    well = words and words[0] and not SHELL_WORDS.intersection(words)
    return tuple(words) if well else ()
