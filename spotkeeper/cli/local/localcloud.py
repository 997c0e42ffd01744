"""``local``: starts, inspects, disturbs and ends the one-machine cloud and its stack ``local``."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.cli.output import agree, emit, note, result_console, say, waiting
from spotkeeper.cli.stack import note_upkeep
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import (
    FOLDER,
    LOCAL,
    SCALE,
    STACK,
    STACK_FILE,
    Target,
    attach,
    folder_option,
    local_folder,
    local_target,
    named,
    named_folder,
)
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Record
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.lines import title

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotkeeper.local.core.views import Status
    from spotkeeper.local.deploy import DeployResult
    from spotkeeper.local.lifecycle.cloud import LocalCloud

DEPLOYMENT = "deploy"  # folder of the deployment's state, below the cloud's folder
_VM_COLUMNS = ("VM", "state", "zone", "model", "machine", "address", "$/h")
_DISK_COLUMNS = ("disk", "state", "zone", "GB", "used by")
_ZONE_COLUMNS = ("zone", "spot runs", "spot fits", "on-demand runs", "spot price")
MAX_SCALE = 120.0  # a notice of 120 s is then one real second, and a tick comes every half second


class UpResult(Struct, frozen=True):
    """The result of ``local up``, as ``--json`` prints it."""

    folder: str
    endpoint: str
    stack: str
    engine: str  # "pulumi" or "in-process"
    changes: dict[str, int]  # number of resources by operation


class Changed(Struct, frozen=True):
    """The result of a command that only changes something, as ``--json`` prints it."""

    what: str


@contextmanager
def failures(remedy: str = "fix the error, then run spotkeeper local up again") -> Iterator[None]:
    """Turn errors of the cloud into :class:`CliError`. ``remedy``: advice if the stack could not be changed."""
    from spotkeeper.local.deploy import DeployError
    from spotkeeper.local.lifecycle.folder import BusyError, LocalCloudError

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


@dataclass(frozen=True)
class UpOptions:
    """Options of ``local up``. ``stack_file``: None for the file of the last ``up``, else the shipped file."""

    scale: float = SCALE
    seed: int = 0
    stack_file: Path | None = None
    verbose: bool = False
    as_json: bool = False


def up(folder: Path, options: UpOptions) -> None:
    from spotkeeper.local.lifecycle.cloud import LocalCloud
    from spotkeeper.local.lifecycle.folder import only_one

    _check(options)
    folder = (named_folder() or folder if folder == LOCAL else folder).resolve()
    interrupted = _halfway(folder, "partly up", "spotkeeper local up {}", "to end it: spotkeeper local down --yes {}")
    with (
        failures(_remedy(options, folder)),
        only_one(folder, "spotkeeper local up", "choose another folder with --folder"),
        interrupted,
    ):
        zones = _zones(folder, options.stack_file)
        cloud = LocalCloud.up(folder, scale=options.scale, seed=options.seed, zones=zones)
        if lacking := [zone for zone in zones if zone not in cloud.config.zones]:
            why = f"this cloud has no {' and no '.join(lacking)}, since it was made for another stack file"
            raise CliError(why, Exit.REFUSED, "start it anew: spotkeeper local down, then spotkeeper local up")
        if not cloud.fresh and options.scale not in (SCALE, cloud.clock.scale):
            remedy = "run spotkeeper local down first"
            note(f"--scale {options.scale:g} is ignored, since this cloud already runs: {remedy}")
        if not options.as_json:
            state, scale = "runs" if cloud.fresh else "ran already", cloud.clock.scale
            note(f"a cloud {state} in {cloud.folder}; its clock is {scale:g} times as fast as real time")
        done = _deployed(cloud, options)
    if (named_folder() or local_folder(Path.cwd()) or Path()).resolve() != cloud.folder:
        note(f"so that other commands find this cloud:  export {FOLDER}={shlex.quote(str(cloud.folder))}")
    if cloud.fresh and not options.as_json:
        note(f"next:  spotkeeper submit {_example()} --watch")
    if options.as_json:
        changes = {op.value: count for op, count in done.changes.items()}
        emit(UpResult(str(cloud.folder), cloud.endpoint, STACK, done.engine, changes), True, "")


def _remedy(options: UpOptions, folder: Path) -> str:
    """Return what to do if the stack cannot be brought up. Errors name ``Pulumi.local.yaml`` for every file."""
    runs = f"the cloud in {folder} runs; to end it: spotkeeper local down --yes {folder_option(folder)}".rstrip()
    if options.stack_file is None:
        return f"fix the error, then run spotkeeper local up again; {runs}"
    file = shlex.quote(str(options.stack_file))
    return f"fix the error in {file}, then run spotkeeper local up --stack-file {file} again (it reads a copy); {runs}"


def _check(options: UpOptions) -> None:
    """Raise CliError if an option of ``local up`` is out of range or a file is missing, SpecError if it is invalid."""
    if options.scale > MAX_SCALE:
        why = f"at {MAX_SCALE:g} a notice of 120 s is one real second, and a job needs that to save"
        raise CliError(f"scale {options.scale:g}: must be at most {MAX_SCALE:g}; {why}", Exit.USAGE)
    if options.stack_file is not None and not options.stack_file.is_file():
        raise CliError(f"{options.stack_file}: no such stack file", Exit.USAGE, f"start from a copy of {STACK_FILE}")
    if options.stack_file is not None:
        from spotkeeper.cli.stacks.stackfile import check_for_local

        check_for_local(options.stack_file)


def _deployed(cloud: LocalCloud, options: UpOptions) -> DeployResult:
    """Deploy the stack and print a summary of its resources; with ``--verbose``, a line for each."""
    from spotkeeper.local import deploy
    from spotkeeper.local.deploy.result import Printer, summary, totals

    where = cloud.folder / DEPLOYMENT
    with _environment(cloud):
        if options.stack_file is not None:
            deploy.refuse_first(STACK, options.stack_file, _stack_file(cloud, None), cloud, where)
        file = _stack_file(cloud, options.stack_file)
        if options.as_json:
            return deploy.up(STACK, file, cloud, where)
        if options.verbose:
            done = deploy.up(STACK, file, cloud, where, Printer(result_console()))
            summary(done, result_console())
            return done
        with waiting(f"bringing up the stack {STACK}, about 20 s ..."):
            done = deploy.up(STACK, file, cloud, where)
    say(f"the stack {STACK} is up, its resources: {totals(done.changes)} (--verbose lists them)")
    return done


def _stack_file(cloud: LocalCloud, given: Path | None) -> Path:
    """Return the stack file of this cloud. A given file is copied to the cloud's folder, for later commands."""
    kept = cloud.folder / STACK_FILE.name
    if given is not None:
        kept.write_bytes(given.read_bytes())
    return kept if kept.exists() else STACK_FILE


def _zones(folder: Path, given: Path | None) -> tuple[str, ...]:
    """Return the zones that the cloud needs for the given stack file, or for the one that it kept."""
    from spotkeeper.local.deploy.config import zones_for

    kept = folder / STACK_FILE.name
    return zones_for(given or (kept if kept.exists() else STACK_FILE))


def _example() -> str:
    found = STACK_FILE.parents[2] / "examples" / "gpt" / "job.yaml"
    if not found.is_file():
        return "JOB.YAML"
    here = Path.cwd()
    return shlex.quote(str(found.relative_to(here) if found.is_relative_to(here) else found))


@contextmanager
def _environment(cloud: LocalCloud) -> Iterator[None]:
    """Set the environment so that jobs of the stack file (``jobs:``) are submitted to this cloud."""
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


def down(folder: Path, *, yes: bool = False, force: bool = False, verbose: bool = False, as_json: bool) -> None:
    from spotkeeper.local import deploy
    from spotkeeper.local.deploy.result import Printer
    from spotkeeper.local.lifecycle.cloud import LocalCloud
    from spotkeeper.reconcile.store.objects import StoreError

    if force:
        _end_by_force(named(folder), as_json)
        return
    folder = attach(folder).folder
    here = folder_option(folder)
    remedy = f"end it by force: spotkeeper local down --force {here}"
    with failures(remedy), _alone(folder):
        if not yes:
            try:
                agree_to_lose(local_target(folder), f"spotkeeper local down --yes {here}")
            except StoreError as error:
                raise CliError(f"the bucket: {error}", Exit.FAILED, remedy) from None
        with _halfway(folder, "partly down", "spotkeeper local down --yes {}", "to keep it: spotkeeper local up {}"):
            cloud = LocalCloud.up(folder)  # the drain of the stack needs a running control plane
            printer = (Printer(result_console()),) if verbose and not as_json else ()
            shown = contextlib.nullcontext() if printer or as_json else waiting(f"destroying the stack {STACK} ...")
            with _environment(cloud), shown:
                deploy.destroy(STACK, _stack_file(cloud, None), cloud, cloud.folder / DEPLOYMENT, *printer)
            left = cloud.down(purge=True)
    if left:
        emit(left, as_json, "")
        words = f"{left.vms} VMs, {left.disks} disks, {left.processes} processes"
        raise CliError(f"left over and now ended by force: {words}", Exit.FAILED)
    emit(left, as_json, "the cloud is down; no VM, disk or process is left")


def agree_to_lose(target: Target, yes: str) -> None:
    """Name the jobs that lose their checkpoints with the cloud, and ask at the terminal whether to destroy it.

    Does nothing if no job would lose its checkpoints.

    Args:
        yes: the command that destroys the cloud without asking, for the error.

    Raises:
        CliError: the loss was declined, or this process has no terminal to ask at.
        StoreError: the bucket cannot be read.
    """
    lost = list(losers(target))
    if not lost:
        return
    what = "the checkpoints of these unfinished jobs are deleted with the cloud:\n" + "\n".join(lost)
    agree(what, "Destroy all of it?", yes)


def losers(target: Target) -> Iterator[str]:
    """Yield a line for each job whose checkpoints a user may still want, and for each unreadable record.

    These are the unfinished jobs whose cancellation has not been requested; the end of the cloud deletes their
    checkpoints.
    """
    store = target.store()
    found = lookup.all_jobs(store, finished=False)
    for record in found.records:
        if not _ends(store, record):
            view = lookup.view_of(store, record, None, target.clock.now())
            yield f"  {title(view)}, " + (f"step {view.step}" if view.step is not None else "no step reported yet")
    yield from (f"  {one.job}: its record cannot be read" for one in found.unreadable)


def _ends(store: Store, record: Record) -> bool:
    over = record.over
    return over or any(ask.kind is RequestKind.CANCEL for ask in store.list_requests(record.job))


@contextmanager
def _halfway(folder: Path, state: str, go_on: str, back: str) -> Iterator[None]:
    """If Ctrl-C interrupts the block, print which VMs and disks exist, and how to complete or undo the block's work.

    ``state``: the state in which the interruption leaves the cloud, such as "partly up". ``go_on``, ``back``: the
    commands that complete and undo the work, with ``{}`` in place of the ``--folder`` option.
    """
    from spotkeeper.local.lifecycle.cloud import LocalCloud
    from spotkeeper.local.lifecycle.folder import LocalCloudError
    from spotkeeper.report.text.words import count

    try:
        yield
    except KeyboardInterrupt:
        here = folder_option(folder)
        try:
            left = LocalCloud.attach(folder).left_over()
        except LocalCloudError:
            note(f"\nthe cloud in {folder} is {state}" if state != "partly up" else "\nno cloud was started")
        else:
            what = f"{count(left.vms, 'VM')} and {count(left.disks, 'disk')} exist"
            note(f"\nthe cloud in {folder} is {state}: {what}\n  try: {go_on.format(here)}, or {back.format(here)}")
        raise


def _end_by_force(folder: Path, as_json: bool) -> None:
    from spotkeeper.local.lifecycle.cloud import force_cleanup

    _cloud_unless_damaged(folder)
    with failures(), _alone(folder):
        cloud = _cloud_unless_damaged(folder)  # another command may have ended it meanwhile
        ended = cloud.down(purge=True) if cloud is not None else force_cleanup(folder)
    emit(ended, as_json, "the cloud was ended by force; no VM, disk or process is left")


def _cloud_unless_damaged(folder: Path) -> LocalCloud | None:
    """Return the cloud in ``folder``; None if it is damaged; CliError if there is none."""
    from spotkeeper.local.lifecycle.cloud import LocalCloud
    from spotkeeper.local.lifecycle.folder import DamagedError, LocalCloudError

    try:
        return LocalCloud.attach(folder)
    except DamagedError:
        return None
    except LocalCloudError as error:
        raise CliError(str(error), Exit.MISSING) from None


def _alone(folder: Path) -> AbstractContextManager[None]:
    from spotkeeper.local.lifecycle.folder import only_one

    return only_one(folder, "spotkeeper local down", "look at it: spotkeeper local status")


def status(folder: Path, *, as_json: bool) -> None:
    note_upkeep(folder)
    with failures():
        found = attach(folder).status()
    emit(found, as_json, tables(found))


def tables(found: Status) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from spotkeeper.report.text.render import fitting
    from spotkeeper.report.text.words import percent

    vms = (
        {
            "VM": vm.name,
            "state": vm.status.lower() + (", preempted" if vm.preempted else ", notice" if vm.notice_until else ""),
            "zone": vm.zone,
            "model": vm.model,
            "machine": vm.machine,
            "address": vm.address,
            "$/h": f"{vm.price:.2f}",
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
            "spot price": f"{percent(zone.spot_price_share)} of on-demand",
        }
        for zone in found.zones
    )
    uses = ((one, f"{one.used} of {one.count} x {one.machine} used") for one in found.reservations)
    reserved = [Text(f"\nreservation {one.name} in {one.zone}: {use}") for one, use in uses]
    money = f"billed ${found.bill.spent:.2f}; the same hours cost ${found.bill.on_demand_only:.2f} on-demand"
    return Group(
        fitting(vms, ("address", "machine", "$/h", "model", "zone"), columns=_VM_COLUMNS),
        Text(),
        fitting(disks, ("GB", "zone", "state"), columns=_DISK_COLUMNS),
        Text(),
        fitting(zones, ("on-demand runs", "spot price"), columns=_ZONE_COLUMNS),
        *reserved,
        Text(f"\n{money}"),
    )


def preempt(folder: Path, vm: str, *, notice: bool, as_json: bool) -> None:
    with failures():
        attach(folder).preempt(vm, notice=notice)
    what = f"{vm}: {'notice given' if notice else 'deleted without notice'}"
    emit(Changed(what), as_json, what)


def capacity(folder: Path, zone: str, nodes: str, *, as_json: bool) -> None:
    if nodes != "market" and not (nodes.isdecimal() and len(nodes) < 10):
        raise CliError(f"{nodes[:40]}: must be a number of spot VMs, or the word market", Exit.USAGE)
    count = None if nodes == "market" else int(nodes)
    with failures():
        attach(folder).set_capacity(zone, count)
    what = f"{zone}: " + ("capacity as recorded" if count is None else f"capacity for {count} spot VMs")
    emit(Changed(what), as_json, what)
