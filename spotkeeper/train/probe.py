"""Runs a script for some steps and records all state that a restore may need, for ``spotkeeper check-script``.

::

    python -m spotkeeper.train.probe OUT SCRIPT [ARGS...]          # with an agent's environment variables
    python -m spotkeeper.train.probe                               # a server that forks such processes

A process writes ``OUT/<rank>.json``: digests of the state, batches and losses by step, and the values of the script's
variables, data sets and attached objects when the run stops. ``SPOTKEEPER_PROBE_STOP`` is the step after which the run
stops; ``SPOTKEEPER_PROBE_SEED`` seeds the generators that the script itself does not seed.

The server imports torch once, because this import takes most of the time of a short run. It forks a process for each
line of its input, and answers with the process's id and, when the process has ended, with its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from spotkeeper.train.agent_link.control import AgentRequest
from spotkeeper.train.core import rng
from spotkeeper.train.core.local_parts import adapt
from spotkeeper.train.core.parts import Attached, Stateful
from spotkeeper.train.core.shards import is_shared, local_part
from spotkeeper.train.loop import boundary, lag
from spotkeeper.train.loop.run import Run

STOP = "SPOTKEEPER_PROBE_STOP"
SEED = "SPOTKEEPER_PROBE_SEED"
_PLAIN = (bool, int, float, str)  # immutable: a new object after every step is normal
_MOST = 10_000  # largest list or dict that is examined
_MOST_NUMBERS = 1 << 24  # largest tensor or array
_NOT_OURS = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), Path(__file__).parent.parent)
)


class ScriptProbe:
    """Records one run of a script."""

    def __init__(self, out: Path, stop: int) -> None:
        self._out = out
        self._stop = stop
        self._batches: dict[int, list[str]] = {}
        self._losses: dict[int, str] = {}
        self._bound: dict[str, Any] = {}  # the script's objects by name, after the last batch
        self._anew: dict[str, bool] = {}  # by name: whether it was another object after every batch

    def steps(self, run: Run, batches: Iterator[Any], loader: Any, caller: FrameType | None) -> Iterator[Any]:
        """Yield a loop's batches and record a digest of each. When the loop ends or stops, record the final state."""
        try:
            for batch in batches:
                self._batches.setdefault(run.steps_done + 1, []).append(digest(batch))
                yield batch
                self._look(caller)
                if run.steps_done >= self._stop:
                    run._control.request(AgentRequest.SAVE_STOP)
        except SystemExit:
            self._note(run, loader, caller)
            raise
        self._note(run, loader, caller)

    def _look(self, caller: FrameType | None) -> None:
        """Record which variables get a new object at every batch: a state loaded into the old object would be lost."""
        bound = dict(_objects(caller))
        for name in bound.keys() & self._bound.keys():
            self._anew[name] = self._anew.get(name, True) and bound[name] is not self._bound[name]
        self._bound = bound

    def loss(self, run: Run, loss: Any) -> None:
        self._losses[run.steps_done] = float(loss).hex()

    def _note(self, run: Run, loader: Any, caller: FrameType | None) -> None:
        model, rest = run._position.take_common()
        local = run._position.take_local()
        local.pop("metrics", None)  # a point has the time of its report
        for timing in ("stalls", "orders"):
            rest.pop(timing, None)
        found = {
            "step": run.steps_done,
            "bits": dict(_leaves({"model": model, **rest, "of this rank": local}, "")),
            "batches": self._batches,
            "losses": self._losses,
            "anew": sorted(name for name, anew in self._anew.items() if anew),
            "variables": {
                name: [kind, digest(value), "" if kind == "generator" else _shown(value), owner]
                for name, kind, value, owner in _named(run, loader, caller)
            },
        }
        (self._out / f"{run.rank}.json").write_text(json.dumps(found))


def digest(value: Any) -> str:
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()[:24]


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = local_part(value) if is_shared(value) else value
        value = value.detach().cpu().contiguous()
        sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        sha.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            sha.update(f"{key!r}:".encode())
            _feed(sha, each)
    elif isinstance(value, (list, tuple, deque)):
        sha.update(f"{type(value).__name__} {len(value)}".encode())
        for each in value:
            _feed(sha, each)
    elif isinstance(value, (set, frozenset)):
        sha.update(repr(sorted(map(repr, value))).encode())
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        sha.update(f"{type(value).__name__} {value!r}".encode())
    else:
        sha.update(type(value).__name__.encode())


def _leaves(tree: Any, at: str) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) of each leaf of nested dicts and lists."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{at}.{name}" if at else str(name))
    elif isinstance(tree, list) and tree and isinstance(tree[0], (dict, list, torch.Tensor)):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{at}[{number}]")
    else:
        yield at, digest(tree)


Variable = tuple[str, str, Any, str]  # name, kind, value, class of the object that it is an attribute of (or "")


def _named(run: Run, loader: Any, caller: FrameType | None) -> Iterator[Variable]:
    """Yield all variables that the script may change and the run does not save."""
    parts = run._parts
    kept = {id(part) for part in (*parts.optimizers, parts.scaler, *parts.common.values())} | parts.owned
    kept |= {id(loader)} if isinstance(loader, Stateful) else set()
    for module in (parts.model, *parts.common.values()):
        kept |= {id(each) for each in module.modules()} if isinstance(module, torch.nn.Module) else set()
    done, seen = set(kept), set[int]()
    for scope, variables in _scopes(caller):
        if id(variables) not in seen:
            seen.add(id(variables))
            for name, value in list(variables.items()):
                if not name.startswith("_"):
                    yield from _changing(f"{scope}{name}", value, done, parts)
    data = getattr(loader, "dataset", None)
    if id(data) not in done:
        yield from _attributes("the data set", data, done, "data set", parts)
    for name, part in parts.common.items():
        yield from _attributes(name, part, set(kept), "part", parts, state=True)


def _scopes(caller: FrameType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name prefix, variables) of the script's own functions and modules, from the innermost outwards."""
    while caller is not None:
        if _own(caller.f_code.co_filename):
            module_name = caller.f_globals.get("__name__", "")
            outer = "" if module_name == "__main__" else f"{module_name}."
            inner = outer if caller.f_code.co_name == "<module>" else f"{caller.f_code.co_name}()."
            yield inner, caller.f_locals
            yield outer, caller.f_globals
        caller = caller.f_back


def _objects(caller: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the script's variables and its objects' attributes, except plain numbers and strings."""
    for scope, variables in _scopes(caller):
        for name, value in list(variables.items()):
            fields = vars(value).items() if _of_script(value) else ()
            named = [(f"{scope}{name}", value), *((f"{scope}{name}.{each}", of) for each, of in fields)]
            yield from ((each, of) for each, of in named if of is not None and not isinstance(of, _PLAIN))


def _of_script(value: Any) -> bool:
    """Whether the script defines the value's class."""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    return hasattr(value, "__dict__") and not isinstance(value, type) and _own(file)


def _changing(name: str, value: Any, done: set[int], parts: Attached) -> Iterator[Variable]:
    if id(value) in done or isinstance(value, type):
        return
    if isinstance(value, (torch.Generator, random.Random)) or type(value).__module__.startswith("numpy.random"):
        if (part := adapt(name, value)) is not None:
            yield name, "generator", part.state_dict(), ""
    elif isinstance(value, bool) or value is None or isinstance(value, (int, float, str)):
        yield name, "count" if isinstance(value, (int, float)) else "value", value, ""
    elif _holds_numbers(value):
        yield name, "tensor", value, ""
    elif isinstance(value, (list, tuple, dict, set, deque)) and len(value) <= _MOST:
        yield name, "values", value, ""
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(each, Stateful):
                yield from _changing(f"{name}[{key!r}]", each, done, parts)
    elif isinstance(value, torch.utils.data.Dataset):
        done.add(id(value))
        yield from _attributes(name, value, done, "data set", parts)
    elif isinstance(value, Stateful):
        done |= {id(each) for each in (value.modules() if isinstance(value, torch.nn.Module) else (value,))}
        with contextlib.suppress(Exception):  # a state_dict with another meaning, or not available now
            yield name, _kind(value, parts), value.state_dict(), ""
    elif _of_script(value):
        done.add(id(value))
        yield from _attributes(name, value, done, "object", parts)


def _holds_numbers(value: Any) -> bool:
    """Whether a value is a tensor or array that the script itself changes, and not too large to compare."""
    if isinstance(value, torch.Tensor):
        return value.numel() <= _MOST_NUMBERS and not value.requires_grad
    return hasattr(value, "tobytes") and hasattr(value, "dtype") and value.size <= _MOST_NUMBERS


def _kind(value: Stateful, parts: Attached) -> str:
    """Return how a script should pass an object to ``attach()``.

    "model", "optimizer", "scheduler" and "scaler" are arguments of ``attach()``. "optimizers": in a list of all
    optimizers, as the argument ``optimizer``. "stateful": as a keyword argument with a name that the script chooses.
    """
    if isinstance(value, torch.optim.Optimizer):
        return "optimizers" if parts.optimizers else "optimizer"
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and "scheduler" not in parts.common:
        return "scheduler"
    if isinstance(value, torch.amp.GradScaler) and parts.scaler is None:
        return "scaler"
    return "model" if isinstance(value, torch.nn.Module) and parts.model is None else "stateful"


def _attributes(
    name: str, owner: Any, done: set[int], kind: str, parts: Attached, *, state: bool = False
) -> Iterator[Variable]:
    """Yield an object's own attributes; with ``state``, only attributes that the object's ``state_dict`` lacks."""
    said: Any = {}
    if state:
        with contextlib.suppress(Exception):
            said = owner.state_dict()
    said = said if isinstance(said, dict) else {}
    for attribute, value in list(getattr(owner, "__dict__", {}).items()):
        if attribute.startswith("_") or attribute in said:
            continue
        if state and isinstance(value, Stateful):
            continue  # for example, a scheduler's optimizer
        for found, of, each, inner in _changing(f"{name}.{attribute}", value, done, parts):
            plain = of in ("count", "value", "values") or (of == "tensor" and kind == "part")
            yield found, kind if plain else of, each, inner or (type(owner).__name__ if plain else "")


def _own(file: str) -> bool:
    """Whether a file is the script or a module beside it."""
    path = str(Path(file).resolve()) if file else ""
    return bool(path) and not file.startswith("<") and not path.startswith(_NOT_OURS)


def _shown(value: Any) -> str | dict[str, str]:
    """Return a value in printable form; for a state dict, each number and string in it."""
    if isinstance(value, dict):
        shown = ((str(key), _word(each)) for key, each in value.items() if not str(key).startswith("_"))
        return {key: text for key, text in shown if text}
    return _word(value)


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    text = repr(value) if isinstance(value, (bool, int, float, str, type(None))) else ""
    return text if len(text) <= 40 else text[:37] + "..."


def record(argv: list[str]) -> None:
    """Run a script and record its state in OUT. ``argv``: OUT SCRIPT [ARGS...].

    The environment needs the variables that an agent sets, ``SPOTKEEPER_PROBE_STOP`` and ``SPOTKEEPER_PROBE_SEED``.
    """
    out, script, *args = argv
    probe = ScriptProbe(Path(out), int(os.environ[STOP]))
    plain_steps, plain_report = Run.steps, Run.report

    def steps(self: Run, loader: Iterable[Any], *positional: Any, **how: Any) -> Iterator[Any]:
        return probe.steps(self, plain_steps(self, loader, *positional, **how), loader, sys._getframe(1))

    def report(self: Run, /, **values: Any) -> None:
        if (loss := values.get("loss")) is not None:
            probe.loss(self, loss)
        plain_report(self, **values)

    Run.steps, Run.report = steps, report  # type: ignore[method-assign]
    boundary.EVERY_S = 0.0  # a stop falls on the same step in every run
    lag._FIRST = sys.maxsize  # work is not divided anew, so equal runs have equal bits
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")
    rng.seed_all(int(os.environ[SEED]), int(os.environ.get("RANK", "0")))
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


_FORKS = sys.platform == "linux"  # elsewhere system libraries may not survive a fork


def serve() -> None:
    """Start a process for each line of the input; answer with the process's id, then with its exit code."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import prints is no answer
    importlib.import_module("torch._dynamo")  # otherwise the first optimizer of each process imports it
    for line in sys.stdin:
        call = json.loads(line)
        if not _FORKS:
            pid = _spawn(call)
        elif not (pid := os.fork()):
            answers.close()
            _child(call)
        answers.write(f"{pid}\n")
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # loader workers, for example
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


def _spawn(call: dict[str, Any]) -> int:
    command = ["-m", "spotkeeper.train.probe", *call["argv"]]
    if call["nproc"] > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={call['nproc']}"]
        command = [*torchrun, *command]
    with Path(call["log"]).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | call["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ).pid


def _child(call: dict[str, Any]) -> NoReturn:
    """Run the script in this fork as if in a new process."""
    code = 1
    try:
        os.setsid()
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(call["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, target in enumerate((nothing, log, log)):
            os.dup2(target, number)
        os.environ.update(call["environment"])
        code = _run(call["argv"], call["nproc"])
        atexit._run_exitfuncs()  # os._exit skips them
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(argv: list[str], nproc: int) -> int:
    try:
        if nproc == 1:
            record(argv)
        else:
            torchrun = importlib.import_module("torch.distributed.run")
            options = ["--standalone", f"--nproc-per-node={nproc}", "--run-path", "--start-method=fork"]
            torchrun.main([*options, __file__, *argv])
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code & 0xFF if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


if __name__ == "__main__":
    record(sys.argv[1:]) if sys.argv[1:] else serve()
