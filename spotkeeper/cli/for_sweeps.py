"""Options and help of ``spotkeeper sweep``; each command imports and calls its module in `sweeps/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from spotkeeper.cli.app import Json, Sections, Stack, Yes

START = "start"
Name = Annotated[str, Argument(metavar="NAME", help="Name of the search.")]


class StartsFiles(Sections):
    """A group whose command ``start`` may be left out: ``sweep FILE`` is ``sweep start FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [START, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=StartsFiles,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Search for the best parameters of a training script: many jobs, the trials, with different values.

`spotkeeper sweep sweep.yaml` starts a search. docs/searches.md describes the file.""",
)


@app.command()
def start(
    file: Annotated[Path, Argument(metavar="SWEEP.YAML", help="The search's file.")],
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only show the trials' values and what they may cost; start nothing.")
    ] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Start a search: draw the values of its trials, and submit a job for each. The word `start` may be left out.

    The smallest file is `name: lr`, `job: job.yaml`, `space: {lr: {loguniform: [1e-5, 1e-1]}}`, `trials: 20`,
    `metric: loss`, `goal: min`. The values take the place of `{lr}` in the job's `command`, and the script can read
    them by `spotkeeper.params()`. All fields are in docs/searches.md and in `spotkeeper schema sweep`.

    If the command is interrupted, repeat it: it submits the trials that are missing.

    Examples: `spotkeeper sweep start sweep.yaml --dry-run`, `spotkeeper sweep sweep.yaml`
    """
    from spotkeeper.cli.sweeps import submit

    submit.start(file, stack, dry_run=dry_run, as_json=as_json)


@app.command()
def extend(
    name: Name,
    trials: Annotated[str, Option("--trials", metavar="+N", help="Number of further trials.")],
    max_usd: Annotated[
        float | None,
        Option("--max-usd", metavar="USD", min=0.01, max=1e9, help="What all trials may cost. Default: as before."),
    ] = None,
    seed: Annotated[
        int | None, Option(metavar="N", min=0, max=2**32 - 1, help="Another seed. Default: the same sequence goes on.")
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Add trials to a search. With `stop: halving` they are compared with each other, not with the earlier ones.

    Examples: `spotkeeper sweep extend lr --trials +20`, `spotkeeper sweep extend lr --trials +20 --max-usd 300`
    """
    from spotkeeper.cli.sweeps import submit

    submit.extend(name, trials, max_usd, seed, stack, as_json=as_json)


@app.command()
def status(
    name: Annotated[str | None, Argument(metavar="NAME", help="Name of the search. Default: list all.")] = None,
    every: Annotated[bool, Option("--all", "-a", help="Every trial, not only the best 20.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="One line per trial, the best first.")] = False,
    live: Annotated[bool, Option("--watch", "-w", help="Show the search until Ctrl-C.")] = False,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Show a search: its best trials with values, states, curves and money.

    Trials that got further come first, then those with the better value. `on-demand`: the same machine-hours at
    on-demand prices. What halving saves is an estimate: what the stopped trials would still have cost up to
    `halving.max`, at their own cost per trained step.

    Examples: `spotkeeper sweep status lr`, `spotkeeper sweep status lr --csv > lr.csv`,
    `spotkeeper sweep status lr --json | jq '.rows[0].params'`
    """
    from spotkeeper.cli.sweeps import status as viewing

    viewing.run(name, stack, viewing.Shown(every, as_csv, live, as_json))


@app.command()
def stop(name: Name, yes: Yes = False, stack: Stack = None, as_json: Json = False) -> None:
    """End a search: cancel all its unfinished trials, and delete their machines, disks and checkpoints.

    Trials that are not submitted yet are not submitted any more; `extend` can add new ones later. It asks for
    confirmation; without a terminal it refuses unless you pass `--yes`.

    Example: `spotkeeper sweep stop lr`
    """
    from spotkeeper.cli.sweeps import stop as stopping

    stopping.run(name, stack, yes=yes, as_json=as_json)


@app.command()
def rerun(
    name: Name,
    seed: Annotated[int, Option("--seed", metavar="N", min=0, max=2**32 - 1, help="The job's `seed`.")],
    trial: Annotated[int | None, Option(metavar="N", min=0, help="Number of the trial. Default: the best.")] = None,
    job_name: Annotated[
        str | None, Option("--name", metavar="JOB", help="Name of the new job. Default: the trial's, -s and the seed.")
    ] = None,
    stack: Stack = None,
    as_json: Json = False,
) -> None:
    """Train with the values of the best trial again, as an ordinary job to its end, with another seed.

    Examples: `spotkeeper sweep rerun lr --seed 1`, `spotkeeper sweep rerun lr --trial 7 --seed 1 --name final`
    """
    from spotkeeper.cli.sweeps import rerun as rerunning

    rerunning.run(name, seed, trial, job_name, stack, as_json=as_json)
