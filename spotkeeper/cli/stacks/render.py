"""``render``: prints the text that machines receive. ``plan``: prints the resources that `pulumi up` would declare.

``plan`` runs the project's own Pulumi program against a monitor that creates nothing, and compares with no cloud and
no state. Neither command calls a cloud.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from spotkeeper.cli.output import emit
from spotkeeper.cli.stacks.stackfile import CHECKOUT, read_stack_file, reserved_text
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.generation import DocState, Generation, Member
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.jobfile import read_job

WIDEST = 100  # characters to which the text output cuts an input's value


# -- render


class Rendered(Struct, frozen=True):
    """One rendered text and its name."""

    name: str
    text: str


def run(file: Path | None, stack: str | None, *, as_json: bool) -> None:
    texts: tuple[Rendered, ...]
    if file is not None and not file.name.startswith("Pulumi."):
        texts = job_texts(read_job(file, None, 0.0))
    else:
        texts = stack_texts(file, stack)
    emit(texts, as_json, "\n".join(f"===== {one.name}\n{one.text}" for one in texts))


def stack_texts(file: Path | None, stack: str | None) -> tuple[Rendered, ...]:
    """Return the scripts of a stack's machines (default: the local stack). Raises as :func:`read_stack_file`."""
    settings = read_stack_file(file, stack, "spotkeeper render FILE").settings
    from infra import boot

    scripts = boot.render(settings)
    texts = [Rendered(f"user-data ({kind} pools)", text) for kind, text in scripts.user_data.items()]
    texts += [Rendered("startup-script", scripts.startup)]
    texts += [Rendered("shutdown-script", scripts.shutdown)] if scripts.shutdown else []
    return tuple(texts)


def job_texts(spec: JobSpec) -> tuple[Rendered, ...]:
    """Return torchrun's arguments and environment for a job's first machine in generation 1, with example addresses.

    Raises:
        CliError: the job's templates are missing.
    """
    from spotkeeper.reconcile.controller.document import job_run
    from spotkeeper_agent.job.launch_spec import LaunchSpec, environment, torchrun_args

    templates = CHECKOUT / "templates" / "job"
    if not templates.is_dir():
        raise CliError("the job's templates are missing here", Exit.MISSING, "run it in a checkout")
    run = job_run(spec, spec.nproc or 1)
    doc = _example(spec, run.nproc)
    source, saver = Path("/var/lib/spotkeeper/src/SOURCE"), Path("/run/spotkeeper/node/saver.sock")
    launch = LaunchSpec(0, 0, doc.master, source, saver, Path("/mnt/sk-data/JOB/ckpt"), Path("/mnt/sk-data/JOB/out"))
    folder = Path(PurePosixPath("/run/spotkeeper/JOB/1"))
    words = torchrun_args(templates, doc, run, launch, folder)
    variables = environment(doc, run, launch, folder)
    return (
        Rendered("command", f"{spec.python} -m torch.distributed.run \\\n  " + " \\\n  ".join(words)),
        Rendered("environment", "\n".join(f"{name}={value}" for name, value in sorted(variables.items()))),
    )


def _example(spec: JobSpec, nproc: int) -> Generation:
    members = tuple(
        Member(node, 1, f"uid{node}", f"boot{node}", f"10.0.0.{node % 250 + 2}", nproc)
        for node in range(spec.size().max)
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


# -- plan


class Planned(Struct, frozen=True, omit_defaults=True):
    """A planned resource. ``inputs`` have Pulumi's names; a component resource has no inputs."""

    type: str
    name: str
    parent: str
    inputs: dict[str, Any]
    protect: bool = False  # `pulumi destroy` refuses to run
    retain: bool = False  # `pulumi destroy` leaves it in the cloud


def run_plan(stack: str | None, *, as_json: bool) -> None:
    planned = plan(None, stack)
    emit(planned, as_json, "" if as_json else "\n".join((*lines(planned), *used(stack))))


def used(stack: str | None) -> Iterator[str]:
    """Yield a line for each reserved capacity that the stack will use: it exists, so no resource is planned for it."""
    for pool in read_stack_file(None, stack, "spotkeeper plan FILE").settings.pools:
        yield from (f"pool {pool.name} uses {reserved_text(one)}" for one in pool.reservations)


def plan(file: Path | None, stack: str | None) -> tuple[Planned, ...]:
    """Return all resources of the stack: each component, then its resources.

    Raises:
        SpecError: the stack file is invalid; the problems have line numbers.
        CliError: no such stack, the package ``infra`` is missing, or the Pulumi program failed.
    """
    read = read_stack_file(file, stack, "spotkeeper plan FILE")
    from spotkeeper.local.deploy import DeployError, runner

    try:
        entries = runner.declared(read.name, read.config)
    except DeployError as error:
        raise CliError(f"the stack {read.name}: {error}", Exit.FAILED) from None
    found = [Planned(one.type, one.name, one.parent, one.inputs, one.protect, one.retain) for one in entries]
    places = {part.name: place for place, part in enumerate(filter(_component, found))}

    def key(one: Planned) -> tuple[int, bool, str, str]:  # registrations run in parallel, in any order
        part = _component(one)
        return places.get(one.name if part else one.parent, len(places)), not part, one.type, one.name

    return tuple(sorted(found, key=key))


def _component(one: Planned) -> bool:
    return one.type.startswith("spotkeeper:")


def lines(planned: Iterable[Planned]) -> Iterator[str]:
    """Yield the plan's lines, like those of ``pulumi preview --diff``, with long values cut."""
    from spotkeeper.local.deploy.result import type_words

    count = 0
    for one in planned:
        marks = " [protect]" * one.protect + " [retain]" * one.retain
        if _component(one):
            yield f"{one.name} ({one.type})"
            continue
        count += 1
        yield f"  + {type_words(one.type)}  {one.name}{marks}"
        yield from (f"      {name}: {_short(value)}" for name, value in sorted(one.inputs.items()))
    yield f"{count} resources; no cloud was called. To compare with a running stack: pulumi preview"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}... ({len(text):,} characters; all with --json)"
