"""Warns about a job before it starts on paid machines, from its script's syntax tree and its number of processes.

It does not execute the script. It gives no warning about a script that it cannot read, or that passes the result of
``attach()`` to other code.
"""

from __future__ import annotations

import ast
import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.contract.job import JobSpec, pools_of
from spotkeeper.contract.stack import StackState

_MOST_BYTES = 1 << 20  # largest script that is read
_PACKAGES = ("spotkeeper", "spotkeeper.train")


def warnings(file: Path, spec: JobSpec, stack: StackState) -> Iterator[str]:
    """Yield the warnings, a line each with the place and the remedy. ``file``: the job file."""
    yield from _too_many_processes(file, spec, stack)
    script = _script(file, spec)
    if script is None:
        return
    where = _relative(script)
    try:
        calls = _read(script)
    except SyntaxError as error:
        version = ".".join(platform.python_version_tuple()[:2])
        yield f"{where}:{error.lineno or 1}: {error.msg} (in Python {version}, which runs this check)"
        return
    if calls is not None and spec.stop == "library":
        size = spec.size()
        for line, text in _of_script(calls, elastic=size.min != size.max, mixed=bool(spec.machines)):
            yield f"{where}:{line}: {text}"


def _too_many_processes(file: Path, spec: JobSpec, stack: StackState) -> Iterator[str]:
    small = [pool for pool in pools_of(spec, stack) if spec.nproc is not None and spec.nproc > pool.nproc]
    if small:
        devices = {pool.name: "one device, or none" if pool.nproc == 1 else f"{pool.nproc} devices" for pool in small}
        have = "; ".join(f"pool {pool.name} ({pool.machine_type}): {devices[pool.name]}" for pool in small)
        yield (
            f"{_relative(file)}: nproc: {spec.nproc} is more processes than a machine has devices: "
            f"{have}. Leave `nproc` out for one process per device"
        )


def _relative(path: Path) -> str:
    """The path relative to the working folder; a path outside this folder stays absolute."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _script(file: Path, spec: JobSpec) -> Path | None:
    """The script that the job's command runs; None if it is not in the job's source."""
    if spec.source is None:
        return None
    folder = file.resolve().parent / spec.source
    if spec.command[0] != "-m":
        found = [folder / spec.command[0]]
    else:
        module = folder.joinpath(*spec.command[1].split(".")) if len(spec.command) > 1 else folder
        found = [module.with_suffix(".py"), module / "__main__.py"]
    return next((path for path in found if path.suffix == ".py" and path.is_file()), None)


@dataclass
class _Calls:
    """A script's use of the library.

    ``attached``: calls of ``attach``, each with the variable that gets the result. ``optimizers``: names of optimizers.
    ``plain_steps``: the line of each call of a ``step()``, with its object or its first argument. ``used``: attributes
    that the script reads, by the name of their object. ``passed``: names passed to other code,
    which may use a run of that name.
    """

    attached: list[tuple[ast.Call, str | None]] = field(default_factory=list)
    optimizers: set[str] = field(default_factory=set)
    plain_steps: list[tuple[int, str]] = field(default_factory=list)
    used: dict[str, set[str]] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)


def _read(script: Path) -> _Calls | None:
    """Read a script's use of the library; None if the script cannot be read.

    Raises:
        SyntaxError: the script is not valid in this version of Python.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError, MemoryError):
        if script.stat().st_size <= _MOST_BYTES:
            return _calls(ast.parse(script.read_bytes()))
    return None


def _calls(tree: ast.Module) -> _Calls:
    names, found, read = _names_of_attach(tree), _Calls(), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
            target = node.targets[0]
            name = target.id if isinstance(target, ast.Name) else ast.unparse(target)
            if ast.unparse(node.value.func) in names:
                found.attached.append((node.value, name))
                read.add(node.value)
            elif "optim" in ast.unparse(node.value.func):
                found.optimizers.add(name)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func) in names:
                found.attached.append((node.value, None))
                read.add(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.used.setdefault(node.value.id, set()).add(node.attr)
            read.add(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            found.plain_steps += [(node.lineno, ast.unparse(each)) for each in (node.func.value, *node.args[:1])]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in names and node not in read:
            found.passed.add("")  # the result of attach() is passed on without a name
    found.passed |= {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in read
    }
    return found


def _names_of_attach(tree: ast.Module) -> set[str]:
    """The names by which the script calls ``attach``, such as ``spotkeeper.attach``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {f"{each.asname or each.name}.attach" for each in node.names if each.name in _PACKAGES}
        elif isinstance(node, ast.ImportFrom) and node.module in _PACKAGES and not node.level:
            names |= {each.asname or each.name for each in node.names if each.name == "attach"}
    return names


def _of_script(calls: _Calls, *, elastic: bool, mixed: bool) -> Iterator[tuple[int, str]]:
    for call, _ in calls.attached:
        if not call.args and not call.keywords:
            yield call.lineno, "attach() without arguments saves nothing; use attach(model=model, optimizer=optimizer)"
    runs = {name for _, name in calls.attached}
    if not runs or "" in calls.passed or any(name is not None and name in calls.passed for name in runs):
        return  # the script keeps no run, or passes it to other code
    if any(name is not None and not name.isidentifier() for name in runs):
        return  # the run is stored in an attribute, such as self.run
    first = calls.attached[0][0].lineno
    used = {attribute for name in runs if name is not None for attribute in calls.used.get(name, ())}
    if "steps" not in used:  # run.epochs() alone saves nothing either
        remedy = "train in `for batch in run.steps(loader): ...`"
        yield first, f"attach() without run.steps() saves nothing, so a preemption loses all training; {remedy}"
    plain = [line for line, name in calls.plain_steps if name in calls.optimizers]
    if (elastic or mixed) and plain and "step" not in used:
        remedy = "call run.backward(loss) and run.step() instead of loss.backward() and optimizer.step()"
        why = "`machines`" if mixed else "`nodes: {min, max}`"
        yield plain[0], f"with {why} the script must {remedy}, even if it uses a GradScaler"
