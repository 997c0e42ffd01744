"""``render``: what Spotkeeper writes onto machines, shown without any."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.spec.generation import DocState, Generation, Member
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.parse import read_text
from spotkeeper.spec.problem import Problem, SpecError, located, nearest

if TYPE_CHECKING:
    from infra.settings import Settings

CHECKOUT = Path(__file__).resolve().parents[3]
_SETTING = re.compile(r'^config\["(?:spotkeeper:)?([^"]+)"\]')
STAND_IN = "http://127.0.0.1:80"  # of a one-machine cloud, whose port is only known while it runs


class Rendered(Struct, frozen=True):
    """One text and the name of what holds it."""

    name: str
    text: str


@dataclass(frozen=True)
class StackFile:
    """A stack's name, its flat configuration as Pulumi's engine would hand it on, and what that means."""

    name: str
    config: dict[str, str]
    settings: Settings


def stack_texts(file: Path | None, stack: str | None) -> tuple[Rendered, ...]:
    """What the machines of a stack file run (of the local one's, if none is named).

    Raises:
        SpecError, CliError: as :func:`read_stack_file`.
    """
    settings = read_stack_file(file, stack, "spotkeeper render FILE").settings
    from infra import boot

    scripts = boot.render(settings)
    texts = [Rendered(f"user-data ({kind} pools)", text) for kind, text in scripts.user_data.items()]
    texts += [Rendered("startup-script", scripts.startup)]
    texts += [Rendered("shutdown-script", scripts.shutdown)] if scripts.shutdown else []
    return tuple(texts)


def read_stack_file(file: Path | None, stack: str | None, other: str) -> StackFile:
    """A stack file, checked; ``other``: the command that names one, for who has it elsewhere.

    Raises:
        SpecError: the stack file is wrong; with its lines.
        CliError: no such stack; or no checkout is at hand, so there is no stack file and no program.
    """
    try:
        from infra import settings
        from infra.settings import beside
        from spotkeeper.local.deploy.config import read_config
    except ImportError:
        raise no_checkout() from None
    path = file or stack_path(stack, other)
    lines = _lines(path)
    name = path.name.removeprefix("Pulumi.").removesuffix(".yaml")
    config = read_config(path, STAND_IN if name == "local" else None)
    try:
        found = settings.from_config(config, name)
        if told := beside.clashes(found, path.parent):
            raise SpecError(told)
    except SpecError as error:
        raise located(error, path.name, lines) from None
    return StackFile(name, config, found)


def no_checkout() -> CliError:
    return CliError("the stack is made by `infra`, which is not here", Exit.MISSING, "run it in a checkout")


def stack_path(stack: str | None, other: str) -> Path:
    """The file of a stack of this checkout: the named one's, SPOTKEEPER_STACK's, or the local one's.

    Raises:
        CliError: the checkout has no stack of this name.
    """
    stack = stack or os.environ.get("SPOTKEEPER_STACK", "") or "local"
    folder = CHECKOUT / "infra" / "stacks"
    names = sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in folder.glob("Pulumi.*.yaml"))
    if stack in names:
        return folder / f"Pulumi.{stack}.yaml"
    near = nearest(stack, names)
    hint = f" (did you mean {near}?)" if near else f" (there are {', '.join(names)})"
    raise CliError(f"no stack {stack} in {folder}{hint}", Exit.MISSING, f"name its file: {other}")


def _lines(path: Path) -> dict[str, int]:
    """The line of every setting, by the name that messages give it.

    Raises:
        SpecError: the file is missing, no YAML, or has nothing below ``config:``.
    """
    from spotkeeper.spec.yamltext import read

    document, lines = read(read_text(path), path.name)
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        raise SpecError([Problem("config", "missing, want a mapping: the stack's settings", source=path.name)])
    return {_SETTING.sub(r"\1", key): line for key, line in lines.items()}


def job_texts(spec: JobSpec) -> tuple[Rendered, ...]:
    """torchrun's arguments of a job's first generation, on its first machine, with stand-in addresses.

    Raises:
        CliError: the job's templates are not here.
    """
    from spotkeeper.reconcile.document import job_run
    from spotkeeper.vm.recipe import Node, environment, torchrun_args

    templates = CHECKOUT / "templates" / "job"
    if not templates.is_dir():
        raise CliError("the job's templates are not here", Exit.MISSING, "run it in a checkout")
    run = job_run(spec, spec.nproc or 1)
    doc = _example(spec, run.nproc)
    source, saver = Path("/var/lib/spotkeeper/src/SOURCE"), Path("/run/spotkeeper/saver.sock")
    node = Node(0, 0, doc.master, source, saver, Path("/mnt/sk-data/JOB/ckpt"), Path("/mnt/sk-data/JOB/out"))
    folder = Path(PurePosixPath("/run/spotkeeper/JOB/1"))
    words = torchrun_args(templates, doc, run, node, folder)
    variables = environment(doc, run, node, folder)
    return (
        Rendered("command", f"{spec.python} -m torch.distributed.run \\\n  " + " \\\n  ".join(words)),
        Rendered("environment", "\n".join(f"{name}={value}" for name, value in sorted(variables.items()))),
    )


def _example(spec: JobSpec, nproc: int) -> Generation:
    members = tuple(
        Member(rank, 1, f"uid{rank}", f"boot{rank}", f"10.0.0.{rank % 250 + 2}", nproc)
        for rank in range(spec.size().max)
    )
    return Generation(
        job="abcdefgh",
        uid="00000000-0000-0000-0000-000000000000",
        ver=1,
        gen=1,
        state=DocState.RUN,
        members=members,
        master=members[0].address,
        port=20001,
        run_id="00000000-0000-0000-0000-000000000000-1",
        replicated=spec.checkpoint.replicated,
    )
