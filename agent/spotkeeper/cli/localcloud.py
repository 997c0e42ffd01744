"""The one-machine cloud as the command line reaches it: its folder, its control plane, its stack ``local``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import console, emit, note
from spotkeeper.cli.target import FOLDER, LOCAL, SCALE, Target, folder_option, local_folder, named_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotkeeper.local.cloud import LocalCloud
    from spotkeeper.local.views import Status

STACK = "local"
STACK_FILE = Path(__file__).resolve().parents[3] / "infra" / "stacks" / "Pulumi.local.yaml"
DEPLOYMENT = "deploy"  # below the cloud's folder: what was deployed
_VM_COLUMNS = ("VM", "state", "zone", "model", "machine", "address", "$/h")
_DISK_COLUMNS = ("disk", "state", "zone", "GB", "used by")
_ZONE_COLUMNS = ("zone", "spot runs", "spot fits", "on-demand runs", "spot price")
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
        if not cloud.fresh and scale not in (SCALE, cloud.clock.scale):
            note(f"--scale {scale:g} is of a new cloud, and this one goes on: spotkeeper local down comes first")
        with _known(cloud):
            if as_json:
                done = deploy.up(STACK, STACK_FILE, cloud.endpoint, cloud.folder / DEPLOYMENT)
            else:
                note(f"a cloud {'runs' if cloud.fresh else 'ran already'} in {cloud.folder}, {scale_words(cloud)}")
                note(f"bringing up the stack {STACK}: what pulumi up would do ...")
                done = deploy.up(STACK, STACK_FILE, cloud.endpoint, cloud.folder / DEPLOYMENT, Printer(out))
                summary(done, out)
    if (named_folder() or local_folder(Path.cwd()) or Path()).resolve() != cloud.folder:
        note(f"for spotkeeper submit, status and the others:  export {FOLDER}={shlex.quote(str(cloud.folder))}")
    if cloud.fresh and not as_json:
        note("next, in the project's folder:  spotkeeper submit examples/gpt/job.yaml --watch")
    if as_json:
        changes = {op.value: count for op, count in done.changes.items()}
        emit(UpResult(str(cloud.folder), cloud.endpoint, STACK, done.engine, changes), True, "")


@contextmanager
def _known(cloud: LocalCloud) -> Iterator[None]:
    """A program's own jobs (``jobs:`` of the stack file) are submitted to the cloud that is being brought up."""
    names = {FOLDER: str(cloud.folder), "SPOTKEEPER_STACK": STACK}
    before = {name: os.environ.get(name) for name in (*names, "SPOTKEEPER_BUCKET")}
    os.environ.pop("SPOTKEEPER_BUCKET", None)
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
            with _known(cloud):
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
    from spotkeeper.report.words import count

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
    from rich.text import Text

    from spotkeeper.report.tables import fitting

    vms = (
        {
            "VM": vm.name,
            "state": vm.status.lower() + (", preempted" if vm.preempted else ", notice" if vm.notice_until else ""),
            "zone": vm.zone,
            "model": vm.model,
            "machine": vm.machine,
            "address": vm.address,
            "$/h": f"{vm.price:.3f}",
        }
        for vm in sorted(found.vms, key=lambda vm: vm.name)
    )
    disks = (
        {
            "disk": disk.name,
            "state": disk.status.lower(),
            "zone": disk.zone,
            "GB": str(disk.size_gb),
            "used by": ", ".join(disk.users) or "-",
        }
        for disk in sorted(found.disks, key=lambda disk: disk.name)
    )
    zones = (
        {
            "zone": zone.zone,
            "spot runs": str(zone.running),
            "spot fits": ("any" if zone.capacity is None else str(zone.capacity)) + " (set)" * zone.overridden,
            "on-demand runs": str(zone.on_demand_running),
            "spot price": f"{zone.spot_price_share:.0%} of on-demand",
        }
        for zone in found.zones
    )
    money = f"billed ${found.bill.spent:.2f}; the same hours on demand ${found.bill.on_demand_only:.2f}"
    return Group(
        fitting(vms, _VM_COLUMNS, ("address", "machine", "$/h", "model", "zone")),
        Text(),
        fitting(disks, _DISK_COLUMNS, ("GB", "zone", "state")),
        Text(),
        fitting(zones, _ZONE_COLUMNS, ("on-demand runs", "spot price")),
        Text(f"\n{money}"),
    )


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
