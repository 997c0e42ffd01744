"""Builds the parts of the control plane and connects them."""

from __future__ import annotations

from spotkeeper.local.access.auth import Tokens
from spotkeeper.local.access.iam import Policies, ProjectIam
from spotkeeper.local.bucket.storage import Buckets
from spotkeeper.local.compute.attachments import Attachments
from spotkeeper.local.compute.disks import Disks
from spotkeeper.local.compute.instances import InstanceApi, InstanceBuilder
from spotkeeper.local.compute.operations import Operations
from spotkeeper.local.compute.reservations import Reservations
from spotkeeper.local.compute.resources import Resources
from spotkeeper.local.compute.stored import StoredResources
from spotkeeper.local.core.vm import VmTable
from spotkeeper.local.core.world import World
from spotkeeper.local.machines.host import Host
from spotkeeper.local.serverless.functions import Functions
from spotkeeper.local.serverless.triggers import Events, Schedule
from spotkeeper.local.spot_market.bill import Billing
from spotkeeper.local.spot_market.power import Power
from spotkeeper.local.spot_market.spot import Spot


class CloudParts:
    def __init__(self, world: World) -> None:
        self.world = world
        self.host = Host(world)
        self.tokens = Tokens(world.folder)
        self.operations = Operations(world)
        self.policies = Policies(world)
        self.stored = StoredResources(world, self.operations, self.policies)
        self.disks = Disks(world, self.operations, self.host)
        self.billing = Billing(world)
        self.machines = VmTable(world)
        self.reservations = Reservations(self.stored, self.machines)
        self.builder = InstanceBuilder(world, self.stored, self.disks, self.reservations)
        self.attachments = Attachments(world, self.operations, self.disks, self.host, self.machines)
        self.power = Power(world, self.operations, self.host, self.billing, self.machines, self.attachments)
        self.instances = InstanceApi(world, self.operations, self.builder, self.machines, self.attachments, self.power)
        self.instances.capacity = self.spot = Spot(world, self.machines, self.power)
        self.resources = Resources(world)
        self.iam = ProjectIam(world, self.resources)
        self.buckets = Buckets(world, self.resources)
        self.functions = Functions(world, self.resources, self.iam, self.host, self.buckets.read)
        self.schedule = Schedule(world, self.resources, self.tokens, self.functions.restart)
        self.events = Events(world, self.resources, self.tokens)
        self.power.on_preempted = self.events.preempted
