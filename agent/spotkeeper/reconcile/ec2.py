"""EC2 behind ``spec.cloud.Cloud``: one look, and one call per action. Decides nothing.

What is ours is known by tag *and* name (the tag ``Name``). A launch says its name, tags, placement and subnet;
everything else comes from the launch template that Pulumi declared. EC2 differs from Compute Engine where it matters
so: names are tags, so a volume is found by its name first; a launch is known by its ``ClientToken`` for a day and
more after its machine is gone, and then is that dead machine (rule 7); a terminated machine is listed for an hour,
which for us is "not there"; a snapshot has no token, so it is looked for before it is made; what was just made may
not be visible yet, so "not found" proves nothing unless it is old.

Sources: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (every request is checked against botocore's model in
the tests); error classes: ``ec2_errors.py``; what IAM must allow: ``ec2_rights.py``.
"""

from __future__ import annotations

import builtins
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from spotkeeper.clock import Clock
from spotkeeper.reconcile import ec2_advice, ec2_wire
from spotkeeper.reconcile.addresses import ENV, LOOPBACK, PRIVATE, Addresses
from spotkeeper.reconcile.ec2_api import Api, RefusedError
from spotkeeper.reconcile.ec2_calls import Calls
from spotkeeper.reconcile.ec2_errors import GONE, classify, detail_of
from spotkeeper.reconcile.ec2_lists import Filters, ListError, Looked, look, pages
from spotkeeper.reconcile.ec2_wire import (
    HOLDING,
    THERE,
    Attachment,
    InstanceIn,
    Instances,
    Reservation,
    SnapshotIn,
    Snapshots,
    VolumeIn,
    Volumes,
    by_tag,
)
from spotkeeper.reconcile.wire import NoAnswerError, is_loopback
from spotkeeper.spec import codec, names
from spotkeeper.spec.cloud import (
    Action,
    AttachDisk,
    Class,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    Listing,
    Result,
    Vm,
)
from spotkeeper.spec.market import Chances, PriceRun
from spotkeeper.spec.stack import StackState

DEVICE = "/dev/sdf"  # no template's own; the agent looks for the volume, not for this name
LOOK_S = 24.0  # a whole look; a round has 50 s
ASKED_AT_ONCE = 200  # values of a filter
OLD_S = 120.0  # what was made so long ago is visible, so if it cannot be found it is gone

T = TypeVar("T")
log = logging.getLogger(__name__)


class Ec2:
    """The cloud of one stack.

    Args:
        stack: what Pulumi declared; names pools, templates, zones, subnets.
        api: where the calls go.
        clock: for the time in results.
        addresses: what its machines may have; by default, private ones.
    """

    def __init__(self, stack: StackState, api: Api, clock: Clock, addresses: Addresses | None = None) -> None:
        self._stack = stack
        self._api, self._calls = api, Calls(api)
        self._clock = clock
        self._addresses = addresses or Addresses()
        self._alive: frozenset[str] = frozenset()  # ids of machines that the last whole look showed
        self._volumes: dict[tuple[str, str], tuple[str, ...]] = {}  # (name, zone) -> ids, as last seen
        self._zone_ids: dict[str, str] = {}  # "use1-az1" -> "us-east-1a", of this account

    # -- looking

    def list(self, stack: str) -> Listing:
        """One look over all zones, by tag. A zone that could not be asked is not in ``answered``.

        One call answers for the whole region; where it fails (an outage of a zone makes it fail), each of the
        stack's zones is asked for itself.
        """
        zones = self._stack.zones()
        ends = time.monotonic() + LOOK_S
        with ThreadPoolExecutor(3) as pool:
            vms = pool.submit(look, self._instances, zones, ends)
            disks = pool.submit(look, self._volumes_in, zones, ends)
            shots = pool.submit(self._snapshots, ends)
            machines, volumes, found = vms.result(), disks.result(), shots.result()
        self._remember(volumes)
        held = _held(volumes.items)
        names_of = {item.instance_id: item.labels.get(ec2_wire.NAME, "") or item.instance_id for item in machines.items}
        answered = machines.answered & volumes.answered
        return Listing(
            vms=_known(
                ec2_wire.to_vm(item, stack, self._addresses, held.get(item.instance_id, ())) for item in machines.items
            ),
            disks=_known(ec2_wire.to_disk(item, stack, names_of) for item in volumes.items),
            snapshots=ec2_wire.to_snapshots(found or (), stack),
            # A snapshot that cannot be seen could be taken for one that must be made again.
            answered=answered if found is not None else frozenset(),
            results=_known(ec2_wire.to_result(item, stack) for item in machines.items),
            ran=_known(ec2_wire.to_ran(item, stack) for item in machines.items),
        )

    def _instances(self, zone: str | None, ends: float) -> builtins.list[InstanceIn]:
        """Terminated ones too: for an hour EC2 says of them that they are dead, and why."""
        items = self._by(self._filters(zone), ends)
        if zone is None:
            items += self._missed({item.instance_id for item in items}, ends)
            self._alive = frozenset(item.instance_id for item in items if item.state.name != ec2_wire.TERMINATED)
        return items

    def _missed(self, seen: set[str], ends: float) -> builtins.list[InstanceIn]:
        """Machines that the look before this one showed and this one does not, asked for by their id.

        What has ended stays listed as terminated; so an absence is most often a look from behind (listings are
        eventually consistent), and would be taken for a loss.
        """
        absent = sorted(self._alive - seen)
        items: builtins.list[InstanceIn] = []
        for first in range(0, len(absent), ASKED_AT_ONCE):
            chosen = [{"Name": "instance-id", "Values": absent[first : first + ASKED_AT_ONCE]}]
            items += self._by(chosen, ends)
        return items

    def _by(self, filters: Filters, ends: float) -> builtins.list[InstanceIn]:
        found = pages(self._api, Instances, filters, ends)
        return [item for page in found for one in page.reservations for item in one.instances]

    def _volumes_in(self, zone: str | None, ends: float) -> builtins.list[VolumeIn]:
        return [item for page in pages(self._api, Volumes, self._filters(zone), ends) for item in page.volumes]

    def _snapshots(self, ends: float, **more: str) -> builtins.list[SnapshotIn] | None:
        """None: not known."""
        try:
            found = pages(self._api, Snapshots, by_tag(self._stack.stack, **more), ends)
        except ListError as error:
            log.warning("snapshots did not answer: %s", error)
            return None
        return [item for page in found for item in page.snapshots]

    def _filters(self, zone: str | None) -> builtins.list[dict[str, object]]:
        return by_tag(self._stack.stack, **({"availability_zone": zone} if zone is not None else {}))

    def _remember(self, volumes: Looked[VolumeIn]) -> None:
        """Names are tags: an id by its name costs a call, but for what has just been listed."""
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for item in volumes.items:
            name = next((tag.value for tag in item.tags if tag.key == ec2_wire.NAME), "")
            if item.state in THERE:
                key = (name, item.availability_zone)
                found[key] = (*found.get(key, ()), item.volume_id)
        self._volumes = found

    def find(self, uid: str, deadline_s: float) -> Vm | None:
        """The machine of this id if it is one of the stack's, also for the hour after its end; None: unknown."""
        try:
            found = self._by([{"Name": "instance-id", "Values": [uid]}], time.monotonic() + deadline_s)
        except ListError as error:
            log.warning("machine %s: %s", uid, error)
            return None
        stack = self._stack.stack
        return next(iter(_known(ec2_wire.to_vm(item, stack, self._addresses, ended=True) for item in found)), None)

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Spot prices of the pool's machine type, by zone; None where the cloud does not tell them."""
        found = self._stack.pool(pool)
        if found is None:
            return None
        try:
            question = ec2_advice.question(found, self._clock.now())
            answer = self._api.call("describe_spot_price_history", deadline_s, question)
        except (NoAnswerError, RefusedError) as error:
            log.warning("prices of pool %s: %s", pool, error)
            return None
        return ec2_advice.price_runs(answer, frozenset(found.zones))

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """``GetSpotPlacementScores`` for all of the pool's machines at once; None: unknown, for whatever reason."""
        found, ends = self._stack.pool(pool), time.monotonic() + deadline_s
        if found is None:
            return None
        try:
            if not self._zone_ids:
                query = {"Filters": ec2_advice.OF_REGION}
                self._zone_ids = ec2_advice.zone_names(self._calls.once("describe_availability_zones", query, ends))
            question = ec2_advice.score_question(found, self._stack.region)
            answer = self._calls.once("get_spot_placement_scores", question, ends)
        except (NoAnswerError, RefusedError) as error:
            log.info("placement scores of pool %s: %s", pool, error)
            return None
        return ec2_advice.chances(answer, self._zone_ids, frozenset(found.zones), self._clock.now())

    # -- doing

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Make one call. Never raises for what a cloud can answer; ACCEPTED means on its way, not done."""
        make: Callable[[float], tuple[Class, str]]
        match action:
            case InsertVm():
                make = partial(self._launch, action)
            case DeleteVm():
                make = partial(self._terminate, action)
            case CreateDisk():
                make = partial(self._create_volume, action)
            case AttachDisk():
                make = partial(self._attach, action)
            case DetachDisk():
                make = partial(self._detach, action)
            case DeleteDisk():
                make = partial(self._delete_volume, action)
            case CreateSnapshot():
                make = partial(self._create_snapshot, action)
            case DeleteSnapshot():
                make = partial(self._delete_snapshot, action)
        try:
            kind, detail = make(time.monotonic() + deadline_s)
        except RefusedError as error:
            kind, detail = classify(error.code, error.status), detail_of(error.code, error.message)
        except (NoAnswerError, ListError) as error:
            kind, detail = Class.AMBIGUOUS, str(error)
        except msgspec.ValidationError as error:
            kind, detail = Class.AMBIGUOUS, f"an answer of another form: {error}"
        return Result(action, kind, detail, self._clock.now())

    def _launch(self, action: InsertVm, ends: float) -> tuple[Class, str]:
        """The token makes it one machine however often it is asked for; what it is now says if it is used up."""
        pool = self._stack.pool(action.pool)
        if pool is None or not pool.templates.get(action.model.value):
            return Class.PERMANENT, f"pool {action.pool!r} has no {action.model.value} template"
        answer = self._calls.again("run_instances", ec2_wire.launch(self._stack, pool, action), ends)
        made = codec.convert(answer, Reservation).instances
        if len(made) != 1:
            return Class.AMBIGUOUS, f"{len(made)} machines for one"
        return self._launched(made[0], ends)

    def _launched(self, made: InstanceIn, ends: float) -> tuple[Class, str]:
        if self._is_old(made.launch_time):
            query: dict[str, object] = {"InstanceIds": [made.instance_id]}
            try:
                found = codec.convert(self._calls.once("describe_instances", query, ends), Instances)
            except RefusedError as error:
                if error.code in GONE:
                    return Class.DEAD_KEY, f"the token's {made.instance_id} is gone"
                raise
            made = next((item for one in found.reservations for item in one.instances), made)
        if made.state.name in (ec2_wire.TERMINATED, "shutting-down"):
            return Class.DEAD_KEY, f"the token's {made.instance_id} is {made.state.name}"
        return Class.ACCEPTED, made.instance_id

    def _terminate(self, action: DeleteVm, ends: float) -> tuple[Class, str]:
        return self._calls.gone("terminate_instances", {"InstanceIds": [action.uid]}, ends)

    def _create_volume(self, action: CreateDisk, ends: float) -> tuple[Class, str]:
        pool = self._stack.pool(action.pool)
        if pool is None:
            return Class.PERMANENT, f"no pool {action.pool!r} in the stack"
        source = None
        if action.snapshot is not None:
            shots = self._shots(action.snapshot, ends)
            if not shots:
                return Class.AMBIGUOUS, f"the snapshot {action.snapshot} is not there, or not visible yet"
            source = shots[0].snapshot_id
        try:
            answer = self._calls.again("create_volume", ec2_wire.volume(self._stack, pool, action, source), ends)
        except RefusedError as error:
            # Its pool was declared anew since it was made: it may be there, with data, and only not have been listed.
            name = names.disk_name(self._stack.stack, action.job, action.rank, action.number)
            if classify(error.code, error.status) is Class.DEAD_KEY and self._found(name, action.zone, ends):
                return Class.ACCEPTED, "is there already"
            raise
        return self._created(codec.convert(answer, VolumeIn), ends)

    def _created(self, made: VolumeIn, ends: float) -> tuple[Class, str]:
        """A disk holds data, so its number is burnt for a proof only: it has failed, or is old and not there."""
        if self._is_old(made.create_time):
            try:
                found = codec.convert(
                    self._calls.once("describe_volumes", {"VolumeIds": [made.volume_id]}, ends), Volumes
                )
            except RefusedError as error:
                if error.code in GONE:
                    return Class.DEAD_KEY, f"the token's {made.volume_id} is gone"
                raise
            made = next(iter(found.volumes), made)
        if made.state == "error":
            self._calls.gone("delete_volume", {"VolumeId": made.volume_id}, ends)
        if made.state not in THERE:
            return Class.DEAD_KEY, f"the token's {made.volume_id} is {made.state}"
        return Class.ACCEPTED, made.volume_id

    def _attach(self, action: AttachDisk, ends: float) -> tuple[Class, str]:
        found = self._ids(action.disk, action.zone, ends)
        if not found:
            return Class.IN_USE, f"{action.disk} is not there, or not visible yet"
        query = {"VolumeId": found[0], "InstanceId": action.vm_uid, "Device": DEVICE}
        self._calls.once("attach_volume", query, ends)
        return Class.ACCEPTED, ""

    def _detach(self, action: DetachDisk, ends: float) -> tuple[Class, str]:
        """Never by force: that leaves the machine writing to what another one may mount."""
        for found in self._ids(action.disk, action.zone, ends):
            try:
                self._calls.once("detach_volume", {"VolumeId": found, "InstanceId": action.vm_uid}, ends)
            except RefusedError as error:
                if error.code not in (*GONE, "IncorrectState", "InvalidAttachment.NotFound"):
                    raise
                return Class.ACCEPTED, "was not attached"
        return Class.ACCEPTED, ""

    def _delete_volume(self, action: DeleteDisk, ends: float) -> tuple[Class, str]:
        for found in self._ids(action.disk, action.zone, ends):
            self._calls.gone("delete_volume", {"VolumeId": found}, ends)
        return Class.ACCEPTED, ""

    def _create_snapshot(self, action: CreateSnapshot, ends: float) -> tuple[Class, str]:
        stack = self._stack.stack
        for shot in self._shots(names.disk_name(stack, action.job, action.rank, action.copy), ends, failed=True):
            if shot.state != "error":
                return Class.ACCEPTED, "is there already"
            self._calls.gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        source = names.disk_name(stack, action.job, action.rank, action.number)
        found = self._ids(source, action.zone, ends)
        if not found:
            return Class.IN_USE, f"{source} is not there, or not visible yet"
        self._calls.once("create_snapshot", ec2_wire.snapshot_of(stack, action, found[0]), ends)
        return Class.ACCEPTED, ""

    def _delete_snapshot(self, action: DeleteSnapshot, ends: float) -> tuple[Class, str]:
        for shot in self._shots(action.name, ends, failed=True):
            self._calls.gone("delete_snapshot", {"SnapshotId": shot.snapshot_id}, ends)
        return Class.ACCEPTED, ""

    # -- by name

    def _ids(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        """Of the volumes of this name (one, unless somebody meddled), as listed last, else as asked for now."""
        return self._volumes.get((name, zone)) or self._found(name, zone, ends)

    def _found(self, name: str, zone: str, ends: float) -> tuple[str, ...]:
        query = by_tag(self._stack.stack, Name=name, availability_zone=zone)
        found = pages(self._api, Volumes, query, ends)
        return tuple(item.volume_id for page in found for item in page.volumes if item.state in THERE)

    def _shots(self, name: str, ends: float, failed: bool = False) -> builtins.list[SnapshotIn]:
        """Snapshots of this name, the first first. ``failed``: also those that came to nothing.

        Raises:
            NoAnswerError: they could not be asked for.
        """
        found = self._snapshots(ends, Name=name)
        if found is None:
            raise NoAnswerError(f"snapshots named {name}")
        return sorted((item for item in found if failed or item.state != "error"), key=lambda item: item.age)

    def _is_old(self, made: datetime | None) -> bool:
        return made is not None and self._clock.now() - made.timestamp() > OLD_S


def open_ec2(stack: StackState, clock: Clock, endpoint: str | None = None) -> Ec2:
    """The stack's cloud with this process's identity.

    Args:
        endpoint: root of the EC2 API; None: as the environment says (``AWS_ENDPOINT_URL``), else AWS's.
    """
    named = endpoint or os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL") or ""
    here = is_loopback(urlsplit(named).hostname or "")  # then its machines are on this one
    addresses = Addresses(os.environ.get(ENV) or (f"{PRIVATE},{LOOPBACK}" if here else PRIVATE))
    return Ec2(stack, Api(stack.region, endpoint), clock, addresses)


def _known(found: Iterable[T | None]) -> tuple[T, ...]:
    return tuple(one for one in found if one is not None)


def _held(volumes: Iterable[VolumeIn]) -> dict[str, tuple[str, ...]]:
    """Names of the disks that a machine holds, by its id."""
    out: dict[str, tuple[str, ...]] = {}
    for item in volumes:
        name = next((tag.value for tag in item.tags if tag.key == ec2_wire.NAME), "")
        for one in filter(_holds, item.attachments):
            out[one.instance_id] = (*out.get(one.instance_id, ()), name)
    return out


def _holds(attachment: Attachment) -> bool:
    return attachment.state in HOLDING
