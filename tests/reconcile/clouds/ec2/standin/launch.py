"""RunInstances: the call with the most rules, and the one whose slips cost machines that nobody owns."""

from __future__ import annotations

import re
from typing import Any

from tests.reconcile.clouds.ec2.standin.protocol import Ec2Error, Params
from tests.reconcile.clouds.ec2.standin.site import TOKEN_S, Site
from tests.reconcile.clouds.ec2.standin.things import OWNER, Instance, Reserved, Run, Template, show_instance

TAGGABLE = ("instance", "volume", "network-interface", "spot-instances-request")
# Instance type -> how many network cards it has, and the first that takes an Elastic Fabric Adapter.
CARDS = {"p4d.24xlarge": (4, 0), "p5.48xlarge": (32, 0), "p6-b300.48xlarge": (17, 1), "g5.12xlarge": (1, 0)}
DEVICES = 2  # of a network card
TOKEN = re.compile(r"[!-~]{1,64}\Z")


class Launcher:
    def __init__(self, site: Site) -> None:
        self.site = site

    def run(self, params: Params) -> Params:
        if params["MinCount"] != 1 or params["MaxCount"] != 1:
            raise Ec2Error("InvalidParameterValue", "a machine is asked for by its own token: MinCount = MaxCount = 1")
        replay = token_of(self.site, "RunInstances", params)
        if replay is not None:
            return self._again(replay)
        template, version = self._template(params)
        spot = template.spot(version)
        data = template.versions[version]
        zone, subnet = self._place(params, data)
        tags = tags_of(params, TAGGABLE if spot else TAGGABLE[:-1])
        reserved = self._reserved(params, data["InstanceType"], zone, spot)
        if reserved is None:
            self._market(zone, spot)
        instance = self._made(params, data, zone, subnet, spot, tags)
        instance.reservation = reserved
        self.site.tokens["RunInstances", params["ClientToken"]] = (_plain(params), instance.id)
        self.site.launch(instance)
        return _reservation(instance)

    def _again(self, uid: str) -> Params:
        """The same machine as it is by now, also for a day after its end."""
        instance = self.site.instances.get(uid)
        if instance is None or instance.state is Run.TERMINATED:
            if self.site.strict_tokens:
                raise Ec2Error("IdempotentInstanceTerminated", f"The token's instance {uid} has been terminated")
            gone = Instance(uid, "", "", False, "m5.large", {}, "", "", self.site.time.now() - 3600, 0.0)
            instance = instance or gone
            instance.state = Run.TERMINATED
        return _reservation(instance)

    def _template(self, params: Params) -> tuple[Template, str]:
        named = params.get("LaunchTemplate", {})
        template = self.site.templates.get(named.get("LaunchTemplateId", ""))
        if template is None:
            raise Ec2Error("InvalidLaunchTemplateId.NotFound", f"The specified launch template {named} does not exist.")
        version = named.get("Version", "$Default")
        version = template.default if version == "$Default" else version
        if version == "$Latest":
            version = str(max(map(int, template.versions)))
        if version not in template.versions:
            raise Ec2Error("InvalidLaunchTemplateId.VersionNotFound", f"Could not find version {version}")
        return template, version

    def _place(self, params: Params, data: dict[str, Any]) -> tuple[str, str]:
        """Zone and subnet. A subnet, or interfaces that name it: never both, wherever they come from."""
        nics = params.get("NetworkInterfaces") or data.get("NetworkInterfaces") or []
        if nics and "SubnetId" in params:
            raise Ec2Error(
                "InvalidParameterCombination",
                "Network interfaces and an instance-level subnet ID may not be specified on the same request",
            )
        if nics and (params.get("SecurityGroupIds") or data.get("SecurityGroupIds")):
            raise Ec2Error(
                "InvalidParameterCombination",
                "Network interfaces and an instance-level security groups may not be specified on the same request",
            )
        if len(nics) > 1 and any(nic.get("AssociatePublicIpAddress") for nic in nics):
            raise Ec2Error("InvalidParameterCombination", "a public address with several interfaces")
        _check_cards(data["InstanceType"], nics)
        if len({(nic.get("NetworkCardIndex", 0), nic.get("DeviceIndex")) for nic in nics}) != len(nics):
            raise Ec2Error("InvalidParameterValue", "two interfaces at one device index")
        subnets = {nic.get("SubnetId", "") for nic in nics} if nics else {params.get("SubnetId", "")}
        if len(subnets) != 1 or not (subnet := subnets.pop()):
            raise Ec2Error("MissingInput", "No subnets found for the default VPC. Please specify a subnet.")
        zone = self.site.subnets.get(subnet)
        if zone is None:
            raise Ec2Error("InvalidSubnetID.NotFound", f"The subnet ID '{subnet}' does not exist")
        placed = params.get("Placement", {})
        if placed.get("AvailabilityZone", zone) != zone:
            raise Ec2Error("InvalidParameterValue", f"The subnet {subnet} is not in {placed['AvailabilityZone']}")
        if (group := placed.get("GroupName", "")) and group not in self.site.groups:
            raise Ec2Error("InvalidPlacementGroup.Unknown", f"The placement group '{group}' is unknown.")
        return zone, subnet

    def _reserved(self, params: Params, kind: str, zone: str, spot: bool) -> Reserved | None:
        """The reserved capacity that a launch names, which must have room for its machine; None: it names none."""
        market = params.get("InstanceMarketOptions", {}).get("MarketType", "")
        named = params.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
        uid = named.get("CapacityReservationId", "")
        if not uid:
            if market:
                raise Ec2Error("InvalidParameterValue", f"{market}: a launch names a capacity block")
            return None
        found = self.site.reserved.get(uid)
        if found is None:
            raise Ec2Error("InvalidCapacityReservationId.NotFound", f"The capacity reservation '{uid}' does not exist")
        if spot or (market == "capacity-block") is not found.block:
            raise Ec2Error("InvalidParameterCombination", f"{uid} cannot be used with this market type")
        if (found.zone, found.kind) != (zone, kind) or params.get("Placement", {}).get("GroupName"):
            raise Ec2Error("InvalidParameterValue", f"The attributes of {uid} do not match the launch")
        if not found.active:
            raise Ec2Error("InvalidCapacityReservationState", f"The capacity reservation '{uid}' is not active")
        used = sum(one.there and one.reservation is found for one in self.site.instances.values())
        if used >= found.count:
            raise Ec2Error("ReservationCapacityExceeded", f"Requested capacity exceeds the capacity of {uid}")
        return found

    def _market(self, zone: str, spot: bool) -> None:
        site, market = self.site, self.site.market
        if spot and not site.spot_role:
            raise Ec2Error(
                "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
                "The provided credentials do not have permission to create the service-linked role for EC2 Spot "
                "Instances.",
                403,
            )
        if zone in site.dark:
            raise Ec2Error("InternalError", "An internal error has occurred", 500)
        quota = market.spot_quota if spot else market.on_demand_quota
        running = sum(one.there and one.spot is spot for one in site.instances.values())
        if quota is not None and running >= quota:
            code = "MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded"
            raise Ec2Error(code, "You have requested more than your current limit allows")
        room = market.capacity(zone, spot)
        if room is not None and site.used(zone, spot) >= room:
            raise Ec2Error("InsufficientInstanceCapacity", f"There is no capacity in {zone} that matches", 500)

    def _made(
        self, params: Params, data: dict[str, Any], zone: str, subnet: str, spot: bool, tags: dict[str, dict[str, str]]
    ) -> Instance:
        site = self.site
        uid = site.id("i")
        number = site.made
        own = {**_template_tags(data), **tags.pop("instance", {})}
        return Instance(
            id=uid,
            zone=zone,
            subnet=subnet,
            spot=spot,
            kind=data["InstanceType"],
            tags=own,
            token=params["ClientToken"],
            address=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            launched=site.time.now(),
            visible_at=site.seen_at(),
            group=params.get("Placement", {}).get("GroupName", ""),
            boot=tags,
        )


def _check_cards(kind: str, nics: list[dict[str, Any]]) -> None:
    """
    Raises:
        Ec2Error: no primary interface, an adapter on a card that takes none, or a card that the type does not have.
    """
    cards, first = CARDS.get(kind, (1, 1))
    for nic in nics:
        card, device, what = nic.get("NetworkCardIndex", 0), nic["DeviceIndex"], nic.get("InterfaceType", "interface")
        if card >= cards:
            raise Ec2Error("InvalidParameterValue", f"The network card index {card} exceeds the {cards} of {kind}")
        if device >= DEVICES:
            raise Ec2Error("InvalidParameterValue", f"The specified number '{device}' for the device index exceeds")
        if what.startswith("efa") and card < first:
            raise Ec2Error("InvalidParameterCombination", f"Network card {card} of {kind} does not support EFA")
        if what == "efa-only" and (card, device) == (0, 0):
            raise Ec2Error("InvalidParameterCombination", "the primary network interface cannot be efa-only")
    if nics and not any((nic.get("NetworkCardIndex", 0), nic["DeviceIndex"]) == (0, 0) for nic in nics):
        raise Ec2Error("InvalidParameterCombination", "no primary network interface: card 0, device 0")


def _template_tags(data: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for one in data.get("TagSpecifications", ()) for tag in one["Tags"]}


def _reservation(instance: Instance) -> Params:
    told = show_instance(instance)
    return {"ReservationId": f"r-{instance.id[2:]}", "OwnerId": OWNER, "Groups": [], "Instances": [told]}


def token_of(site: Site, operation: str, params: Params) -> str | None:
    """What this token made before, or None: nothing.

    Raises:
        Ec2Error: no token, or it stood for another request.
    """
    token = params.get("ClientToken", "")
    if not TOKEN.match(token):
        raise Ec2Error("InvalidParameterValue", f"Value ({token}) for parameter clientToken is invalid.")
    held = site.tokens.get((operation, token))
    if held is None:
        return None
    request, uid = held
    machine = site.instances.get(uid)
    if machine is not None and machine.ended and site.time.now() - machine.ended > TOKEN_S:
        return None
    if request != _plain(params):
        raise Ec2Error("IdempotentParameterMismatch", "The client token is used with other parameters")
    return uid


def _plain(params: Params) -> object:
    return {key: value for key, value in params.items() if key != "ClientToken"}


def tags_of(params: Params, allowed: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """By resource type.

    Raises:
        Ec2Error: a type that this call does not make, or tags that nothing may bear.
    """
    out: dict[str, dict[str, str]] = {}
    for one in params.get("TagSpecifications", ()):
        kind = one.get("ResourceType", "")
        if kind not in allowed:
            raise Ec2Error("InvalidParameterValue", f"'{kind}' is not a valid taggable resource type here")
        if kind in out:
            raise Ec2Error("InvalidParameterValue", f"two tag specifications of {kind}")
        tags = one.get("Tags", ())
        out[kind] = {tag["Key"]: tag.get("Value", "") for tag in tags}
        if len(out[kind]) != len(tags):
            raise Ec2Error("InvalidParameterValue", "Duplicate tag key specified.")
        if len(tags) > 50:
            raise Ec2Error("TagLimitExceeded", "The maximum number of tags")
        for key, value in out[kind].items():
            # Tags that the metadata service shows are paths there: letters, digits and some signs, no slash.
            if key.startswith("aws:") or not re.match(r"[-+=.,_:@A-Za-z0-9]{1,128}\Z", key) or len(value) > 256:
                raise Ec2Error("InvalidParameterValue", f"Tag {key!r} is invalid")
    return out
