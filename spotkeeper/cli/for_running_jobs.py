"""Options and help of the commands that act on a submitted job; each imports and calls its module in `jobs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from spotkeeper.cli.app import JOBS, Job, Json, Node, Stack, WithArguments, Yes, app, arguments_of

Wait = Annotated[bool, Option("--wait", help="Wait until the request is carried out or refused.")]


@app.command(rich_help_panel=JOBS)
def drill(
    job: Job,
    node: Annotated[
        int | None,
        Option(metavar="N", min=0, help="Node to preempt. Default: the highest node on spot, else on-demand."),
    ] = None,
    no_notice: Annotated[bool, Option("--no-notice", help="Delete the machine without a preemption notice.")] = False,
    yes: Yes = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Preempt one machine of a running job, and compare each phase of the recovery and the lost work with targets.

    For each phase it prints two durations: `after`, from the preemption to the end of the phase, and `took`, that of
    the phase alone, without the earlier phases that it waits for. The target limits `took`; the exit code is 1 if a
    target is missed. The command asks for confirmation; without a terminal it refuses unless you pass `--yes`. It uses
    your own cloud credentials. On AWS, `SPOTKEEPER_FIS_TEMPLATE` names the template of the Fault Injection Service that
    sends the notice.

    Examples: `spotkeeper drill first`, `spotkeeper drill first --node 0 --no-notice --json`
    """
    from spotkeeper.cli.jobs import drill as drilling

    drilling.run(job, node, stack, notice=not no_notice, yes=yes, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def cancel(job: Job, yes: Yes = False, wait: Wait = False, stack: Stack = None, as_json: Json = False) -> None:
    """End a job and delete its machines, disks and checkpoints (`keep_disks: true` in the job file keeps the disks).

    It asks for confirmation; without a terminal it refuses unless you pass `--yes`.

    Example: `spotkeeper cancel first`
    """
    from spotkeeper.cli.jobs import verbs

    verbs.cancel(job, verbs.Options(stack, as_json, wait, yes))


@app.command(rich_help_panel=JOBS)
def pause(job: Job, wait: Wait = False, stack: Stack = None, as_json: Json = False) -> None:
    """Save a checkpoint, delete the machines, and keep the disks. `spotkeeper resume` continues at the same step.

    Example: `spotkeeper pause first`, and in the evening `spotkeeper resume first`
    """
    from spotkeeper.cli.jobs import verbs

    verbs.pause(job, verbs.Options(stack, as_json, wait))


@app.command(rich_help_panel=JOBS)
def resize(
    job: Job,
    nodes: Annotated[int, Argument(metavar="NODES", min=1, help="Number of machines.")],
    drop: Annotated[
        list[int] | None, Option("--drop", metavar="NODE", min=0, help="Node that goes; repeat it for each.")
    ] = None,
    wait: Wait = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Train on more or fewer machines with the same global batch. The job file must say `nodes: {min, max}`.

    All machines save and stop at the same step, and training continues on NODES machines. If the job has more, it
    gives up the nodes whose loss costs least, slow ones before fast ones, and their machines are deleted. The other
    nodes keep their numbers.

    `--drop` chooses the nodes that go, one for each machine less. A drop that would lose the newest checkpoint is
    refused; should the node that stays fail to save, the dropped one stays in its place, and `events` says so.

    Examples: `spotkeeper resize first 4`, `spotkeeper resize first 3 --drop 1`
    """
    from spotkeeper.cli.jobs import verbs

    verbs.resize(job, nodes, tuple(sorted(set(drop or ()))), verbs.Options(stack, as_json, wait))


@app.command(rich_help_panel=JOBS)
def move(
    job: Job,
    zone: Annotated[str, Argument(metavar="ZONE", help="A zone, such as us-central1-b, or a region.")],
    wait: Wait = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Move a job's machines and disks to another zone of its pools, or to the best zone of a region.

    Each node first gets a machine in ZONE while the job trains on. If the cloud refuses one, all are released, and the
    job stays. Otherwise all nodes save and stop at the same step, snapshots copy the disks, and training continues
    there. Pools whose limits have no room for the job twice get the new machines after the copy. To cancel a move, name
    the zone where the job is now. Jobs with a static machine and jobs with `spread: true` cannot move.

    Example: `spotkeeper move first us-central1-b --wait`
    """
    from spotkeeper.cli.jobs import verbs

    verbs.move(job, zone, verbs.Options(stack, as_json, wait))


@app.command(rich_help_panel=JOBS)
def swap(job: Job, node: Node = None, wait: Wait = False, stack: Stack = None, as_json: Json = False) -> None:
    """Replace one machine of a job, for example because it is slow or faulty. No step is lost.

    The old machine trains while the replacement boots. Then all machines save and stop at the same step, and training
    continues with the replacement.

    Example: `spotkeeper swap first --node 1`
    """
    from spotkeeper.cli.jobs import verbs

    verbs.swap(job, node, verbs.Options(stack, as_json, wait))


@app.command(rich_help_panel=JOBS, cls=WithArguments)
def ssh(
    context: typer.Context,
    job: Annotated[str, Argument(metavar="JOB [-- COMMAND]", help="Name or id of the job.")],
    node: Node = None,
    stack: Stack = None,
    as_json: Annotated[
        bool, Option("--json", help="Print the machine and the command line as JSON, and open nothing.")
    ] = False,
) -> None:
    """Open a shell on one machine of a job, or run a command there, as an unprivileged user.

    The shell starts in the job's folder. It can read the job's files and logs, but not write them. The stack file lists
    who may open shells (`ssh: [...]`), and each shell is recorded as an event of the job. Install `gcloud` for Google
    Cloud; for AWS, `aws` and `session-manager-plugin`. The exit code is that of COMMAND (on AWS, that of `aws`).

    Examples: `spotkeeper ssh first --node 1`, `spotkeeper ssh first -- nvidia-smi`,
    `spotkeeper ssh first -- sh -c "df | sort"`
    """
    from spotkeeper.cli.jobs import ssh as shells

    raise typer.Exit(shells.run(job, node, stack, arguments_of(context), as_json=as_json))


@app.command(rich_help_panel=JOBS, cls=WithArguments)
def resume(
    context: typer.Context,
    job: Job,
    file: Annotated[
        Path | None,
        Argument(metavar="JOB.YAML [-- ARGUMENTS]", help="Corrected job file. Default: the job's present file."),
    ] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="With a job file: the --name given to submit.")] = None,
    go_back: Annotated[
        bool,
        Option("--go-back", help="Resume from an older checkpoint, or from the start, because the newest is lost."),
    ] = False,
    yes: Yes = False,
    wait: Wait = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Resume a job that is paused or on hold, from its newest checkpoint.

    A job goes on hold when its own code fails, when it has spent its `max_usd`, or when the cloud refuses every machine
    that it could use. `spotkeeper status JOB` shows the reason, what the job's disks cost meanwhile, and how long the
    job stays on hold. After a resume the job may crash `retry.crashes` times again, or spend its `max_usd` once more.

    With a job file, the job continues with that file and its source folder: a corrected script, another `command`,
    `env` or `max_usd`. Fields on which the disks depend must not change: `name`, `nodes`, `spread`, `seed`, `stop`,
    `checkpoint.replicated` (and `nproc` if that is false), and the kinds of the pools. If you submitted the job with
    `--name` or with arguments after `--`, repeat these: `spotkeeper resume wide job.yaml --name wide -- --width 9`.

    A job never returns to an older checkpoint by itself. If its newest one was on a lost disk, or on a static machine
    that does not come back, the job waits or goes on hold until you pass `--go-back`, which asks for confirmation
    (`--yes` confirms).

    Examples: `spotkeeper resume first`, `spotkeeper resume first job.yaml`
    """
    from spotkeeper.cli.jobs import verbs
    from spotkeeper.contract.parse.jobfile import Overrides

    overrides = Overrides(name, arguments_of(context))
    verbs.resume(job, file, verbs.Options(stack, as_json, wait, yes), overrides, go_back=go_back)
