"""``check-script``: checks with real processes whether a training script resumes bit for bit.

It makes three runs of the same number of steps: two without a stop, to see whether the script is deterministic, and one
that is stopped and resumed twice. ``train.probe`` saves the state of each run, and the command compares these states.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import spotkeeper
from spotkeeper.cli.output import emit, note
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.train.agent_link.control import NAME, Control

LONGEST_S = 600.0  # longest run of one process of the script
LEAST = 3  # fewest steps of a run: one before each of two stops, and one after them
_TOLD = 8  # most differences of one kind that are printed
_DRAWN = ("of this rank.rng.", "of this rank.loader.before.")  # a script may leave these generators unseeded and unused


@dataclass(frozen=True)
class Difference:
    """A difference between two runs.

    ``kind``: "batches", "losses", "state", or the kind of a script's variable (one of ``_ORDER``). ``alone``,
    ``resumed``: the variable's value in the run without a stop, and in the resumed run.
    """

    kind: str
    name: str
    rank: int
    text: str
    alone: str = ""
    resumed: str = ""


@dataclass(frozen=True)
class ScriptCheck:
    """The result of the check, as the command prints it.

    ``repeats``: the two runs without a stop are equal. ``same_bits``: the resumed run equals them. ``bits``: how two
    runs differ in batches, losses and state. ``not_restored``: the script's variables that differ after a resume.
    """

    script: str
    steps: int
    stops: tuple[int, ...]
    repeats: bool
    same_bits: bool
    bits: list[Difference] = field(default_factory=list)
    not_restored: list[Difference] = field(default_factory=list)


def run(
    command: Sequence[str], steps: int, nproc: int, python: str | None, ignore: Sequence[str], as_json: bool
) -> None:
    """Check a script and print the result.

    Raises:
        CliError: the script cannot be checked, is not deterministic, or does not resume bit for bit.
    """
    script, *args = command
    if Path(script).is_dir():
        raise CliError(f"{script} is a folder: name a script in it", Exit.USAGE, f"ls {shlex.quote(script)}/*.py")
    if not Path(script).is_file():
        raise CliError(f"{script}: no such script", Exit.USAGE, "spotkeeper check-script train.py -- ARGS")
    if python is not None:
        _check_python(python)
    checked = check([str(Path(script).resolve()), *args], steps, nproc, python or sys.executable, set(ignore))
    emit(checked, as_json, "\n".join(lines(checked)))
    if not checked.repeats:
        raise CliError(
            f"{script} is not deterministic: two runs without a stop differ, so a resume cannot be compared",
            Exit.FAILED,
            "call torch.manual_seed(0) before the model is created, seed the script's other generators, "
            "call torch.use_deterministic_algorithms(True), use one thread, and check again",
        )
    if not checked.same_bits or checked.not_restored:
        equal, other = "resumes equal here, but does not restore all values", "does not resume bit for bit"
        what = equal if checked.same_bits else other
        raise CliError(f"{script} {what}", Exit.FAILED, 'docs/train.md, "Is my script safe?"')


def _check_python(python: str) -> None:
    try:
        subprocess.run([python, "-c", ""], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        remedy = "pass the interpreter that has torch, such as --python .venv/bin/python"
        raise CliError(f"--python {python}: {why}", Exit.USAGE, remedy) from None


def check(command: Sequence[str], steps: int, nproc: int, python: str, ignore: set[str]) -> ScriptCheck:
    with tempfile.TemporaryDirectory(prefix="spotkeeper-check-") as name, contextlib.ExitStack() as stack:
        logs = (Path(name) / f"interpreter{number}.log" for number in range(2))
        first, second = (stack.enter_context(interpreter(python, log)) for log in logs)
        lab = _Lab(Path(name), command, nproc)
        note(f"the script runs to step {steps} without a stop")
        alone = lab.run("alone", [steps], first)
        made = alone[0]["step"]
        if made < LEAST:
            raise CliError(f"the script made {made} steps; {LEAST} are needed", Exit.FAILED, "--steps N, or more data")
        note("the script runs a second time without a stop")
        again = lab.run("again", [steps], second, seed=1)  # what differs between two interpreters differs here
        if own := [each for each in _bits(alone, again) if not each.name.startswith(_DRAWN)]:
            return ScriptCheck(command[0], made, (), repeats=False, same_bits=False, bits=own)
        last = min(steps, made)  # with several ranks, a stop takes effect one step later
        stops = (max(1, last // 3), max(2, 2 * last // 3))
        note(f"the script runs a third time; it is stopped after steps {stops[0]} and {stops[1]}, and resumed")
        resumed = lab.run("resumed", [*stops, steps], first)
    bits = _bits(alone, resumed)
    unsteady = {(each.rank, each.name) for each in _variables(alone, again, ignore)}
    if bits:  # then tensors that each step makes anew, such as its batch and loss, differ too
        for rank, found in enumerate(alone):
            tensors = {name for name, (kind, *_) in found["variables"].items() if kind == "tensor"}
            unsteady |= {(rank, name) for name in tensors & set(found["anew"])}
    left = [each for each in _variables(alone, resumed, ignore) if (each.rank, each.name) not in unsteady]
    return ScriptCheck(command[0], made, stops, repeats=True, same_bits=not bits, bits=bits, not_restored=left)


class Interpreter:
    """A Python process that runs ``train.probe``, which starts the script's processes."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def run(self, call: dict[str, Any]) -> int | None:
        """Run the script once.

        Returns:
            Its exit code; None if it took longer than ``LONGEST_S`` and was killed.

        Raises:
            CliError: the interpreter has exited, for example because it lacks torch.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then no answer comes
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
        pid, late = self._answer(), threading.Event()
        if pid is None:
            raise CliError(*_failed(self._process.wait(), self._log))

        def kill() -> None:
            late.set()
            os.killpg(pid, signal.SIGKILL)

        timer = threading.Timer(LONGEST_S, kill)
        timer.start()
        try:
            code = self._answer()
        except BaseException:
            os.killpg(pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
        return None if late.is_set() else 1 if code is None else code

    def _answer(self) -> int | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return int(line) if line else None


@contextlib.contextmanager
def interpreter(python: str, log: Path) -> Iterator[Interpreter]:
    command = [python, "-m", "spotkeeper.train.probe"]
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # a process that initialises CUDA must not fork
    with trainer(command, environment, log, pipes=True) as process:
        yield Interpreter(process, log)


class _Lab:
    """Runs the script in a folder, with the environment that an agent would set."""

    def __init__(self, folder: Path, command: Sequence[str], nproc: int) -> None:
        self._folder = folder
        self._command = command
        self._nproc = nproc

    def run(self, name: str, stops: Sequence[int], python: Interpreter, seed: int = 0) -> list[dict[str, Any]]:
        """Make one run, in which the script is started anew after each stop.

        Returns:
            The final state of each rank, with the batches and losses of the whole run.
        """
        ranks: list[dict[str, Any]] = []
        for gen, stop in enumerate(stops, start=1):
            notes = self._life(self._folder / name, gen, stop, seed, python)
            for rank, found in enumerate(notes):
                for kind in ("batches", "losses") if ranks else ():
                    found[kind] = ranks[rank][kind] | found[kind]
            ranks = notes
        return ranks

    def _life(self, home: Path, gen: int, stop: int, seed: int, python: Interpreter) -> list[dict[str, Any]]:
        out, log = home / f"out{gen}", home / "log"
        out.mkdir(parents=True)
        (home / f"run{gen}").mkdir()
        call = {
            "argv": [str(out), *self._command],
            "environment": _environment(home, gen, stop, seed),
            "log": str(log),
            "nproc": self._nproc,
        }
        with Control.create(home / f"run{gen}" / NAME):
            code = python.run(call)
        notes = [out / f"{rank}.json" for rank in range(self._nproc)]
        if code or code is None or not all(map(Path.exists, notes)):
            raise CliError(*_failed(code, log))
        return [json.loads(each.read_text()) for each in notes]


@contextlib.contextmanager
def trainer(
    command: Sequence[str], environment: dict[str, str], log: Path, cwd: Path | None = None, *, pipes: bool = False
) -> Iterator[subprocess.Popen[Any]]:
    """Run a command with this package on PYTHONPATH; the end of the ``with`` block kills its processes."""
    package = str(Path(spotkeeper.__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else out,
            stderr=out,
            text=pipes,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment(home: Path, gen: int, stop: int, seed: int) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")},
        "SPOTKEEPER_RUN": str(home / f"run{gen}"),
        "SPOTKEEPER_CKPT": str(home / "ckpt"),
        "SPOTKEEPER_OUTPUT": str(home / "output"),
        "SPOTKEEPER_GEN": str(gen),
        "SPOTKEEPER_INTERVAL_S": "1000000",  # a periodic save would delay the ranks' stop by a step
        "SPOTKEEPER_PROBE_STOP": str(stop),
        "SPOTKEEPER_PROBE_SEED": str(seed),
    }


def _failed(code: int | None, log: Path) -> tuple[str, Exit, str]:
    last = log.read_text("utf-8", "replace").strip().splitlines()[-4:]
    why = "\n  ".join(last) or "it printed nothing"
    if code is None:
        return f"the script did not stop within {LONGEST_S:.0f} s:\n  {why}", Exit.FAILED, "--steps N"
    how = "it never reached run.steps()" if not code else f"exit code {code}"
    return f"the script failed ({how}):\n  {why}", Exit.FAILED, "fix the script, or pass its arguments after --"


def _bits(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[Difference]:
    """Return the first batch and the first loss that differ between two runs, and all differences in final state."""
    found = []
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for kind in ("batches", "losses"):
            steps = sorted(set(mine[kind]) | set(theirs[kind]), key=int)
            if step := next((at for at in steps if mine[kind].get(at) != theirs[kind].get(at)), ""):
                found.append(Difference(kind, f"step {step}", rank, f"different {kind} from step {step} on"))
        paths = [path for path in mine["bits"] | theirs["bits"] if mine["bits"].get(path) != theirs["bits"].get(path)]
        found += [Difference("state", path, rank, f"{path} differs") for path in paths]
    return found


def _variables(one: list[dict[str, Any]], other: list[dict[str, Any]], ignore: set[str]) -> list[Difference]:
    found = []
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for name, (kind, digest, shown, owner) in mine["variables"].items():
            if name in ignore or name not in theirs["variables"] or theirs["variables"][name][1] == digest:
                continue
            values = _apart(shown, theirs["variables"][name][2])
            anew = next(
                (each for each in mine["anew"] if name == each or name.startswith((f"{each}.", f"{each}["))), ""
            )
            remedy = _ANEW.format(name=anew) if anew and kind != "tensor" else _remedy(kind, name, owner)
            found.append(Difference(kind, name, rank, remedy, *values))
    return sorted(found, key=lambda each: (each.rank, _ORDER.index(each.kind)))


def _apart(alone: Any, resumed: Any) -> tuple[str, str]:
    """The two values of a variable as text; of two state dictionaries, the first entry that differs."""
    if isinstance(alone, dict) and isinstance(resumed, dict):
        keys = [key for key in alone if key in resumed and alone[key] != resumed[key]]
        return (f"{keys[0]} {alone[keys[0]]}", resumed[keys[0]]) if keys else ("", "")
    return (alone, resumed) if isinstance(alone, str) and isinstance(resumed, str) else ("", "")


_STATES = ("model", "optimizer", "optimizers", "scheduler", "scaler", "stateful")  # kinds with a state_dict
_ORDER = (*_STATES, "generator", "data set", "part", "count", "object", "values", "tensor", "value")


def _remedy(kind: str, name: str, owner: str) -> str:
    """The change that makes the script restore a value. ``owner``: the class that has the value as an attribute."""
    value = name.rpartition("().")[2].replace("the data set.", "loader.dataset.")  # as it is written in the script
    word = re.sub(r"\W+", "_", value.rpartition(".")[2]).strip("_")
    if kind in ("model", "optimizer", "scheduler", "scaler"):
        return f"attach({kind}={value})"
    if kind == "object":
        holder = value.rpartition(".")[0]
        word = owner.lower() if holder == "self" else re.sub(r"\W+", "_", holder.rpartition(".")[2]).strip("_")
        return f"attach({word}={holder}), and give {owner} the methods state_dict() and load_state_dict()"
    return _REMEDIES[kind].format(word=word, value=value)


_ANEW = (
    "{name} is a new object after every step, so attach() cannot restore it: create it once before the loop and attach "
    "it there, or pass --ignore {name} if the training does not depend on it"
)
_REMEDIES = {
    "optimizers": "attach(optimizer=[...]) with all optimizers, including {value}",
    "stateful": "attach({word}={value})",
    "generator": "a generator: attach({word}={value})",
    "data set": "the data set changes during training: give it state_dict() and load_state_dict() and attach it, or "
    "let each item depend only on its index",
    "part": "add {value} to the attached object's state_dict() and load_state_dict()",
    "count": 'attach(counts=counts), and keep {value} in this dict or dataclass, for example as counts["{word}"]',
    "value": 'attach(counts=counts), and keep {value} in this dict or dataclass, for example as counts["{word}"]',
    "values": "attach({word}={value}), if {value} contains only numbers",
    "tensor": 'attach(tensors=tensors), and keep {value} in this dict, for example as tensors["{word}"]',
}


def lines(checked: ScriptCheck) -> Iterator[str]:
    several = len({each.rank for each in (*checked.bits, *checked.not_restored)}) > 1
    where = f"{checked.steps} steps, stopped after {' and '.join(map(str, checked.stops))}"
    if not checked.repeats:
        yield f"two runs of {checked.steps} steps without any stop differ:"
    elif checked.same_bits:
        yield f"bitwise equal: {where}; all objects given to attach(), random state, batches and losses"
    else:
        yield f"NOT EQUAL: {where}"
    for kind in ("batches", "losses", "state"):
        some = [each for each in checked.bits if each.kind == kind]
        for each in some[:_TOLD]:
            yield f"  {_rank(each, several)}{each.text}"
        if len(some) > _TOLD:
            yield f"  and {len(some) - _TOLD} more"
    if checked.not_restored:
        yield "not restored:"
    told = set[tuple[int, str]]()
    for each in checked.not_restored:
        again = each.kind == "object" and (each.rank, each.text) in told  # print an object's remedy only once
        told.add((each.rank, each.text))
        values = f" ({each.alone} without a stop, {each.resumed} after a resume)" if each.alone or each.resumed else ""
        yield f"  {_rank(each, several)}{each.name}{values}: {'the same' if again else each.text}"


def _rank(each: Difference, several: bool) -> str:
    return f"rank {each.rank}: " if several else ""
