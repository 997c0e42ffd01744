"""The one-machine cloud as the command line reaches it: its folder, its control plane, its stack ``local``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import console, emit, note
from spotkeeper.cli.target import FOLDER, LOCAL, Target, folder_option, local_folder, named_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotkeeper.local.cloud import LocalCloud
    from spotkeeper.local.views import Status

STACK = "local"
STACK_FILE = Path(__file__).resolve().parents[3] / "infra" / "stacks" / "Pulumi.local.yaml"
DEPLOYMENT = "deploy"  # below the cloud's folder: what was deployed
MAX_SCALE = 120.0  # then a notice of 120 s is one second, in which a job must have saved, and a tick comes every half


class UpResult(Struct, frozen=True):
    folder: str
    endpoint: str
    stack: str
    engine: str  # "pulumi" or "in-process"
    changes: dict[str, int]  # resources by what happened to them


class Done(Struct, frozen=True):
    """What a command that only changes something answers."""

    what: str


@contextmanager
def failures(remedy: str = "mend it and run spotkeeper local up again") -> Iterator[None]:
    """The cloud's own errors, in words and with an exit code. ``remedy``: what helps a stack that cannot be changed."""
    from spotkeeper.local.cloud import LocalCloudError
    from spotkeeper.local.deploy import DeployError
    from spotkeeper.local.single import BusyError

    try:
        yield
    except BusyError as error:
        raise CliError(str(error), Exit.REFUSED) from None
    except LocalCloudError as error:
        raise CliError(str(error), Exit.FAILED) from None
    except DeployError as error:
        raise CliError(f"the stack {STACK}: {error}", Exit.FAILED, remedy) from None
    except ValueError as error:
        raise CliError(str(error), Exit.USAGE) from None


def attach(folder: Path) -> LocalCloud:
    """The cloud in a folder.

    Raises:
        CliError: there is none.
    """
    from spotkeeper.local.cloud import LocalCloud, LocalCloudError

    try:
        return LocalCloud.attach(_named(folder))
    except LocalCloudError as error:
        raise CliError(str(error), Exit.MISSING) from None


def _named(folder: Path) -> Path:
    """Where no folder is named, the one that the environment names, or that of the cloud that is here or above."""
    return named_folder() or local_folder(Path.cwd()) or folder if folder == LOCAL else folder


def note_upkeep(folder: Path) -> None:
    """Say where nobody looks after the cloud in ``folder``, and what helps."""
    from spotkeeper.local.cloud import Upkeep

    cloud = attach(folder)
    words = {
        Upkeep.STOPPED: "does not run: its VMs go on, but nobody replaces, stops or starts any of them",
        Upkeep.UNWATCHED: "has lost its keeper: it goes on, but nobody would start its control plane again",
    }
    if cloud.upkeep in words:
        again = f"spotkeeper local up {folder_option(cloud.folder)}"
        note(f"the cloud in {cloud.folder} {words[cloud.upkeep]}\n  try: {again}")


def local_target(folder: Path) -> Target:
    """The stack of the one-machine cloud in ``folder``."""
    cloud = attach(folder)
    return Target(STACK, cloud.bucket, cloud.clock, cloud.folder, compute_endpoint=cloud.compute_endpoint)


def local_token(target: Target, url: str) -> str:
    """A token of the account that the schedule ticks with: on one machine, the operator may be anybody."""
    from infra.naming import account

    state = target.state(target.store())
    email = f"{account(state.stack, 'ck')}@{state.project}.iam.gserviceaccount.com"
    assert target.local is not None
    return attach(target.local).identity_token(email, url)


def up(folder: Path, *, scale: float, seed: int, as_json: bool) -> None:
    from spotkeeper.local import deploy
    from spotkeeper.local.cloud import LocalCloud
    from spotkeeper.local.deploy.show import Printer, summary
    from spotkeeper.local.single import only_one

    if scale > MAX_SCALE:
        why = f"at {MAX_SCALE:g} a notice of 120 s is one real second, and no job saves in less"
        raise CliError(f"scale {scale:g}: want at most {MAX_SCALE:g}; {why}", Exit.USAGE)
    folder = named_folder() or folder if folder == LOCAL else folder
    with failures(), only_one(folder, "spotkeeper local up", "take another folder: --folder"):
        cloud = LocalCloud.up(folder, scale=scale, seed=seed)
        out = console()
        if as_json:
            done = deploy.up(STACK, STACK_FILE, cloud.endpoint, cloud.folder / DEPLOYMENT)
        else:
            note(f"a cloud {'runs' if cloud.fresh else 'ran already'} in {cloud.folder}, {scale_words(cloud)}")
            done = deploy.up(STACK, STACK_FILE, cloud.endpoint, cloud.folder / DEPLOYMENT, Printer(out))
            summary(done, out)
    if (named_folder() or local_folder(Path.cwd()) or Path()).resolve() != cloud.folder:
        note(f"for spotkeeper submit, status and the others:  export {FOLDER}={shlex.quote(str(cloud.folder))}")
    if as_json:
        changes = {op.value: count for op, count in done.changes.items()}
        emit(UpResult(str(cloud.folder), cloud.endpoint, STACK, done.engine, changes), True, "")


def scale_words(cloud: LocalCloud) -> str:
    return f"its clock is {cloud.clock.scale:g} times as fast"


def down(folder: Path, *, yes: bool = False, force: bool = False, as_json: bool) -> None:
    from spotkeeper.cli.ending import agree
    from spotkeeper.local import deploy
    from spotkeeper.local.cloud import LocalCloud
    from spotkeeper.local.deploy.show import Printer
    from spotkeeper.reconcile.store_api import StoreError

    if force:
        _pull_the_plug(_named(folder), as_json)
        return
    folder = attach(folder).folder
    here = folder_option(folder)
    remedy = f"pull the plug, which asks no stack: spotkeeper local down --force {here}"
    with failures(remedy), _alone(folder):
        if not yes:
            try:
                agree(local_target(folder), f"spotkeeper local down --yes {here}", ask=not as_json)
            except StoreError as error:
                raise CliError(f"the bucket: {error}", Exit.FAILED, remedy) from None
        with _halfway(folder):
            cloud = LocalCloud.up(folder)  # a drain needs a control plane that answers
            printer = () if as_json else (Printer(console()),)
            deploy.destroy(STACK, STACK_FILE, cloud.endpoint, cloud.folder / DEPLOYMENT, *printer)
            left = cloud.down(purge=True)
    if left:
        emit(left, as_json, "")
        words = f"{left.vms} VMs, {left.disks} disks, {left.processes} processes"
        raise CliError(f"left over, and ended by force: {words}", Exit.FAILED)
    emit(left, as_json, "the cloud is down; no VM, disk or process is left")


@contextmanager
def _halfway(folder: Path) -> Iterator[None]:
    """Whoever breaks a ``down`` off is told what it has left, and both ways from there."""
    from spotkeeper.local.cloud import LocalCloud, LocalCloudError
    from spotkeeper.report.render import count

    try:
        yield
    except KeyboardInterrupt:
        here = folder_option(folder)
        try:
            left = LocalCloud.attach(folder).left_over()
            what = f"is half down: {count(left.vms, 'VM')} and {count(left.disks, 'disk')} are left"
        except LocalCloudError:
            what = "is half down"
        go_on = f"spotkeeper local down --yes {here}"
        note(f"\nthe cloud in {folder} {what}\n  try: {go_on}, or to keep it: spotkeeper local up {here}")
        raise


def _pull_the_plug(folder: Path, as_json: bool) -> None:
    from spotkeeper.local import wreck

    _cloud_unless_wreck(folder)
    with failures(), _alone(folder):
        cloud = _cloud_unless_wreck(folder)  # another may have ended it meanwhile
        ended = cloud.down(purge=True) if cloud is not None else wreck.end(folder)
    emit(ended, as_json, "the cloud was ended by force; no VM, disk or process is left")


def _cloud_unless_wreck(folder: Path) -> LocalCloud | None:
    """The cloud in ``folder``; None for one of which nothing can be read.

    Raises:
        CliError: there is none.
    """
    from spotkeeper.local.cloud import DamagedError, LocalCloud, LocalCloudError

    try:
        return LocalCloud.attach(folder)
    except DamagedError:
        return None
    except LocalCloudError as error:
        raise CliError(str(error), Exit.MISSING) from None


def _alone(folder: Path) -> AbstractContextManager[None]:
    from spotkeeper.local.single import only_one

    return only_one(folder, "spotkeeper local down", "look at it: spotkeeper local status")


def status(folder: Path, *, as_json: bool) -> None:
    note_upkeep(folder)
    with failures():
        found = attach(folder).status()
    emit(found, as_json, tables(found))


def tables(found: Status) -> RenderableType:
    """VMs, disks, zones and money of the cloud."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(*titles: str) -> Table:
        made = Table(box=None, pad_edge=False, header_style="dim")
        for title in titles:
            made.add_column(title, no_wrap=True)
        return made

    vms = table("VM", "state", "zone", "model", "machine", "address", "$/h")
    for vm in sorted(found.vms, key=lambda vm: vm.name):
        state = vm.status.lower() + (", preempted" if vm.preempted else ", notice" if vm.notice_until else "")
        vms.add_row(vm.name, state, vm.zone, vm.model, vm.machine, vm.address, f"{vm.price:.3f}")
    disks = table("disk", "state", "zone", "GB", "used by")
    for disk in sorted(found.disks, key=lambda disk: disk.name):
        disks.add_row(disk.name, disk.status.lower(), disk.zone, str(disk.size_gb), ", ".join(disk.users) or "-")
    zones = table("zone", "spot runs", "spot fits", "on-demand runs", "spot price")
    for zone in found.zones:
        fits = "any" if zone.capacity is None else str(zone.capacity)
        share = f"{zone.spot_price_share:.0%} of on-demand"
        zones.add_row(zone.zone, str(zone.running), fits + (" (set)" if zone.overridden else ""),
                      str(zone.on_demand_running), share)  # fmt: skip
    money = f"billed ${found.bill.spent:.2f}; the same hours on demand ${found.bill.on_demand_only:.2f}"
    return Group(vms, Text(), disks, Text(), zones, Text(f"\n{money}"))


def preempt(folder: Path, vm: str, *, notice: bool, as_json: bool) -> None:
    with failures():
        attach(folder).preempt(vm, notice=notice)
    what = f"{vm}: {'a notice was given' if notice else 'taken away at once'}"
    emit(Done(what), as_json, what)


def capacity(folder: Path, zone: str, nodes: str, *, as_json: bool) -> None:
    if nodes != "market" and not nodes.isdigit():
        raise CliError(f"{nodes}: want a number of spot VMs, or market", Exit.USAGE)
    count = None if nodes == "market" else int(nodes)
    with failures():
        attach(folder).set_capacity(zone, count)
    what = f"{zone}: " + ("what the market says" if count is None else f"{count} spot VMs fit")
    emit(Done(what), as_json, what)
