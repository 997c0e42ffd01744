"""The commands, their options and help. Everything they do is in the modules beside this one.

Nothing heavy is imported here: ``spotkeeper --help`` must answer at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from spotkeeper import __version__
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.local import app as local_app

EPILOG = (
    "Exit codes: 0 well; 1 the job, the cloud or the bucket failed; 2 a wrong option or job file; "
    "3 no such stack, job or log; 4 refused, it would clash with what is there. "
    "Errors are words on standard error, with `--json` too."
)

app = typer.Typer(
    name="spotkeeper",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    help="""Train on spot machines as if they never went away.

A first run on this machine, no account needed: `spotkeeper local up`, then
`spotkeeper submit examples/gpt/job.yaml --watch`, then `spotkeeper local down`.

In a cloud, name the stack once (here `prod`), in the folder where it was brought up:
`export SPOTKEEPER_STACK=prod SPOTKEEPER_BUCKET=gs://$(pulumi stack output bucket --stack prod)`

The words: a *job* trains on some machines, its *ranks* (from 0). Each change of machines is a new *generation*, which
goes on from the newest checkpoint. A *stack* is what `pulumi up` made for a team; its *pools* say which machines
there are.""",
)

JOBS, STACKS = "Your jobs", "For those who run a stack"
app.add_typer(local_app, name="local", rich_help_panel="Without a cloud")

Stack = Annotated[
    Optional[str],  # noqa: UP045  # typer reads this at run time
    typer.Option("--stack", metavar="NAME", help="The stack; else SPOTKEEPER_STACK, else the local cloud."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job.", show_default=False)]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"spotkeeper {__version__}")
        raise typer.Exit


@app.callback()
def spotkeeper(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...


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
    stack_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--stack-file", metavar="FILE", help="A stack that need not be up: Pulumi.NAME.yaml."),
    ] = None,
    markets: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--markets", metavar="DIR", help="Recordings to replay; else SPOTKEEPER_MARKETS, else ours."),
    ] = None,
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
        typer.Option("--work", metavar="40h", help="How long it trains as its job file has it, if nothing happens."),
    ] = None,
    step_time: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--step-time", metavar="SECONDS", min=1e-6, help="Of a step, as its job file has it."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure a step: run the job's command here for a dozen of them.")
    ] = False,
    gradients_gb: Annotated[
        float, typer.Option("--gradients-gb", metavar="GB", min=0.0, help="What a step sums over all processes.")
    ] = 0.0,
    stack_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--stack-file", metavar="FILE", help="A stack that need not be up: Pulumi.NAME.yaml."),
    ] = None,
    markets: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--markets", metavar="DIR", help="Recordings to replay; else SPOTKEEPER_MARKETS, else ours."),
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """What a job comes to on each pool of the stack, on spot and on-demand: by cost, and by time.

    Of each pool it takes as many machines as make the job's processes. A step is made from one that was given,
    measured, or told by an earlier job of this name, with the networks between the machines taken into account.

    Example: `spotkeeper compare job.yaml --work 40h --step-time 0.8 --gradients-gb 2.6`
    """
    from spotkeeper.cli import compare as comparing

    comparing.run(file, stack, stack_file, work, markets, step_time, gradients_gb, measure=measure, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def drill(
    job: Job,
    rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--rank", metavar="N", min=0, help="Whose machine; else the highest rank's on spot."),
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
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """What a change would do to a stack, as the comment on a pull request: resources, data, and what it will cost.

    Exit code 4 where a disk or a bucket would be deleted or replaced, or the stack be emptied, and nobody has agreed
    (or, with `--expect-no-changes`, where anything is not as it was declared: `pulumi preview --refresh --json`);
    1 where the preview itself failed. Of values it shows sizes, zones and machine types only.
    `.github/workflows` shows how it is used.

    Example: `spotkeeper review --preview preview.json --stack prod`, after `pulumi preview --json > preview.json`
    """
    from spotkeeper.cli import commands

    commands.review(preview, stack_file, stack, base, agreed=allow_data_loss, quiet=expect_no_changes, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def live(stack: Stack = None, as_json: Json = False) -> None:
    """What only a real cloud can tell of a stack: what to type in its first hour, and what to see. Asks no cloud.

    The page docs/first-live-hour.md, with the stack's own names.

    Example: `spotkeeper live --stack prod`
    """
    from spotkeeper.cli import commands

    commands.live(stack, as_json=as_json)


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

    Example: `spotkeeper policy < questions.jsonl`, where the first line is `{"type":"hello","protocol":1}`
    """
    from spotkeeper.cli.policy import serve

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


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs a command and turns every failure into words and an exit code."""
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    """The exit code of a command line (``None``: the process's own)."""
    try:
        app(args=argv, prog_name="spotkeeper")
    except SystemExit as error:  # how typer ends, well or with a usage error that it has shown
        return error.code if isinstance(error.code, int) else Exit.OK
    except Exception as error:
        code = _known(error)
        if code is None:
            raise
        return code
    return Exit.OK


def _known(error: Exception) -> int | None:
    """Say what was wrong, and the exit code; None for what only a bug can be."""
    from spotkeeper.reconcile.store_api import CorruptError, StoreError
    from spotkeeper.spec.parse import SpecError

    match error:
        case CliError():
            return _fail(str(error), error.code, error.remedy)
        case SpecError():
            return _fail(str(error), Exit.USAGE)
        case CorruptError():
            return _fail(f"the bucket: {error}", Exit.FAILED, error.remedy)
        case StoreError():
            return _fail(*_no_login(str(error)))
    return None


def _no_login(text: str) -> tuple[str, Exit, str]:
    """A shell without a login asks the metadata server that only a machine of the cloud has."""
    logins = {"GCS": "gcloud auth application-default login", "S3": "aws sso login, or AWS_ACCESS_KEY_ID and the like"}
    store = next((store for store in logins if f"Generic {store}" in text), "")
    if store and "169.254.169.254" in text:
        return f"the bucket: this shell has no login to {store}", Exit.FAILED, logins[store]
    return f"the bucket: {text}", Exit.FAILED, ""


def _fail(message: str, code: Exit, remedy: str = "") -> int:
    for line in message.splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr)
    if remedy:
        print(f"  try: {remedy}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
