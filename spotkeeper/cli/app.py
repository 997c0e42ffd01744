"""The command line: its name and help, the options that several commands share, and two extensions of typer.

This module has no slow imports: ``spotkeeper --help`` must answer at once. Typer's rich help would need 0.2 s of
imports (Markdown, syntax highlighting) before the first line, so the help is plain text, with commands in sections.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from spotkeeper import __version__

EPILOG = (
    "Exit codes: 0 success; 1 the job, the cloud or the bucket failed; 2 wrong option or job file; "
    "3 no such stack, job or log; 4 refused because the request conflicts with what exists. "
    "Errors are plain text on standard error, also with `--json`."
)
JOBS, STACKS = "Jobs", "Stacks"
FIRST_SENTENCE = 200  # characters; no command's first sentence is longer, so none is cut
_AFTER_DASHES = "spotkeeper.after_dashes"


class Sections(TyperGroup):
    """A group whose help lists its commands in sections, one for each ``rich_help_panel``, in order of declaration."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            section = getattr(command, "rich_help_panel", None)
            heading = section if isinstance(section, str) else "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str(FIRST_SENTENCE)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class WithArguments(TyperCommand):
    """A command that keeps the words after ``--`` apart; typer would treat them as the command's own arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[_AFTER_DASHES] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])


def arguments_of(context: typer.Context) -> tuple[str, ...]:
    """The words after ``--`` on the command line of a :class:`WithArguments`."""
    words: tuple[str, ...] = context.meta[_AFTER_DASHES]
    return words


app = typer.Typer(
    name="spotkeeper",
    cls=Sections,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    help="""Run PyTorch training on spot machines, through preemptions, with the same result.

To try it on this machine without an account: `spotkeeper local up`, then
`spotkeeper submit examples/gpt/job.yaml --watch`, then `spotkeeper local down`.

For a stack in a cloud (here `prod`), run this in the folder where you ran `pulumi up`:
`export SPOTKEEPER_STACK=prod SPOTKEEPER_BUCKET=gs://$(pulumi stack output bucket --stack prod)` (`s3://` on AWS)

Terms: a stack is what `pulumi up` creates for a team, and its pools define the machines that jobs may use. A job
trains on one or more machines, its nodes, numbered from 0. Each time the set of machines changes, a new generation
starts and resumes from the newest checkpoint.""",
)

Stack = Annotated[
    str | None,
    typer.Option("--stack", metavar="NAME", help="Name of the stack. Default: SPOTKEEPER_STACK, else the local cloud."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Name or id of the job.")]
Node = Annotated[
    int | None, typer.Option("--node", metavar="N", min=0, help="Node number; optional if the job has one machine.")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"spotkeeper {__version__}")
        raise typer.Exit


@app.callback()
def spotkeeper(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...
