"""Options and help of `schema` and of the commands about stacks; each imports and calls its module in `stacks/`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from spotkeeper.cli.app import JOBS, STACKS, Json, Sections, Stack, Yes, app

StackOrFile = Annotated[
    str | None,
    Argument(
        metavar="STACK",
        help="Stack file (Pulumi.NAME.yaml), or its NAME in this folder or in infra/stacks. Default: SPOTKEEPER_STACK.",
    ),
]


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


@app.command(rich_help_panel=STACKS)
def reconcile(
    once: Annotated[bool, Option("--once", help="Required: run one round for every job, then exit.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Run one round for every unfinished job from this shell, as the stack's function does each minute.

    A round replaces lost machines, starts submitted jobs and deletes what ended jobs leave. Run this command when the
    function is down, or to see what a round does. It can run at the same time as the function, since every decision is
    a compare-and-swap. It uses your own cloud credentials. An ALARM on standard error needs a person's attention.

    Example: `spotkeeper reconcile --once`
    """
    from spotkeeper.cli.stacks import reconcile as ticking

    ticking.run(stack, once=once, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def market(
    pool: Annotated[str | None, Argument(metavar="POOL", help="Only this pool. Default: all spot pools.")] = None,
    days: Annotated[float, Option("--days", metavar="DAYS", min=0.01, max=90.0, help="How far back to look.")] = 7.0,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Show spot prices, served and refused requests, and interruptions of each pool and zone over time.

    Prices are those that the cloud reported; all else is what the machines of this stack's jobs saw.

    Examples: `spotkeeper market`, `spotkeeper market workers --days 30`
    """
    from spotkeeper.cli.stacks import market as viewing

    viewing.run(pool, days, stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def exporter(
    listen: Annotated[
        str, Option("--listen", metavar="ADDRESS:PORT", help="Where to serve /metrics; port 0: any free port.")
    ] = "127.0.0.1:9464",
    every: Annotated[float, Option("--every", metavar="SECONDS", help="Time between two reads of the bucket.")] = 30.0,
    otlp: Annotated[
        str | None, Option("--otlp", metavar="URL", help="Send recoveries as traces to this OTLP/HTTP receiver.")
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Serve a stack's jobs, machines, money and recoveries to Prometheus until Ctrl-C, and send recoveries as traces.

    It reads the bucket with your own login every `--every` seconds, however often Prometheus scrapes.
    docs/monitoring.md has alert rules, a Grafana dashboard and a systemd unit. Install the exporter with
    `pip install 'spotkeeper[exporter]'`.
    `--json` prints the address once it is served.

    `--otlp` sends the parts that `spotkeeper trace` shows; OTEL_EXPORTER_OTLP_HEADERS can hold a key for the receiver.

    Examples: `spotkeeper exporter --listen 127.0.0.1:9464`, `spotkeeper exporter --otlp http://127.0.0.1:4318`
    """
    from spotkeeper.cli.stacks import exporter as exporting

    exporting.run(listen, every, otlp, stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def render(
    file: Annotated[Path | None, Argument(metavar="FILE", help="Job file or stack file (Pulumi.NAME.yaml).")] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Print what machines receive: the startup and shutdown scripts of a stack, or the launch command of a job.

    Examples: `spotkeeper render` (the local stack's scripts), `spotkeeper render job.yaml`,
    `spotkeeper render infra/stacks/Pulumi.prod.yaml`
    """
    from spotkeeper.cli.stacks import render as rendering

    rendering.run(file, stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def plan(named: StackOrFile = None, stack: Stack = None, as_json: Json = False) -> None:
    """List every resource that `pulumi up` would create for a stack file, with type, name and inputs. Calls no cloud.

    It needs no `pulumi` command, no login and no running stack. An error names the line, the value and the remedy.
    Secrets are masked; for values that only the cloud knows it prints `(known after up)`. To see what an update would
    change, use `pulumi preview`.

    Examples: `spotkeeper plan prod`, `spotkeeper plan infra/stacks/Pulumi.prod.yaml --json | jq '.[].type'`
    """
    from spotkeeper.cli.stacks.render import run_plan

    run_plan(named or stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def check(stack: StackOrFile = None, as_json: Json = False) -> None:
    """Check a stack file and the job files it names, and report all problems at once. Calls no cloud.

    Each line names the place, the value, and the nearest valid name or the remedy.
    `--json` prints `{"ok": false, "problems": [{"file", "line", "path", "value", "message", "nearest"}]}`.

    Examples: `spotkeeper check prod`, `spotkeeper check infra/stacks/Pulumi.prod.yaml --json`
    """
    from spotkeeper.cli.stacks.stackfile import run_check

    run_check(stack, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def review(
    preview: Annotated[Path, Option(metavar="FILE", help="Output of `pulumi preview --json`; - reads standard input.")],
    stack_file: Annotated[
        Path | None, Option(metavar="FILE", help="Pulumi.NAME.yaml. Default: the file of the stack.")
    ] = None,
    base: Annotated[
        Path | None, Option(metavar="FILE", help="The stack file before the change, to compare the cost.")
    ] = None,
    allow_data_loss: Annotated[
        bool,
        Option(
            "--allow-data-loss",
            envvar="SPOTKEEPER_ALLOW_DATA_LOSS",
            help="Accept that data is lost. Pass this only if a person has approved the loss.",
        ),
    ] = False,
    expect_no_changes: Annotated[
        bool, Option("--expect-no-changes", help="Fail if anything changes, for a nightly drift check.")
    ] = False,
    comment: Annotated[
        Path | None, Option(metavar="FILE", help="Also write the review to FILE, cut to a comment's length.")
    ] = None,
    stacks: Annotated[int, Option(min=1, help="Number of stacks whose reviews go into the same comment.")] = 1,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Write the pull request comment about a change to a stack: resources, data at risk, broken rules and cost.

    The exit code is 4 in three cases: data would be lost (a disk or bucket deleted or replaced, or the stack emptied)
    and `--allow-data-loss` is missing; a rule of `infra/policy` is broken; or you pass `--expect-no-changes` and the
    cloud differs from the declaration (as `pulumi preview --refresh --json` shows). It is 1 if the preview failed. The
    comment shows only sizes, zones, machine types and whatever breaks a rule. If the preview was made without
    `--show-sames`, the rules check only resources that change. `.github/workflows` uses this command.

    Example: `spotkeeper review --preview preview.json --stack prod`, after
    `pulumi preview --stack prod --json --show-sames > preview.json`
    """
    from spotkeeper.cli.stacks.review import Comment, run

    run(
        preview, stack_file, stack, base, agreed=allow_data_loss, quiet=expect_no_changes, as_json=as_json,
        comment=Comment(comment, stacks),
    )  # fmt: skip


@app.command("live-check", rich_help_panel=STACKS)
def live_check(
    listed: Annotated[
        bool, Option("--list", help="Only print the checks, with the stack's names filled in; call no cloud.")
    ] = False,
    yes: Yes = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Check a new stack in its cloud with a small job, and clean up.

    It states the highest possible cost and asks for confirmation; without a terminal it refuses unless you pass
    `--yes`. Then it launches one spot machine of the cheapest pool, preempts it, and waits for the replacement. Next it
    runs those commands of docs/first-live-hour.md whose result it can judge, and deletes everything. At the end it
    prints a table of the results, with the commands that you must run and judge. The exit code is 1 if a check fails.

    Examples: `spotkeeper live-check --stack prod`, `spotkeeper live-check --list --stack prod`
    """
    from spotkeeper.cli.stacks import live_check as checking

    checking.run(stack, yes=yes, listed=listed, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def preflight(
    folder: Annotated[
        Path | None, Option(metavar="DIR", help="Checkpoint folder. Default: the data disk, else the working folder.")
    ] = None,
    peer: Annotated[
        list[str] | None, Option(metavar="ADDRESS", help="Another machine, which this one must reach (repeatable).")
    ] = None,
    notice: Annotated[
        float | None,
        Option(metavar="SECONDS", help="Time from notice to preemption. Default: the pool's value, else 120."),
    ] = None,
    python: Annotated[str, Option(metavar="PROGRAM", help="Python interpreter that runs the job.")] = "python3",
    quick: Annotated[bool, Option("--quick", help="Only the checks that run at every boot.")] = False,
    as_json: Json = False,
) -> None:
    """Check that this machine can train and survive a preemption. Changes nothing; takes at most three minutes.

    It checks the clock, metadata and tokens, the disk's free space and speed (how many GB it can save after a notice),
    TCP timeouts, torch, driver, NCCL and EFA. Each finding says what to do. Outside a cloud it names the checks that
    only a cloud machine can run. Every machine runs the quick checks at boot and logs the result.

    The exit code is 1 if a check found something that will fail.

    Examples: `spotkeeper preflight --peer 10.0.0.7`, `spotkeeper preflight --json | jq .level`
    """
    from spotkeeper.cli.stacks import preflight as preflights

    preflights.run(folder, tuple(peer or ()), notice, python, quick=quick, as_json=as_json)


@app.command(rich_help_panel=STACKS)
def policy(as_json: Json = False) -> None:
    """Let another program evaluate the policy that chooses machines, on any market, over standard input and output.

    It reads and writes one JSON object per line (protocol 1): for each time step (`tick`) of a market it answers where
    the job runs until the next one. It calls no cloud. docs/selection.md describes all messages, with an example.

    Example: `spotkeeper policy < questions.jsonl`, where the first line is `{"type":"hello","protocol":1}`
    """
    from spotkeeper.cli.stacks.policy import serve

    if sys.stdin.isatty():
        print(
            'type one JSON object per line, first {"type":"hello","protocol":1}; Ctrl-D ends',
            file=sys.stderr,
            flush=True,
        )
    serve(sys.stdin.buffer, sys.stdout.buffer)


@app.command(rich_help_panel=STACKS)
def repair(
    what: Annotated[str, Argument(metavar="allocation", help="Which document to rebuild.")],
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Rebuild `stack/allocation` (which job has which machine) if `spotkeeper status` reports that it is unreadable.

    It reads the jobs' records and ledgers and lists the cloud's machines. Running jobs continue.

    Example: `spotkeeper repair allocation`
    """
    from spotkeeper.cli.stacks import reconcile as ticking

    ticking.repair(what, stack, as_json=as_json)


notifying = typer.Typer(
    cls=Sections,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Test the channels to which the stack's function sends notifications about jobs.

The stack file declares channels (Slack, Teams, Discord, webhook); docs/notifications.md explains them.""",
)
app.add_typer(notifying, name="notify", rich_help_panel=STACKS)


@notifying.command("test")
def notify_test(
    channel: Annotated[str, Argument(metavar="CHANNEL", help="Name of the channel in the stack file.")],
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Send a test message to a channel. The stack's function sends it, so this also tests its right to the secret.

    Example: `spotkeeper notify test ml-team`
    """
    from spotkeeper.cli.stacks import notify

    notify.test(channel, stack, as_json=as_json)
