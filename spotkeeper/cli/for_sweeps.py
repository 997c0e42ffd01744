"""Options and help of ``spotkeeper sweep``; each command imports and calls its module in `sweeps/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from spotkeeper.cli.app import Json, Sections, Stack

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
        float | None, Option("--max-usd", metavar="USD", min=0.01, help="What all trials may cost. Default: as before.")
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
