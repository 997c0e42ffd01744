"""EC2 under virtual time: the shipped adapter, botocore and the strict stand-in behind ``contract.cloud.Cloud``.

What the stand-in holds is told to the world, which boots agents on it and judges what is asked of it, as
``cloud.py`` does for Compute Engine. Each process of the function has an adapter of its own (:class:`Seat`), whose
memory dies with it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    Action,
    CreateSnapshot,
    DeleteDisk,
    DeleteVm,
    DetachDisk,
    Disk,
    InsertVm,
    Listing,
    Result,
    ResultKind,
    Vm,
    VmStatus,
)
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.stack import Model, StackState, template_key
from spotkeeper.reconcile.clouds.ec2.cloud import Ec2
from tests.reconcile.clouds.ec2.standin import site, things
from tests.reconcile.clouds.ec2.standin.server import Here
from tests.reconcile.clouds.ec2.standin.site import Site, Watcher
from tests.reconcile.clouds.ec2.standin.things import OWNER, Reserved, Template, Vol, Volume
from tests.reconcile.clouds.ec2.standin.verbs import Ec2Service
from tests.sim.cloud import DIFFERENCE_GB, DISK_GB, Cloud, Commit, Delays, Drive, Machine, Transferred

if TYPE_CHECKING:
    from tests.sim.world import World

MARKET = ("Server.SpotInstanceTermination", "Spot instance termination")
BLOCK_ENDED = ("Server.CapacityBlockEnded", "Capacity Block ended")
ITSELF = ("Client.InstanceInitiatedShutdown", "Instance initiated shutdown")


def on_ec2(stack: StackState) -> StackState:
    """The same stack, declared on AWS."""
    models = {"spot": "spot", "on-demand": "od"}
    keys = {
        template_key(model, region, stack.region): f"lt-{{}}-{region}-{short}"
        for region in stack.regions or (stack.region,)
        for model, short in models.items()
    }
    pools = tuple(
        replace(
            pool,
            disk_type="gp3",
            templates={key: template.format(pool.name) for key, template in keys.items()},
            template_versions=dict.fromkeys(keys, "1"),
            subnets={zone: f"subnet-{zone}" for zone in pool.zones},
            placement={zone: f"{pool.name}-{zone}" for zone in pool.zones},
            tags={"sk-bucket": stack.bucket},
        )
        for pool in stack.pools
    )
    return replace(stack, cloud="aws", project=OWNER, pools=pools)


class VolumeDrive(Drive):
    """A drive that is a volume of the stand-in's; what is committed on it is the volume's content."""

    def __init__(self, volume: Volume, owned: names.Owned) -> None:
        self.volume, self.owned = volume, owned

    @property
    def disk(self) -> Disk:  # type: ignore[override]
        ready = self.volume.state is not Vol.CREATING
        name = self.volume.tags["Name"]
        return Disk(name, self.volume.zone, self.owned.job, self.owned.node, self.owned.number, (), ready)

    @property
    def user(self) -> str | None:  # type: ignore[override]
        return self.volume.holder or None

    @property
    def newest(self) -> Commit | None:  # type: ignore[override]
        return self.volume.contents  # type: ignore[return-value]

    @newest.setter
    def newest(self, commit: Commit | None) -> None:
        self.volume.contents = commit


class Ec2Cloud(Cloud):
    """``machines``, ``drives`` and ``shots`` follow what the stand-in does."""

    def __init__(self, world: World, random: Random, delays: Delays) -> None:
        super().__init__(world, random, delays)
        stack = world.stack
        self.sites = {region: self._site(region, delays) for region in stack.regions or (stack.region,)}
        self.site = self.sites[stack.region]  # the home region
        for region, one in self.sites.items():
            one.abroad = {name: other for name, other in self.sites.items() if name != region}
        self.services = {region: Ec2Service(one) for region, one in self.sites.items()}
        self.service = self.services[stack.region]
        for pool in stack.pools:
            for one in pool.reservations:
                self.site.reserved[one.name] = Reserved(one.name, one.zone, "m5.large", one.count, one.block)
                if one.block and one.ends is not None:
                    world.engine.at(one.ends, partial(self._block_ends, one.name))

    def _site(self, region: str, delays: Delays) -> Site:
        world, stack, several = self.world, self.world.stack, bool(self.world.stack.regions)
        zones = [zone for zone in stack.zones() if stack.region_of(zone) == region]
        ids = {zone: f"use1-az{n}" for n, zone in enumerate(zones, 1)}
        times = site.Delays((1.0, 6.0), delays.start_s, delays.gone_s, delays.disk_s, delays.attach_s, delays.shot_s)
        made = Site(world.engine, ids, self.random.getrandbits(32), times, region if several else "")
        made.subnets = {f"subnet-{zone}": zone for zone in zones}
        plain = {"InstanceType": "m5.large"}
        data = {"spot": {**plain, "InstanceMarketOptions": {"MarketType": "spot"}}, "on-demand": plain}
        for pool in stack.pools:
            for model, what in data.items():
                template = pool.templates[template_key(model, region, stack.region)]
                made.templates[template] = Template(template, {"1": what})
            made.groups |= {group for zone, group in pool.placement.items() if zone in zones}
        made.market.capacity = lambda zone, spot: self.limit(zone, Model.SPOT if spot else Model.ON_DEMAND)
        made.written, made.rewritten = int(DISK_GB), int(DIFFERENCE_GB)
        made.watcher = _Told(self)
        return made

    def _of(self, uid: str) -> tuple[Site, things.Instance] | None:
        """The instance with this id, and its region."""
        found = ((one, one.instances[uid]) for one in self.sites.values() if uid in one.instances)
        return next(found, None)

    def _block_ends(self, name: str) -> None:
        """EC2 terminates what still runs in a capacity block, and takes no more launches into it."""
        self.site.reserved[name] = dataclasses.replace(self.site.reserved[name], active=False)
        for instance in list(self.site.instances.values()):
            if instance.reservation is not None and instance.reservation.id == name:
                self.site.stop(instance, BLOCK_ENDED)

    def process(self) -> Seat:
        return Seat(self)

    # -- what the world does to machines

    def preempt(self, machine: Machine, notice_s: float) -> None:
        super().preempt(machine, notice_s)
        if found := self._of(machine.uid):
            found[1].notice = machine.notice

    def reprieve(self, machine: Machine) -> None:
        super().reprieve(machine)
        if found := self._of(machine.uid):
            found[1].notice = None

    def stopping(self, machine: Machine, seconds: float) -> None:
        if found := self._of(machine.uid):
            found[0].stop(found[1], MARKET if machine.fate == "market" else ITSELF, seconds)

    def remove(self, machine: Machine) -> None:
        if found := self._of(machine.uid):
            found[1].reason = MARKET
            found[0].end(found[1])

    def gone(self, machine: Machine) -> None:
        super().remove(machine)

    # -- what is asked of it

    def judge(self, action: Action) -> None:
        """S2, S3, S7 and S10, before the call is carried out."""
        checks, stack = self.world.checks, self.world.stack.stack
        match action:
            case InsertVm():
                checks.insert(action)
            case DeleteVm():
                machine = self.machines.get(action.uid)
                if machine is not None:
                    checks.delete(machine)
            case DetachDisk():
                for drive in self._named(action.disk, action.zone):
                    if drive.user == action.vm_uid:
                        checks.detach(drive)
            case DeleteDisk():
                for drive in self._named(action.disk, action.zone):
                    if drive.user is None:
                        checks.delete_disk(drive)
            case CreateSnapshot():
                name = names.disk_name(stack, action.job, action.node, action.number)
                for drive in self._named(name, action.zone):
                    if drive.user is not None and not action.region:
                        self.world.violate("S2", f"a snapshot of {name} while {drive.user} holds it: stale at once")

    def _named(self, name: str, zone: str) -> list[Drive]:
        return [drive for drive in self.drives.values() if (drive.disk.name, drive.disk.zone) == (name, zone)]

    @property
    def transfers(self) -> list[Transferred]:  # type: ignore[override]
        return [Transferred(*one) for site in self.sites.values() for one in site.copied]

    @transfers.setter
    def transfers(self, none: list[Transferred]) -> None:
        """The stand-in has them."""

    def sound(self) -> None:
        faults = [fault for service in self.services.values() for fault in service.faults]
        assert not faults, faults

    def looked(self, listing: Listing) -> None:
        self._listing = listing


class Seat:
    """The cloud as one process of the function has it."""

    def __init__(self, cloud: Ec2Cloud) -> None:
        self._cloud, world = cloud, cloud.world
        # botocore refuses to sign for a region whose name is none.
        lines = {name: Here(service, f"{name}-east-1") for name, service in cloud.services.items()}
        self._ec2 = Ec2(world.stack, lines, world.engine)  # type: ignore[arg-type]
        self._seen: tuple[int, Listing] | None = None

    def list(self, stack: str) -> Listing:
        """Cached until something changes; a stale view serves an earlier one."""
        cloud = self._cloud
        cloud.looks += 1
        if cloud.looks == cloud.stale_at and cloud.versions:
            return cloud.versions[-min(cloud.stale_by, len(cloud.versions))]
        if self._seen is None or self._seen[0] != cloud.changes:
            changes = cloud.changes
            listing = self._ec2.list(stack)
            cloud.sound()
            if not listing.answered:  # asked too much: the next look may get more
                return listing
            self._seen = changes, listing
        cloud.looked(self._seen[1])
        return self._seen[1]

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        return None

    def perform(self, action: Action, deadline_s: float) -> Result:
        cloud = self._cloud
        cloud.calls += 1
        cloud.judge(action)
        result = self._ec2.perform(action, deadline_s)
        cloud.sound()
        cloud.refusals += result.kind is ResultKind.CAPACITY
        return result


class _Told(Watcher):
    """Carries the stand-in's news into the world."""

    def __init__(self, cloud: Ec2Cloud) -> None:
        self.cloud = cloud

    def launched(self, instance: things.Instance) -> None:
        cloud, tags = self.cloud, instance.tags
        vm = Vm(
            name=tags["Name"],
            uid=instance.id,
            zone=instance.zone,
            status=VmStatus.PENDING,
            pool=tags[names.LABEL_POOL],
            job=tags[names.LABEL_JOB],
            node=int(tags[names.LABEL_NODE]),
            attempt=int(tags[names.LABEL_ATTEMPT]),
            address=instance.address,
            model=Model.SPOT if instance.spot else Model.RESERVED if instance.reservation else Model.ON_DEMAND,
            created=instance.launched,
        )
        cloud.machines[instance.id] = Machine(vm, instance.token, cloud._id())
        cloud.launches += 1
        cloud.world.meter.launched = True

    def running(self, instance: things.Instance) -> None:
        if instance.id in self.cloud.machines:
            self.cloud._running(self.cloud.machines[instance.id])

    def stopping(self, instance: things.Instance, seconds: float) -> None:
        machine = self.cloud.machines.get(instance.id)
        if machine is not None:
            machine.vm = replace(machine.vm, status=VmStatus.STOPPING)
            if machine.agent is not None:
                machine.agent.going_down(self.cloud.world.engine.t + seconds)

    def ending(self, instance: things.Instance) -> None:
        """What it has written until now was written while it had its disk."""
        machine = self.cloud.machines.get(instance.id)
        if machine is not None and machine.agent is not None and machine.agent.gang is not None:
            machine.agent.gang.settle()

    def gone(self, instance: things.Instance) -> None:
        machine = self.cloud.machines.get(instance.id)
        if machine is not None:
            self.cloud.gone(machine)

    def made(self, thing: Volume | things.Snapshot) -> None:
        owned = names.parse_disk_name(thing.tags["Name"])
        assert owned is not None
        if isinstance(thing, Volume):
            sources = [
                one.snapshots[thing.snapshot] for one in self.cloud.sites.values() if thing.snapshot in one.snapshots
            ]
            if any(source.torn for source in sources):
                self.cloud.world.violate("S2", f"{thing.tags['Name']} is made of a snapshot of a disk that was written")
            self.cloud.drives[thing.id, thing.zone] = VolumeDrive(thing, owned)
        else:
            self.cloud.shots[thing.tags["Name"] + "/" + thing.id] = None  # type: ignore[assignment]

    def dropped(self, thing: Volume | things.Snapshot) -> None:
        if isinstance(thing, Volume):
            del self.cloud.drives[thing.id, thing.zone]
        else:
            del self.cloud.shots[thing.tags["Name"] + "/" + thing.id]

    def attached(self, volume: Volume) -> None:
        machine = self.cloud.machines.get(volume.holder)
        if machine is not None and machine.agent is not None:
            machine.agent.disk_there()

    def changed(self) -> None:
        self.cloud.changes += 1
        self.cloud.changed()
