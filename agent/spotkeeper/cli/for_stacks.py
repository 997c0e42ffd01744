"""What people who run a stack type: to look, to check, to mend. Options and help; the work is done elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from spotkeeper.cli.app import STACKS, Json, Stack, app


@app.command(rich_help_panel=STACKS)
def reconcile(
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Required: one look at every job, then it ends. The schedule does it again and again."
        ),
    ] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Look after every unfinished job once, from this shell, as the stack's function does each minute.

    Replaces what is lost, starts what was submitted, deletes what is over. For a stack whose function is down, and for
    reading along what a look does. Safe beside the function: every decision is a compare-and-swap. Needs your own cloud
    credentials. An ALARM on standard error is for a person to mend, and is told once.

    Example: `spotkeeper reconcile --once`
    """
    from spotkeeper.cli import commands

    commands.reconcile(stack, once=once, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def render(
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="FILE", help="A job file, or a stack file (Pulumi.*.yaml).", show_default=False),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Show what machines get: the startup and shutdown scripts of the stack, or a job's launch.

    Examples: `spotkeeper render` (the local stack's scripts), `spotkeeper render job.yaml`,
    `spotkeeper render infra/stacks/Pulumi.prod.yaml`
    """
    from spotkeeper.cli import commands

    commands.render(file, stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def plan(
    stack_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--stack-file",
            metavar="FILE",
            help="A stack file, Pulumi.NAME.yaml; else that of the stack in infra/stacks.",
        ),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Show every resource that `pulumi up` would make for a stack file: type, name, inputs. Asks no cloud.

    Needs no `pulumi` command, no login and no stack that is up; what is wrong with the file is said with line, value
    and remedy. Secrets are masked; what only the cloud can tell reads `(known after up)`. What an update would
    change, `pulumi preview` says.

    Examples: `spotkeeper plan --stack-file infra/stacks/Pulumi.prod.yaml`, `spotkeeper plan --json | jq '.[].type'`
    """
    from spotkeeper.cli import commands

    commands.plan(stack_file, stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def check(
    stack: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="STACK",
            help="A stack of infra/stacks, or its file, Pulumi.NAME.yaml; else SPOTKEEPER_STACK, else the local one.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a stack file, and the job files it names: all that can be known to be wrong, at once. Asks no cloud.

    Each line says where it is, what was found, and the nearest valid name or what to do.
    With `--json`: `{"ok": false, "problems": [{"file", "line", "path", "value", "message", "nearest"}]}`.

    Examples: `spotkeeper check prod`, `spotkeeper check infra/stacks/Pulumi.prod.yaml --json`
    """
    from spotkeeper.cli import commands

    commands.check(stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def review(
    preview: Annotated[
        Path,
        typer.Option("--preview", metavar="FILE", help="What `pulumi preview --json` printed; - is standard input."),
    ],
    stack_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--stack-file", metavar="FILE", help="Pulumi.NAME.yaml; else that of the stack."),
    ] = None,
    base: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--base", metavar="FILE", help="The stack file as it was, to compare the cost with."),
    ] = None,
    allow_data_loss: Annotated[
        bool,
        typer.Option(
            "--allow-data-loss",
            envvar="SPOTKEEPER_ALLOW_DATA_LOSS",
            help="Data may be lost: a person has agreed to it.",
        ),
    ] = False,
    expect_no_changes: Annotated[
        bool, typer.Option("--expect-no-changes", help="Fail where anything changes: for a nightly look at drift.")
    ] = False,
    comment: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--comment", metavar="FILE", help="Write it there as well, short enough for a comment."),
    ] = None,
    stacks: Annotated[
        int, typer.Option("--stacks", min=1, help="So many stacks' reviews share that comment, and its length.")
    ] = 1,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """What a change would do to a stack, as the comment on a pull request: resources, data, rules, what it will cost.

    Exit code 4 where a disk or a bucket would be deleted or replaced, or the stack be emptied, and nobody has agreed;
    where a rule of `infra/policy` is broken; or, with `--expect-no-changes`, where anything is not as it was declared
    (`pulumi preview --refresh --json`). 1 where the preview itself failed. Of values it shows sizes, zones and machine
    types, and what breaks a rule. Without `--show-sames` a preview tells of what changes alone, and the rules look at
    no more. `.github/workflows` shows how it is used.

    Example: `spotkeeper review --preview preview.json --stack prod`, after
    `pulumi preview --stack prod --json --show-sames > preview.json`
    """
    from spotkeeper.cli import commands

    commands.review(
        preview, stack_file, stack, base, agreed=allow_data_loss, quiet=expect_no_changes, as_json=as_json,
        comment=comment, stacks=stacks,
    )  # fmt: skip


@app.command(rich_help_panel=STACKS)
def live(stack: Stack = None, as_json: Json = False) -> None:
    """What only a real cloud can tell of a stack: what to type in its first hour, and what to see. Asks no cloud.

    The page docs/first-live-hour.md, with the stack's own names.

    Example: `spotkeeper live --stack prod`
    """
    from spotkeeper.cli import commands

    commands.live(stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def preflight(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--folder", metavar="DIR", help="Where checkpoints go; else the data disk, else here."),
    ] = None,
    peer: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--peer", metavar="ADDRESS", help="Another machine that must be reachable; may be repeated."),
    ] = None,
    notice: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="SECONDS", help="From a preemption's notice to the end; else what the pool has, else 120."
        ),
    ] = None,
    python: Annotated[str, typer.Option(metavar="PROGRAM", help="The interpreter that runs the job.")] = "python3",
    quick: Annotated[bool, typer.Option("--quick", help="Only what every boot looks at.")] = False,
    as_json: Json = False,
) -> None:
    """Look whether this machine is fit to train, and to be preempted. Changes nothing; ends within three minutes.

    Clock, metadata and tokens, room and speed of the disk (how many GB a notice saves in time), the kernel's patience
    with silent peers, torch, driver, NCCL and EFA; each finding says what to do. A laptop is told what only a machine
    of the cloud can be asked. Every machine does the quick part at boot, and says in its log what it found.

    Exit code 1 where something will fail.

    Examples: `spotkeeper preflight --peer 10.0.0.7`, `spotkeeper preflight --json | jq .level`
    """
    from spotkeeper.cli import preflight as preflights

    preflights.run(folder, tuple(peer or ()), notice, python, quick=quick, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def policy(as_json: Json = False) -> None:
    """Answer as the rule that chooses machines would, so that anybody can judge it on markets of their own.

    Reads questions from standard input and answers on standard output, one JSON object a line (protocol 1): it is
    asked at every tick of a recorded market and says where the job runs until the next one. It asks no cloud.
    All messages, with an example of a conversation: docs/selection.md.

    Example: `spotkeeper policy < questions.jsonl`, where the first line is `{"type":"hello","protocol":1}`
    """
    from spotkeeper.cli.policy import serve

    if sys.stdin.isatty():
        print('one JSON object a line, first {"type":"hello","protocol":1}; Ctrl-D ends', file=sys.stderr, flush=True)
    serve(sys.stdin.buffer, sys.stdout.buffer)


@app.command(rich_help_panel=STACKS)
def repair(
    what: Annotated[str, typer.Argument(metavar="alloc", help="What to make anew.", show_default=False)],
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Make `stack/alloc` (who has which machine) anew, where `spotkeeper status` says that it cannot be read.

    From the jobs' records and ledgers and from the cloud; jobs may run meanwhile, and go on.

    Example: `spotkeeper repair alloc`
    """
    from spotkeeper.cli import commands

    commands.repair(what, stack, as_json=as_json)
