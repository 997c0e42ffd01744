"""Options and help of the commands about jobs; each command imports and calls its module in `jobs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from spotkeeper.cli.app import JOBS, Job, Json, Node, Stack, WithArguments, Yes, app, arguments_of

JobFile = Annotated[Path, Argument(metavar="JOB.YAML", help="The job file.")]
StackFile = Annotated[
    Path | None, Option("--stack-file", metavar="FILE", help="Stack file (Pulumi.NAME.yaml); the stack need not run.")
]
Wait = Annotated[bool, Option("--wait", help="Wait until the request is carried out or refused.")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Show why each machine was chosen.")]
Markets = Annotated[
    Path | None,
    Option(metavar="DIR", help="Folder of recorded markets. Default: SPOTKEEPER_MARKETS, else the shipped folder."),
]


@app.command(rich_help_panel=JOBS, cls=WithArguments)
def submit(
    context: typer.Context,
    files: Annotated[list[Path], Argument(metavar="JOB.YAML... [-- ARGUMENTS]", help="The job files.")],
    name: Annotated[str | None, Option(metavar="NAME", help="Name of the job, instead of the one in the file.")] = None,
    watch: Annotated[bool, Option("--watch", "-w", help="Follow the job until it ends.")] = False,
    check: Annotated[
        bool, Option("--check", help="Only check the files against the stack; send and start nothing.")
    ] = False,
    verbose: Verbose = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Check job files, upload their source folders, and start the jobs.

    The smallest job file is `name: first`, `command: [train.py]`, `source: .`. Add `nodes: 3` to train on three
    machines. All fields are in docs/train.md and in `spotkeeper schema job`.

    To survive preemptions the script needs two lines:
    `run = spotkeeper.attach(model=model, optimizer=optimizer)` and `for batch in run.steps(loader, epochs=3):`
    Files that the script writes to the folder `run.output` are kept. For example, its last line can be
    `if run.rank == 0: torch.save(model.state_dict(), run.output / "model.pt")`; `spotkeeper download first` fetches
    the file.

    Arguments after `--` are appended to the command of every file:
    `spotkeeper submit job.yaml --name wide -- --width 9` starts a variant of a job from the same file.
    All files are checked before the first job is submitted.

    If a job of this name already runs with the same file and source, submit prints that job; if they differ, submit
    refuses.

    `--watch --json` prints what `spotkeeper watch --json` prints; with several files, `--json` prints a list.

    Examples: `spotkeeper submit job.yaml --watch`, `spotkeeper submit job.yaml --check`,
    `spotkeeper submit job.yaml --name wide -- --width 1024`, `spotkeeper submit a.yaml b.yaml`
    """
    from spotkeeper.cli.jobs import submit as submitting
    from spotkeeper.contract.parse.jobfile import Overrides

    overrides = Overrides(name, arguments_of(context))
    submitting.run(files, stack, overrides, watch=watch, check=check, verbose=verbose, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def status(
    job: Annotated[str | None, Argument(metavar="JOB", help="Name or id of a job. Default: all jobs.")] = None,
    finished: Annotated[bool, Option("--all", "-a", help="Include finished jobs.")] = False,
    words: Annotated[
        str,
        Option("--filter", metavar="WORDS", help="Only jobs with these words in name, owner, state, zone or model."),
    ] = "",
    live: Annotated[bool, Option("--watch", "-w", help="Show the list, or the job, until Ctrl-C.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """List all unfinished jobs, or show one job with its machines (and the end of its log, if it crashed).

    Examples: `spotkeeper status`, `spotkeeper status --filter "ada training"`,
    `spotkeeper status first --json | jq .step`
    """
    from spotkeeper.cli.jobs import status as viewing

    if live and job is not None:
        viewing.watch_job(job, stack, verbose=False, as_json=as_json)
    elif live:
        viewing.watch_list(stack, finished=finished, words=words)
    else:
        viewing.run(job, stack, finished=finished, as_json=as_json, words=words)


@app.command(rich_help_panel=JOBS)
def watch(job: Job, verbose: Verbose = False, stack: Stack = None, as_json: Json = False) -> None:
    """Follow a job until it ends or goes on hold: machines, step, loss, cost and every event.

    Ctrl-C stops watching; the job keeps running. The exit code is 0 only if the job succeeds.
    `--json` prints one line per event, and the job's final state in the last line.

    Example: `spotkeeper watch first`
    """
    from spotkeeper.cli.jobs import status as viewing

    viewing.watch_job(job, stack, verbose=verbose, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def queue(
    team: Annotated[str | None, Option("--team", metavar="TEAM", help="Only this team and its jobs.")] = None,
    every: Annotated[bool, Option("--all", "-a", help="Every job, not only the first 20 that wait and run.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Show which jobs wait for machines, in which order and why; which jobs have machines; and what teams use.

    A job waits if the stack, or its team's limits, have no room for all machines that it needs. Waiting jobs are
    served by priority (one higher for each day of waiting), then for the team that has used least of its share, then
    by age. A job behind one that does not fit yet may run in its gap, and gives the machines back when that one fits.

    A team may borrow machines that other teams do not use. They are taken back for a job whose team has less than its
    entitlement: jobs shrink, or save, stop and wait; they lose no step and go on by themselves. Nothing is taken from a
    job within 15 minutes of its start.

    `starts in`: until the job is expected to get machines, if the running jobs end as their measured steps say; `-` if
    they report no steps. `used`: what a team's machines have cost, halved every 24 hours; `entitled`: its part of all
    machines at present. `--json` prints the same with all times in seconds.

    Examples: `spotkeeper queue`, `spotkeeper queue --team nlp`, `spotkeeper queue --json | jq '.waiting[0].reason'`
    """
    from spotkeeper.cli.jobs import queue as showing

    showing.run(stack, team, every=every, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def events(
    job: Job,
    follow: Annotated[bool, Option("--follow", "-f", help="Keep printing until the job ends or goes on hold.")] = False,
    verbose: Verbose = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Print a job's events, oldest first: machines requested, noticed and lost, generations, holds, shells.

    Each line has the time (UTC), the time since submission, and what happened. `--json` prints one line per event.

    Examples: `spotkeeper events first`, `spotkeeper events first --follow --json`
    """
    from spotkeeper.cli.jobs import status as viewing

    viewing.events(job, stack, follow=follow, verbose=verbose, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def dashboard(
    job: Annotated[str | None, Argument(metavar="JOB", help="Job whose page to open. Default: all jobs.")] = None,
    port: Annotated[int, Option(metavar="N", min=0, max=65535, help="Port on 127.0.0.1. Default: any free one.")] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open a browser.")] = True,
    read_only: Annotated[bool, Option("--read-only", help="Refuse every action that changes a job.")] = False,
    behind: Annotated[
        str, Option(metavar="https://HOST", help="Address of an identity-aware proxy that serves the dashboard.")
    ] = "",
    stack: Stack = None,
    as_json: Annotated[
        bool, Option("--json", help="Print the one-time address as JSON, once the server is up.")
    ] = False,
) -> None:
    """Show jobs, machines, money, logs and the stack in a browser on this machine, live.

    The pages read the bucket with your own login, and ask for confirmation before they change anything. Only the
    browser that opens the one-time address gets in. `docs/dashboard.md` says how to share it behind a proxy.

    Examples: `spotkeeper dashboard`, `spotkeeper dashboard first --read-only`
    """
    from spotkeeper.cli.jobs import dashboard as serving

    serving.run(job, stack, serving.Serving(port, browser, read_only, behind, as_json))


@app.command(rich_help_panel=JOBS)
def logs(
    job: Job,
    node: Annotated[
        int | None, Option("--node", "-n", help="Only this node; `status` shows the numbers. Default: all nodes.")
    ] = None,
    gen: Annotated[int | None, Option("--generation", "-g", help="Only this generation. Default: all.")] = None,
    since: Annotated[str | None, Option(metavar="SPAN", help="Only the last SPAN: 90m, 2h, 1d.")] = None,
    grep: Annotated[
        str | None, Option(metavar="RE", help="Only lines in which this regular expression occurs.")
    ] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Print new output until the job ends.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Print a job's complete log: all that its processes printed, in order of time, also on machines that are gone.

    Each line begins with its time (UTC) and its node; `node 1.3` is local rank 3 of node 1. torchrun's own messages and
    the stack traces of a hung job are among the lines. New output appears within 10 s. Where a node printed more than
    2 MB/s, a line of the log says how much is missing; a note on standard error says how much of the oldest output was
    deleted because of `logs.keep_mb`. Values of the job's `secrets` are replaced by stars. `--json` prints one document
    per line.

    Examples: `spotkeeper logs first --follow`, `spotkeeper logs first --node 1 --since 2h --grep 'loss|Error'`
    """
    from spotkeeper.cli.jobs import logs as reading

    reading.run(job, stack, node=node, gen=gen, since=since, grep=grep, follow=follow, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def metrics(
    job: Job,
    as_csv: Annotated[bool, Option("--csv", help="One line per point: metric, step, time and value.")] = False,
    tensorboard: Annotated[
        Path | None, Option(metavar="DIR", help="Write an event file for TensorBoard to DIR/NAME.")
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Show the metrics that a job's script reports with `run.report(loss=..., accuracy=...)`.

    Each metric is one curve over all generations: steps that were lost and trained again appear once. A curve has at
    most 4,000 points; in a longer run, each part of the curve keeps its smallest, its largest and its last value. The
    newest points are at most a minute old.

    Examples: `spotkeeper metrics first`, `spotkeeper metrics first --csv > metrics.csv`,
    `spotkeeper metrics first --tensorboard runs`
    """
    from spotkeeper.cli.jobs import metrics as showing

    showing.run(job, stack, tensorboard, as_csv=as_csv, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def download(
    job: Job,
    folder: Annotated[Path | None, Argument(metavar="DIR", help="Target folder. Default: ./JOB-output.")] = None,
    node: Annotated[int | None, Option("--node", "-n", help="Only the files of this node. Default: all nodes.")] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Download the output of a job, such as the trained model. The files of each node go to DIR/NODE/.

    A script writes its output to the folder `run.output` (SPOTKEEPER_OUTPUT), for example at its end:
    `if run.rank == 0: torch.save(model.state_dict(), run.output / "model.pt")`. When the command ends with exit code 0,
    the whole folder is copied to the stack's bucket before the machines are deleted, and stays there.

    If you run the command again, it fetches only the files that are missing. It never leaves half a file.

    Examples: `spotkeeper download first`, `spotkeeper download first models --node 0`
    """
    from spotkeeper.cli.jobs import download as downloading

    downloading.run(job, folder, node, stack, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def checkpoints(
    job: Job,
    fetch: Annotated[Path | None, Option(metavar="DIR", help="Download the bucket's newest checkpoint to DIR.")] = None,
    commit: Annotated[str | None, Option(metavar="GEN-STEP", help="With --fetch: download this checkpoint.")] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a job: those on disks, as their machines last reported them, and those in the bucket.

    The bucket has copies if the job file says `checkpoint: {mirror: {every_min: 60}}`. A job resumes from such a copy
    by itself when no disk has a newer checkpoint. `--fetch DIR` downloads a copy for `attach(checkpoint_dir=DIR)`.

    Examples: `spotkeeper checkpoints first`, `spotkeeper checkpoints first --fetch ckpt`
    """
    from spotkeeper.cli.jobs import checkpoints as reading

    reading.run(job, fetch, commit, stack, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def report(
    job: Annotated[str | None, Argument(metavar="JOB", help="Name or id of the job.")] = None,
    every: Annotated[bool, Option("--all", "-a", help="Totals of all jobs, by user and by month.")] = False,
    as_csv: Annotated[
        bool, Option("--csv", help="One line per machine (with --all: per job, user and month).")
    ] = False,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write the job's page, as in the dashboard, to one HTML file.")
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Report what a job cost, compared with on-demand machines: every machine, every recovery, and the lost work.

    For each recovery it shows which machine was lost, whether the cloud gave notice, how long training stopped, and
    what replaced the machine. Lost work is paid time that did not contribute to the result; goodput is the share of
    paid time that did.

    Examples: `spotkeeper report first`, `spotkeeper report first --csv > machines.csv`, `spotkeeper report --all`,
    `spotkeeper report first --html first.html`
    """
    from spotkeeper.cli.jobs import report as reporting

    reporting.run(job, stack, every=every, as_csv=as_csv, as_json=as_json, html=html)


@app.command(rich_help_panel=JOBS)
def trace(
    job: Job,
    every: Annotated[bool, Option("--all", "-a", help="Show all recoveries, not only the newest.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Show how long each part of a job's newest recovery took: notice, save, boot, restore and others, as a waterfall.

    Machines boot beside each other and while the job still trains, so parts overlap. The last line names the part that
    covers most of the time without training. `--json` prints all recoveries. `spotkeeper exporter --otlp` sends them to
    a tracing backend.

    Examples: `spotkeeper trace first`, `spotkeeper trace first --all`
    """
    from spotkeeper.cli.jobs import trace as tracing

    tracing.run(job, stack, every=every, as_json=as_json)


@app.command("check-script", rich_help_panel=JOBS)
def check_script(
    script: Annotated[Path, Argument(metavar="TRAIN.PY", help="The training script.")],
    arguments: Annotated[list[str] | None, Argument(metavar="[-- ARGS...]", help="Arguments of the script.")] = None,
    steps: Annotated[int, Option(metavar="N", min=3, help="Optimizer steps per run.")] = 12,
    nproc: Annotated[
        int, Option(metavar="N", min=1, help="Number of processes; torchrun starts them if there are several.")
    ] = 1,
    python: Annotated[
        str | None, Option(metavar="PATH", help="Python interpreter that has torch. Default: that of this command.")
    ] = None,
    ignore: Annotated[
        list[str] | None, Option(metavar="NAME", help="Variable that need not be restored (repeatable).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check on this machine that a training script resumes bit for bit, and name the state that it does not restore.

    It runs the script for some steps: twice without a stop, then once with two stops and resumes. Each run has
    processes of its own, and its checkpoints go to a folder that is deleted afterwards. It compares the parameters,
    the optimizer, everything else given to `attach()`, the random state, and the batch and reported loss of each step.
    It names variables, generators and data sets of the script that differ after a resume, and says what to change.

    The exit code is 0 if all runs are equal, else 1 (also if the two runs without a stop already differ).

    Examples: `spotkeeper check-script train.py`, `spotkeeper check-script train.py --nproc 2 --steps 30 -- --lr 3e-4`
    """
    from spotkeeper.cli.jobs import check_script as checking

    checking.run([str(script), *(arguments or [])], steps, nproc, python, ignore or [], as_json)


@app.command(rich_help_panel=JOBS)
def forecast(
    file: JobFile,
    work: Annotated[
        str | None, Option(metavar="40h", help="Training time without interruptions. Default: `work` in the job file.")
    ] = None,
    stack_file: StackFile = None,
    markets: Markets = None,
    markdown: Annotated[
        bool, Option("--markdown", help="Print Markdown, for example for a pull request comment.")
    ] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Forecast what a job costs on spot and when it ends, with ranges that contain four of five outcomes.

    It simulates the purchase of machines on recorded markets, and on the stack's own history if there is any, and
    compares the result with on-demand machines alone. It prints its assumptions, starts nothing and calls no cloud.

    Examples: `spotkeeper forecast job.yaml --work 40h`, `spotkeeper forecast job.yaml --json | jq .expected.usd`
    """
    from spotkeeper.cli.jobs import forecast as forecasting

    forecasting.run(file, stack, stack_file, work, markets, as_markdown=markdown, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def compare(
    file: JobFile,
    work: Annotated[
        str | None, Option(metavar="40h", help="Training time on the machines of the job file, without interruptions.")
    ] = None,
    step_time: Annotated[
        float | None, Option(metavar="SECONDS", min=1e-6, help="Duration of a step on the machines of the job file.")
    ] = None,
    measure: Annotated[
        bool, Option("--measure", help="Run the job's command here for a dozen steps to measure a step's duration.")
    ] = False,
    gradients_gb: Annotated[
        float,
        Option(
            metavar="GB",
            min=0.0,
            help="Size of the gradients that a step sums over all machines: 2.6 for 1.3 billion parameters in bf16.",
        ),
    ] = 0.0,
    stack_file: StackFile = None,
    markets: Markets = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Compare cost and duration of a job on every pool of the stack, on spot and on-demand.

    It takes enough machines of each pool for the job's processes: four processes fit on four machines with one GPU or
    on one machine with four. It derives the duration of a step from one known duration (given, measured, or reported by
    an earlier job of this name) and from the networks between machines. It prints its assumptions and starts nothing.

    Examples: `spotkeeper compare job.yaml --work 40h --step-time 0.8 --gradients-gb 2.6`,
    `spotkeeper compare job.yaml --measure`
    """
    from spotkeeper.cli.jobs import compare as comparing

    comparing.run(file, stack, stack_file, work, markets, step_time, gradients_gb, measure=measure, as_json=as_json)


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
    zone: Annotated[str, Argument(metavar="ZONE", help="Name of the zone, such as us-central1-b.")],
    wait: Wait = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Move a job's machines and disks to another zone of its pools.

    All machines save and stop at the same step, snapshots copy the disks, and training continues in ZONE. To cancel a
    move, name the zone where the job is now. Jobs with a static machine and jobs with `spread: true` cannot move.

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


@app.command(rich_help_panel=JOBS)
def schema(
    document: Annotated[str, Argument(metavar="job|sweep|stack|state", help="Which document to describe.")],
    as_json: Json = False,
) -> None:
    """Print the JSON Schema of a job file, a search's file or a stack file (`Pulumi.NAME.yaml`), for editors.

    `state` is the schema of `stack/pools.json` in the bucket, which only `pulumi up` writes.

    Example: `spotkeeper schema job > job.schema.json`, then start the job file with
    `# yaml-language-server: $schema=job.schema.json`
    """
    from spotkeeper.cli.output import say
    from spotkeeper.cli.stacks.stackfile import schema_of

    say(schema_of(document))
