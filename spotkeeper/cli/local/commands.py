"""``spotkeeper local``: start, inspect, disturb and destroy the one-machine cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotkeeper.cli.app import Json, Sections
from spotkeeper.client.target import LOCAL as HERE
from spotkeeper.client.target import SCALE

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="List every resource.")]
Folder = Annotated[Path, typer.Option("--folder", help="Folder for everything that the cloud writes.")]

app = typer.Typer(
    cls=Sections,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Run a cloud on this machine: the stack file's zones (three unless you change it), with spot
prices and capacity of a recorded market.

It needs no account, no root and no docker. Its VMs are process trees that run the real agent and the
real torchrun, and the Pulumi program of the real clouds sets it up.""",
)


@app.command()
def up(
    folder: Folder = HERE,
    scale: Annotated[float, typer.Option(help="Speed of the clock, as a multiple of real time (at most 120).")] = SCALE,
    seed: Annotated[int, typer.Option(help="Seed of the market and of the boot times.")] = 0,
    stack_file: Annotated[
        Path | None, typer.Option(help="Your own stack file; later `up` and `down` of this cloud use it too.")
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Start the cloud and create the stack `local` in it. If both exist, nothing changes.

    Other commands look for `.spotkeeper/local` in the working folder and its parents. For a cloud in another folder,
    set `SPOTKEEPER_FOLDER`.

    Examples: `spotkeeper local up`, `spotkeeper local up --stack-file Pulumi.mine.yaml`
    """
    from spotkeeper.cli.local import localcloud

    options = localcloud.UpOptions(scale, seed, stack_file, verbose, as_json)
    localcloud.up(folder, options)


@app.command()
def down(
    folder: Folder = HERE,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask, though unfinished jobs lose their checkpoints.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Skip the destruction of the stack: kill the cloud's processes and delete its folder, with all "
            "checkpoints. Does not ask.",
        ),
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Destroy the stack, stop all VMs and the cloud, and check that nothing is left.

    This deletes the checkpoints of all jobs. If jobs are unfinished (running, paused or on hold), the command names
    these jobs and asks for confirmation; without a terminal it refuses unless you pass `--yes`.

    Use `--force` if the cloud can no longer destroy its stack, because its bucket is damaged or the disk is full.

    Examples: `spotkeeper local down`, `spotkeeper local down --yes`, `spotkeeper local down --force`
    """
    from spotkeeper.cli.local import localcloud

    localcloud.down(folder, yes=yes, force=force, verbose=verbose, as_json=as_json)


@app.command()
def status(folder: Folder = HERE, as_json: Json = False) -> None:
    """List VMs and disks as the cloud sees them (for jobs: `spotkeeper status`).

    Example: `spotkeeper local status`
    """
    from spotkeeper.cli.local import localcloud

    localcloud.status(folder, as_json=as_json)


@app.command()
def preempt(
    vm: Annotated[str, typer.Argument(metavar="VM", help="Name of the VM, as `spotkeeper local status` shows it.")],
    notice: Annotated[
        bool, typer.Option("--notice/--no-notice", help="Give a preemption notice first, or delete the VM immediately.")
    ] = True,
    folder: Folder = HERE,
    as_json: Json = False,
) -> None:
    """Preempt a spot VM. For other VMs, `--notice` simulates maintenance and `--no-notice` a host failure.

    Examples: `spotkeeper local preempt sk-local-abcdefgh-n0001-a1`, or the same with `--no-notice`
    """
    from spotkeeper.cli.local import localcloud

    localcloud.preempt(folder, vm, notice=notice, as_json=as_json)


@app.command()
def capacity(
    zone: Annotated[str, typer.Argument(metavar="ZONE", help="Such as us-central1-a.")],
    nodes: Annotated[
        str, typer.Argument(metavar="N|market", help="Number of spot VMs, or market to follow the recording again.")
    ],
    folder: Folder = HERE,
    as_json: Json = False,
) -> None:
    """Set for how many spot VMs a zone has capacity. If more VMs run, the surplus is preempted.

    Examples: `spotkeeper local capacity us-central1-a 0`, `spotkeeper local capacity us-central1-a market`
    """
    from spotkeeper.cli.local import localcloud

    localcloud.capacity(folder, zone, nodes, as_json=as_json)
