"""What people who train type: their jobs, their logs, their money. Options and help; the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from spotkeeper.cli.app import JOBS, Job, Json, Stack, app

StackFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--stack-file", metavar="FILE", help="A stack that need not be up: Pulumi.NAME.yaml."),
]
Markets = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--markets", metavar="DIR", help="Recordings to replay; else SPOTKEEPER_MARKETS, else ours."),
]


@app.command(rich_help_panel=JOBS)
def submit(
    file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Watch it until it ends.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the file against the stack; nothing is sent or started.")
    ] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Check a job file, send its source folder, and start the job.

    The smallest job file: `name: first`, `command: [train.py]`, `source: .`; for three machines `nodes: 3` as well.
    All fields: docs/train.md, or `spotkeeper schema job`. The script needs two lines of ours to survive a preemption:
    `run = spotkeeper.attach(model=model, optimizer=optimizer)` and `for batch in run.steps(loader, epochs=3):`
    What it saves to the folder `run.output` is kept, the model for instance, at its end:
    `if run.rank == 0: torch.save(model.state_dict(), run.output / "model.pt")`, then `spotkeeper download first`.

    Submitting the same file and source again while the job runs prints the same job;
    other content under the same name is refused.

    With `--watch --json`: what `spotkeeper watch --json` prints.

    Examples: `spotkeeper submit job.yaml --watch`, `spotkeeper submit job.yaml --check`
    """
    from spotkeeper.cli import commands

    commands.submit(file, stack, watch=watch, check=check, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def status(
    job: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="JOB", help="Id or name of a job; else all of them.", show_default=False),
    ] = None,
    finished: Annotated[bool, typer.Option("--all", "-a", help="Finished jobs as well.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """All unfinished jobs, or one job with its machines (and the end of its log, if it crashed).

    Examples: `spotkeeper status`, `spotkeeper status first --json | jq .step`
    """
    from spotkeeper.cli import commands

    commands.status(job, stack, finished=finished, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def watch(job: Job, stack: Stack = None, as_json: Json = False) -> None:
    """Follow a job until it ends, or holds because it failed: machines, step, loss, money, every event.

    Ctrl-C stops watching, not the job. Exit code 0 only if the job succeeds.
    With `--json`: one line per event, the final view last.

    Example: `spotkeeper watch first`
    """
    from spotkeeper.cli import commands

    commands.watch_job(job, stack, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def logs(
    job: Job,
    rank: Annotated[
        str, typer.Option("--rank", "-r", metavar="N|all", help="Which machine's output: 0 to nodes - 1, or all.")
    ] = "0",
    gen: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--gen", "-g", help="Which generation's (status shows the current one); else the newest."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """The end of what one machine's processes printed: 64 KB of each, carried here every 15 s while they print.

    What is left out is said where it is missing, with the file that has it: it is on the machine (its last 64 MB), for
    as long as the machine is there, and can be read there.

    With `--follow --json`: one line for each piece, in the order of the log. With `--rank all --json`: a list.

    Examples: `spotkeeper logs first --rank 1 --follow`, `spotkeeper logs first --rank all`
    """
    from spotkeeper.cli import commands

    commands.logs(job, rank, gen, stack, follow=follow, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def download(
    job: Job,
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="DIR", help="Where to; else ./JOB-output.", show_default=False),
    ] = None,
    rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--rank", "-r", help="Only this machine's files; else all.", show_default=False),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Fetch what a job left: the model. Each machine's files go to DIR/RANK/.

    A script saves to the folder `run.output` (SPOTKEEPER_OUTPUT), at its end for instance:
    `if run.rank == 0: torch.save(model.state_dict(), run.output / "model.pt")`. When its command has ended with
    exit code 0, all of that folder is in the stack's bucket before the machines go, and stays there.

    Once more fetches only what is missing: files are whole, or not there.

    Examples: `spotkeeper download first`, `spotkeeper download first models --rank 0`
    """
    from spotkeeper.cli import commands

    commands.download(job, folder, rank, stack, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def checkpoints(
    job: Job,
    fetch: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--fetch", metavar="DIR", help="Bring the bucket's newest here.", show_default=False),
    ] = None,
    commit: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--commit", metavar="GEN-STEP", help="With --fetch: this one.", show_default=False),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Which checkpoints of a job there are, and where: on disks by their machines' last word, and in the bucket.

    The bucket has copies where the job file says `checkpoint: {mirror: {every_min: 60}}`. A job goes on from one by
    itself where no disk has anything newer; --fetch brings one here, for `attach(checkpoint_dir=DIR)`.

    Examples: `spotkeeper checkpoints first`, `spotkeeper checkpoints first --fetch ckpt`
    """
    from spotkeeper.cli import commands

    commands.checkpoints(job, fetch, commit, stack, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def report(
    job: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="JOB", help="Id or name of a job.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Sums over all jobs, by user and by month.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="One line a machine (with --all: a job, user, month).")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Every machine a job had and its cost, lost work and its causes, every recovery; against on-demand machines.

    A recovery: what was lost, announced or not, how long training stood still, what replaced it. Lost work: what was
    paid for and trained nothing that was kept; goodput is the rest's share.

    Examples: `spotkeeper report first`, `spotkeeper report first --csv > machines.csv`, `spotkeeper report --all`
    """
    from spotkeeper.cli import reporting

    reporting.report(job, stack, every=every, as_csv=as_csv, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def forecast(
    file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)],
    work: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--work", metavar="40h", help="How long it trains if nothing happens; else as the job file says."),
    ] = None,
    stack_file: StackFile = None,
    markets: Markets = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a comment.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """What a job will cost on spot, and when it will be done, with bands that hold four of five outcomes.

    The rule that buys machines is replayed on recorded markets, and on the stack's own history where there is one,
    beside on-demand only. What is assumed is printed, a line each. Nothing is started, and no cloud is asked.

    Examples: `spotkeeper forecast job.yaml --work 40h`, `spotkeeper forecast job.yaml --json | jq .expected.usd`
    """
    from spotkeeper.cli import forecast as forecasting

    forecasting.run(file, stack, stack_file, work, markets, as_markdown=markdown, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def compare(
    file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)],
    work: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--work", metavar="40h", help="How long it trains on the job file's own machines, if nothing happens."
        ),
    ] = None,
    step_time: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--step-time", metavar="SECONDS", min=1e-6, help="Of a step on the job file's own machines."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure a step: run the job's command here for a dozen of them.")
    ] = False,
    gradients_gb: Annotated[
        float,
        typer.Option(
            "--gradients-gb",
            metavar="GB",
            min=0.0,
            help="Gradients that a step sums: the bytes of the parameters, 2.6 for 1.3 billion in bf16.",
        ),
    ] = 0.0,
    stack_file: StackFile = None,
    markets: Markets = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """What a job comes to on each pool of the stack, on spot and on-demand: by cost, and by time.

    Of each pool it takes as many machines as make the job's processes: four with one GPU, or one with four. A step is
    made from one that was given, measured, or told by an earlier job of this name, with the networks between the
    machines taken into account. What is assumed is printed, a line each. Nothing is started in the cloud.

    Examples: `spotkeeper compare job.yaml --work 40h --step-time 0.8 --gradients-gb 2.6`,
    `spotkeeper compare job.yaml --measure`
    """
    from spotkeeper.cli import compare as comparing

    comparing.run(file, stack, stack_file, work, markets, step_time, gradients_gb, measure=measure, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def drill(
    job: Job,
    rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--rank",
            metavar="N",
            min=0,
            help="Whose machine; else the highest rank's on spot, else on-demand.",
        ),
    ] = None,
    no_notice: Annotated[bool, typer.Option("--no-notice", help="Take it without a word, as a loss.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Take one machine of a running job away, follow its recovery, and judge each phase and the work lost.

    Exit code 1 where a target is missed. A terminal is asked first. Needs your own cloud credentials; on AWS a notice
    comes from an experiment template of FIS that `SPOTKEEPER_FIS_TEMPLATE` names.

    Examples: `spotkeeper drill first`, `spotkeeper drill first --rank 0 --no-notice --json`
    """
    from spotkeeper.cli import drill as drilling

    drilling.drill(job, rank, stack, notice=not no_notice, yes=yes, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def cancel(job: Job, stack: Stack = None, as_json: Json = False) -> None:
    """End a job: its machines, disks and checkpoints are deleted (`keep_disks: true` keeps the disks).

    Example: `spotkeeper cancel first`
    """
    from spotkeeper.cli import commands

    commands.ask_job(job, "cancel", stack, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def pause(job: Job, stack: Stack = None, as_json: Json = False) -> None:
    """Save, give the machines back, keep the disks. `spotkeeper resume` goes on at the same step.

    Example: `spotkeeper pause first`, and in the evening `spotkeeper resume first`
    """
    from spotkeeper.cli import commands

    commands.ask_job(job, "pause", stack, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def resize(
    job: Job,
    nodes: Annotated[int, typer.Argument(metavar="NODES", min=1, help="How many machines it shall have.")],
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Train on more or fewer machines, with the global batch unchanged. For `nodes: {min, max}` in the job file.

    All save and stop at one step and go on in the new size; what is too many is given back, the highest ranks first.

    Example: `spotkeeper resize first 4`
    """
    from spotkeeper.cli import commands

    commands.ask_job(job, "resize", stack, as_json=as_json, nodes=nodes)


@app.command(rich_help_panel=JOBS)
def resume(
    job: Job,
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="JOB.YAML", help="A mended job file; else the files it has.", show_default=False),
    ] = None,
    go_back: Annotated[
        bool,
        typer.Option("--go-back", help="Go on from an older checkpoint, or anew: the newest can be had no more."),
    ] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Go on with a job that was paused or holds, from its newest checkpoint.

    A job holds when its own code failed (it then gets a fresh crash budget), when it has spent its `max_usd`
    (it may then spend as much again), or when the cloud refused something. `spotkeeper status JOB` says why,
    what its disks cost meanwhile, and for how long it holds.

    With a job file, it goes on with that file and the source folder it names: a mended script, another
    `command`, `env`, `max_usd`. What its disks hold fast must stay: name, nodes, spread, seed, the kinds of
    its pools, `checkpoint.replicated`.

    A job never goes back to an older checkpoint by itself. Where the newest was on a disk that is lost, or on a
    static node that will not come back, it waits or holds and says so, until you say `--go-back`.

    Examples: `spotkeeper resume first`, `spotkeeper resume first job.yaml`
    """
    from spotkeeper.cli import commands

    commands.resume(job, file, stack, go_back=go_back, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def schema(
    document: Annotated[str, typer.Argument(metavar="job|stack|state", help="Which document.", show_default=False)],
    as_json: Json = False,
) -> None:
    """JSON Schema of a job file, or of a stack file (`Pulumi.NAME.yaml`), for editors.

    `state`: of `stack/pools.json` in the bucket, which `pulumi up` writes and nobody else.

    Example: `spotkeeper schema job > job.schema.json`, then begin the job file with
    `# yaml-language-server: $schema=job.schema.json`
    """
    from spotkeeper.cli import commands

    commands.schema(document)
