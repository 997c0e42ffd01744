"""Options and help of `submit` and of the commands that show a job; each imports and calls its module in `jobs/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from spotkeeper.cli.app import JOBS, Job, Json, Stack, WithArguments, app, arguments_of

Verbose = Annotated[bool, Option("--verbose", "-v", help="Show why each machine was chosen.")]


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
