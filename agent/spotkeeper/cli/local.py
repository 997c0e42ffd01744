"""``spotkeeper local``: the one-machine cloud, brought up, looked at, and hurt on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotkeeper.cli.target import LOCAL as HERE
from spotkeeper.cli.target import SCALE

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Option("--folder", help="Where the cloud keeps everything it writes.")]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""A cloud on this machine: three zones, spot prices and capacity replayed from a recorded market.

No account, no root, no docker. Its VMs are process trees that run the real agent and the
real torchrun; it is set up by the same Pulumi program as a real cloud.""",
)


@app.command()
def up(
    folder: Folder = HERE,
    scale: Annotated[float, typer.Option(help="How many times faster than real its clock runs: 120 at most.")] = SCALE,
    seed: Annotated[int, typer.Option(help="Draws another market and other boots.")] = 0,
    as_json: Json = False,
) -> None:
    """Start the cloud and bring up the stack `local` in it. Again: nothing changes.

    Commands find the cloud whose folder `.spotkeeper/local` is here or above; one in another folder by
    `SPOTKEEPER_FOLDER`.

    Example: `spotkeeper local up && spotkeeper submit examples/gpt/job.yaml --watch`
    """
    from spotkeeper.cli import localcloud

    localcloud.up(folder, scale=scale, seed=seed, as_json=as_json)


@app.command()
def down(
    folder: Folder = HERE,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nobody, though jobs that are not over lose their checkpoints.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Pull the plug: ask neither you nor the stack, end every process of it, remove its folder."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Destroy the stack, stop every VM and the cloud, and check that nothing is left.

    The checkpoints of its jobs go with it. Where jobs are not over (they run, were paused, or hold) it names them and
    asks first; without a terminal it refuses. `--yes` answers.

    A cloud that cannot destroy its stack any more, its bucket damaged or its disk full, goes with `--force`.

    Examples: `spotkeeper local down`, `spotkeeper local down --yes`, `spotkeeper local down --force`
    """
    from spotkeeper.cli import localcloud

    localcloud.down(folder, yes=yes, force=force, as_json=as_json)


@app.command()
def status(folder: Folder = HERE, as_json: Json = False) -> None:
    """VMs and disks as the cloud itself sees them (jobs: `spotkeeper status`).

    Example: `spotkeeper local status`
    """
    from spotkeeper.cli import localcloud

    localcloud.status(folder, as_json=as_json)


@app.command()
def preempt(
    vm: Annotated[str, typer.Argument(metavar="VM", help="Its name (spotkeeper local status).", show_default=False)],
    notice: Annotated[bool, typer.Option("--notice/--no-notice", help="With a notice first, or at once.")] = True,
    folder: Folder = HERE,
    as_json: Json = False,
) -> None:
    """Take a spot VM away, as the cloud would. To another VM happens what may: maintenance, or its host breaks.

    Examples: `spotkeeper local preempt sk-local-abcdefgh-r0001-a1`, with `--no-notice` at once
    """
    from spotkeeper.cli import localcloud

    localcloud.preempt(folder, vm, notice=notice, as_json=as_json)


@app.command()
def capacity(
    zone: Annotated[str, typer.Argument(metavar="ZONE", help="Such as us-central1-a.", show_default=False)],
    nodes: Annotated[str, typer.Argument(metavar="N|market", help="Spot VMs that fit; or what the market says.")],
    folder: Folder = HERE,
    as_json: Json = False,
) -> None:
    """Say how many spot VMs a zone can hold from now on. Below what runs: the rest is preempted.

    Examples: `spotkeeper local capacity us-central1-a 0`, `spotkeeper local capacity us-central1-a market`
    """
    from spotkeeper.cli import localcloud

    localcloud.capacity(folder, zone, nodes, as_json=as_json)
