"""The parts of the control plane, wired together once. No behaviour but the wiring."""

from __future__ import annotations

from spotkeeper.local.advice import Advice
from spotkeeper.local.attachments import Attachments
from spotkeeper.local.bill import Billing
from spotkeeper.local.build import InstanceBuilder
from spotkeeper.local.disks import Disks
from spotkeeper.local.events import Events
from spotkeeper.local.functions import Functions
from spotkeeper.local.host import Host
from spotkeeper.local.instances import Instances
from spotkeeper.local.operations import OpDoc, Operations
from spotkeeper.local.paths import Ref
from spotkeeper.local.policies import Policies
from spotkeeper.local.power import Power
from spotkeeper.local.resources import Resources
from spotkeeper.local.schedule import Schedule
from spotkeeper.local.spot import Spot
from spotkeeper.local.storage import Buckets
from spotkeeper.local.stored import Storeroom
from spotkeeper.local.tokens import Tokens
from spotkeeper.local.vm import Machines
from spotkeeper.local.world import World


class Parts:
    def __init__(self, world: World) -> None:
        self.world = world
        self.host = Host(world)
        self.tokens = Tokens(world.folder)
        self.operations = Operations(world)
        self.policies = Policies(world)
        self.storeroom = Storeroom(world, self.operations, self.policies)
        self.disks = Disks(world, self.operations, self.host)
        self.billing = Billing(world)
        self.advice = Advice(world)
        builder = InstanceBuilder(world, self.storeroom, self.disks)
        self.machines = Machines(world)
        self.attachments = Attachments(world, self.operations, self.disks, self.host, self.machines)
        self.power = Power(world, self.operations, self.host, self.billing, self.machines, self.attachments)
        self.instances = Instances(world, self.operations, builder, self.machines, self.attachments, self.power)
        self.instances.capacity = self.spot = Spot(world, self.machines, self.power)
        self.resources = Resources(world)
        self.buckets = Buckets(world, self.resources)
        self.functions = Functions(world, self.resources, self.host, self.buckets.read)
        self.schedule = Schedule(world, self.resources, self.tokens)
        self.events = Events(world, self.resources, self.tokens)
        self.power.on_preempted = self.events.preempted
        self.operations.register("simulateMaintenanceEvent", self._begin_simulate, lambda _: None)

    def simulate(self, ref: Ref, request_id: str | None) -> OpDoc:
        """The provider's own drill: a spot VM is really preempted, as in the cloud."""
        vm = self.machines.get(ref)
        return self.operations.start("simulateMaintenanceEvent", vm.ref, vm.id, request_id)

    def _begin_simulate(self, op: OpDoc) -> float | None:
        vm = self.machines.find(op.target)
        if vm is not None and vm.spot:
            self.power.preempt(vm)
        return self.world.timing.quick_s
