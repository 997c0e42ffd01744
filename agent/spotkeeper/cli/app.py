"""The command line itself: its name, its words, and the options that commands share. It runs nothing.

Nothing heavy is imported here: ``spotkeeper --help`` must answer at once.
"""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from spotkeeper import __version__
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
`export SPOTKEEPER_STACK=prod SPOTKEEPER_BUCKET=gs://$(pulumi stack output bucket --stack prod)` (`s3://` on AWS)

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
