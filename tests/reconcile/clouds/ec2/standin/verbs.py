"""EC2's calls, as far as a client of ours may make them, over one :class:`Site`. Any other is refused by name."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tests.reconcile.clouds.ec2.standin import protocol
from tests.reconcile.clouds.ec2.standin.copies import ebs, transferred_gb
from tests.reconcile.clouds.ec2.standin.launch import Launcher, tags_of, token_of
from tests.reconcile.clouds.ec2.standin.protocol import Ec2Error, Params
from tests.reconcile.clouds.ec2.standin.site import TOKEN_S, LostError, Site
from tests.reconcile.clouds.ec2.standin.things import (
    CODE,
    Instance,
    Run,
    Snapshot,
    Vol,
    Volume,
    at,
    show_attachment,
    show_instance,
    show_snapshot,
    show_volume,
    tag_list,
)

PAGE = 1000
SIZES = {"gp3": (1, 65_536), "gp2": (1, 16_384), "io1": (4, 16_384), "io2": (4, 65_536), "st1": (125, 16_384)}
DEVICE = re.compile(r"/dev/(?:sd[f-p]|xvd[b-z])\Z")
SNAPSHOT_EVERY_S = 15.0  # of one volume
COPIES = 20  # snapshots that are copied into a region at once
TAGGED = re.compile(r"tag:(.+)\Z")
USER = ("Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown")


class Ec2Service:
    """``asked``: every call that was read, with its parameters, in order."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.launcher = Launcher(site)
        self.asked: deque[tuple[str, Params]] = deque(maxlen=10_000)
        self.faults: list[str] = []  # of ours or of the stand-in's: a test fails on any
        self.pages = PAGE
        self._verbs: dict[str, Callable[[Params], Params]] = {
            "RunInstances": self.launcher.run,
            "TerminateInstances": self._terminate,
            "DescribeInstances": self._instances,
            "CreateVolume": self._create_volume,
            "DeleteVolume": self._delete_volume,
            "AttachVolume": self._attach,
            "DetachVolume": self._detach,
            "DescribeVolumes": self._volumes,
            "CreateSnapshot": self._create_snapshot,
            "CopySnapshot": self._copy_snapshot,
            "DeleteSnapshot": self._delete_snapshot,
            "DescribeSnapshots": self._snapshots,
            "DescribeSpotPriceHistory": self._prices,
            "DescribeAvailabilityZones": self._zones,
            "GetSpotPlacementScores": self._scores,
        }

    def answer(self, url: str, body: bytes | str) -> tuple[int, bytes]:
        """Answer a request to EC2, or to EBS's own API; see :meth:`handle`."""
        data = body if isinstance(body, bytes) else body.encode()
        return self.handle(data) if data else ebs(self.site, url, self.pages)

    def handle(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer.

        Raises:
            LostError: none comes.
        """
        try:
            name, params = protocol.read(body)
            self.asked.append((name, params))
            if params.get("DryRun"):
                raise Ec2Error("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
            verb = self._verbs.get(name)
            if verb is None:
                raise Ec2Error("UnauthorizedOperation", f"{name}: no client of ours may", 403)
            fault = self.site.admit(name, _zone_of(params))
            answer = verb(params)
            if fault is not None:
                if not fault.code:
                    raise LostError(name)
                raise Ec2Error(fault.code, "after it was carried out", fault.status)
            return 200, protocol.write(name, answer)
        except Ec2Error as error:
            self.site.refused[error.code] += 1
            return error.status, error.body()
        except LostError:
            raise
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            return 500, Ec2Error("InternalError", "the stand-in's own fault", 500).body()

    # -- machines

    def _instances(self, params: Params) -> Params:
        ids = params.get("InstanceIds")
        if ids is not None and "MaxResults" in params:
            raise Ec2Error("InvalidParameterCombination", "InstanceIds and MaxResults")
        self._lights(params)
        visible = [one for one in self.site.instances.values() if self._visible(one)]
        if ids is not None:
            by_id = {one.id: one for one in visible}
            for uid in ids:
                self._instance(uid)
            visible = [by_id[uid] for uid in ids]
        known = {
            "availability-zone": lambda one: one.zone,
            "instance-id": lambda one: one.id,
            "instance-state-name": lambda one: one.state.value,
            "client-token": lambda one: one.token,
        }
        found, more = self._page(_filtered(visible, params, known), params)
        out = [
            {"ReservationId": f"r-{one.id[2:]}", "OwnerId": "123456789012", "Groups": [],
             "Instances": [show_instance(one)]}
            for one in found
        ]  # fmt: skip
        return {"Reservations": out, **more}

    def _instance(self, uid: str) -> Instance:
        if not re.match(r"i-[0-9a-f]{8}(?:[0-9a-f]{9})?\Z", uid):
            raise Ec2Error("InvalidInstanceID.Malformed", f'Invalid id: "{uid}"')
        found = self.site.instances.get(uid)
        if found is None or not self._visible(found):
            raise Ec2Error("InvalidInstanceID.NotFound", f"The instance ID '{uid}' does not exist")
        return found

    def _terminate(self, params: Params) -> Params:
        out = []
        for one in [self._instance(uid) for uid in params["InstanceIds"]]:
            before = one.state
            self.site.stop(one, USER)
            out.append(
                {
                    "InstanceId": one.id,
                    "PreviousState": {"Code": CODE[before], "Name": before.value},
                    "CurrentState": {"Code": CODE[one.state], "Name": one.state.value},
                }
            )
        return {"TerminatingInstances": out}

    # -- volumes

    def _create_volume(self, params: Params) -> Params:
        replay = token_of(self.site, "CreateVolume", params)
        if replay is not None:
            return show_created(self.site.volumes.get(replay) or self.site.dropped[replay])
        self._dark(params.get("AvailabilityZone", ""))
        volume = self._new_volume(params)
        self.site.add_volume(volume)
        if token := params.get("ClientToken"):
            self.site.tokens["CreateVolume", token] = (_without(params), volume.id)
        return show_created(volume)

    def _new_volume(self, params: Params) -> Volume:
        site, zone, kind = self.site, params.get("AvailabilityZone", ""), params.get("VolumeType", "gp2")
        if zone not in site.zones:
            raise Ec2Error("InvalidParameterValue", f"Value ({zone}) for parameter availabilityZone is invalid.")
        shot = self._snapshot(params["SnapshotId"]) if "SnapshotId" in params else None
        if shot is not None and shot.state != "completed":
            raise Ec2Error("IncorrectState", f"Snapshot '{shot.id}' is not in the 'completed' state")
        size = params.get("Size", shot.size if shot else None)
        if size is None:
            raise Ec2Error("MissingParameter", "The request must contain the parameter size/snapshot")
        least, most = SIZES[kind]
        if not max(least, shot.size if shot else 0) <= size <= most:
            raise Ec2Error("InvalidParameterValue", f"Volume of {size}GiB is invalid.")
        if "Throughput" in params and kind != "gp3":
            raise Ec2Error("InvalidParameterCombination", f"The parameter Throughput is not recognized for {kind}")
        if ("Iops" in params) != kind.startswith("io") and not (kind == "gp3" and "Iops" in params):
            raise Ec2Error("InvalidParameterCombination", f"The parameter iops for {kind} volumes")
        if "KmsKeyId" in params and not params.get("Encrypted"):
            raise Ec2Error("InvalidParameterDependency", "KmsKeyId needs Encrypted")
        self._key(params)
        return Volume(
            id=site.id("vol"),
            zone=zone,
            size=size,
            kind=kind,
            tags=tags_of(params, ("volume",)).get("volume", {}),
            token=params.get("ClientToken", ""),
            created=site.time.now(),
            visible_at=site.seen_at(),
            snapshot=shot.id if shot else "",
            encrypted=params.get("Encrypted", False),
            key=params.get("KmsKeyId", ""),
            contents=shot.contents if shot else None,
            blocks=dict(shot.blocks) if shot else dict.fromkeys(range(site.written), 1),
        )

    def _key(self, params: Params) -> None:
        key = params.get("KmsKeyId", "")
        if self.site.region and key and f":{self.site.region}:" not in key:
            raise Ec2Error("InvalidKmsKey.InvalidKeyState", f"The KMS key {key} is not in {self.site.region}")

    def _volume(self, uid: str) -> Volume:
        found = self.site.volumes.get(uid)
        if found is None or not self._visible(found):
            raise Ec2Error("InvalidVolume.NotFound", f"The volume '{uid}' does not exist.")
        return found

    def _volumes(self, params: Params) -> Params:
        self._lights(params)
        visible = [one for one in self.site.volumes.values() if self._visible(one)]
        if "VolumeIds" in params:
            if "MaxResults" in params:
                raise Ec2Error("InvalidParameterCombination", "VolumeIds and MaxResults")
            visible = [self._volume(uid) for uid in params["VolumeIds"]]
        known = {
            "availability-zone": lambda one: one.zone,
            "volume-id": lambda one: one.id,
            "status": lambda one: one.state.value,
            "attachment.instance-id": lambda one: one.holder,
        }
        found, more = self._page(_filtered(visible, params, known), params)
        return {"Volumes": [show_volume(one) for one in found], **more}

    def _delete_volume(self, params: Params) -> Params:
        volume = self._volume(params["VolumeId"])
        if volume.state is Vol.IN_USE:
            raise Ec2Error("VolumeInUse", f"Volume {volume.id} is currently attached to {volume.holder}")
        if volume.state is Vol.CREATING:
            raise Ec2Error("IncorrectState", f"The volume '{volume.id}' is 'creating'")
        self.site.drop_volume(volume)
        return {}

    def _attach(self, params: Params) -> Params:
        volume, instance, device = (
            self._volume(params["VolumeId"]),
            self._instance(params["InstanceId"]),
            params["Device"],
        )
        if instance.state is not Run.RUNNING:
            raise Ec2Error("IncorrectState", f"Instance '{instance.id}' is not 'running'.")
        if volume.zone != instance.zone:
            raise Ec2Error("InvalidVolume.ZoneMismatch", f"The volume '{volume.id}' is not in the same zone")
        if volume.state is Vol.IN_USE:
            raise Ec2Error("VolumeInUse", f"{volume.id} is already attached to an instance")
        if volume.state is not Vol.AVAILABLE:
            raise Ec2Error("IncorrectState", f"{volume.id} is not 'available'.")
        if not DEVICE.match(device):
            raise Ec2Error("InvalidParameterValue", f"Value ({device}) for parameter device is invalid.")
        if any(one.holder == instance.id and one.device == device for one in self.site.volumes.values()):
            raise Ec2Error("InvalidParameterValue", f"Invalid value '{device}' for unixDevice. It is already in use")
        self.site.attach(volume, instance, device)
        return show_attachment(volume)

    def _detach(self, params: Params) -> Params:
        volume = self._volume(params["VolumeId"])
        if not volume.holder:
            raise Ec2Error("IncorrectState", f"Volume '{volume.id}' is in the 'available' state.")
        if params.get("InstanceId", volume.holder) != volume.holder:
            raise Ec2Error("InvalidAttachment.NotFound", f"'{volume.id}' is not attached to {params['InstanceId']}")
        if params.get("Force"):
            raise Ec2Error("UnauthorizedOperation", "nobody of ours detaches by force", 403)
        self.site.detach(volume)
        return show_attachment(volume)

    # -- snapshots

    def _snapshot(self, uid: str) -> Snapshot:
        found = self.site.snapshots.get(uid)
        if found is None or not self._visible(found):
            raise Ec2Error("InvalidSnapshot.NotFound", f"The snapshot '{uid}' does not exist.")
        return found

    def _create_snapshot(self, params: Params) -> Params:
        volume, now = self._volume(params["VolumeId"]), self.site.time.now()
        if volume.state in (Vol.CREATING, Vol.ERROR):
            raise Ec2Error("IncorrectState", f"The volume '{volume.id}' is '{volume.state.value}'")
        recent = [
            s for s in self.site.snapshots.values() if s.volume == volume.id and now - s.started < SNAPSHOT_EVERY_S
        ]
        if recent:
            raise Ec2Error("SnapshotCreationPerVolumeRateExceeded", "one every 15 seconds")
        tags = tags_of(params, ("snapshot",)).get("snapshot", {})
        seen_at = self.site.seen_at()
        shot = Snapshot(self.site.id("snap"), volume.id, volume.size, tags, now, seen_at, contents=volume.contents)
        shot.blocks, shot.origin, shot.torn = dict(volume.blocks), volume.id, bool(volume.holder)
        for block in list(volume.blocks)[: self.site.rewritten] if shot.torn else ():
            volume.blocks[block] += 1
        self.site.add_snapshot(shot)
        return show_snapshot(shot)

    def _copy_snapshot(self, params: Params) -> Params:
        """Of another region of the account, which signs a part of the request too (``PresignedUrl``)."""
        there = self.site.abroad.get(params["SourceRegion"])
        found = there.snapshots.get(params["SourceSnapshotId"]) if there is not None else None
        if found is None or found.visible_at > self.site.time.now():
            raise Ec2Error("InvalidSnapshot.NotFound", f"The snapshot '{params['SourceSnapshotId']}' does not exist.")
        if found.state != "completed":
            raise Ec2Error("IncorrectState", f"Snapshot '{found.id}' is not in the 'completed' state")
        if not params.get("Encrypted") or not params.get("PresignedUrl"):
            raise Ec2Error("InvalidParameterValue", "want a signed and encrypted copy")
        self._key(params)
        if sum(one.copied and one.state == "pending" for one in self.site.snapshots.values()) >= COPIES:
            raise Ec2Error("ResourceLimitExceeded", "The maximum number of in-progress snapshot copies per region")
        now, tags = self.site.time.now(), tags_of(params, ("snapshot",)).get("snapshot", {})
        shot = Snapshot(self.site.id("snap"), "vol-ffffffff", found.size, tags, now, self.site.seen_at())
        shot.contents, shot.key, shot.copied = found.contents, params.get("KmsKeyId", ""), True
        shot.blocks, shot.origin, shot.torn = dict(found.blocks), found.origin, found.torn
        self.site.copied.append((params["SourceRegion"], self.site.region, transferred_gb(self.site, shot)))
        self.site.add_snapshot(shot)
        return {"SnapshotId": shot.id, "Tags": tag_list(tags)}

    def _delete_snapshot(self, params: Params) -> Params:
        self.site.drop_snapshot(self._snapshot(params["SnapshotId"]))
        return {}

    def _snapshots(self, params: Params) -> Params:
        if params.get("OwnerIds") != ["self"]:
            raise Ec2Error("InvalidParameterValue", "a search of everybody's public snapshots")
        visible = [one for one in self.site.snapshots.values() if self._visible(one)]
        known = {
            "snapshot-id": lambda one: one.id,
            "volume-id": lambda one: one.volume,
            "status": lambda one: one.state,
        }
        found, more = self._page(_filtered(visible, params, known), params)
        return {"Snapshots": [show_snapshot(one) for one in found], **more}

    # -- hints

    def _prices(self, params: Params) -> Params:
        start = params["StartTime"].timestamp() if "StartTime" in params else 0.0
        (kind,) = params["InstanceTypes"]
        told = []
        for zone in self.site.zones:
            mine = sorted((since, usd) for of, since, usd in self.site.market.prices if of == zone)
            before = [one for one in mine if one[0] <= start][-1:]
            told += [(zone, since, usd) for since, usd in (*before, *(one for one in mine if one[0] > start))]
        told.sort(key=lambda one: -one[1])  # newest first, as EC2
        rows = [
            {
                "AvailabilityZone": zone,
                "InstanceType": kind,
                "ProductDescription": "Linux/UNIX",
                "SpotPrice": usd,
                "Timestamp": at(since),
            }
            for zone, since, usd in told
        ]
        return {"SpotPriceHistory": rows, "NextToken": ""}

    def _zones(self, params: Params) -> Params:
        rows = [
            {"ZoneName": name, "ZoneId": uid, "ZoneType": "availability-zone", "State": "available"}
            for name, uid in self.site.zones.items()
        ]
        return {"AvailabilityZones": rows}

    def _scores(self, params: Params) -> Params:
        (region,) = params["RegionNames"]
        rows = [
            {"Region": region, "AvailabilityZoneId": zone, "Score": score}
            for zone, score in self.site.market.scores.items()
        ]
        return {"SpotPlacementScores": rows}

    # -- what they share

    def _visible(self, one: Instance | Volume | Snapshot) -> bool:
        return one.visible_at <= self.site.time.now()

    def _lights(self, params: Params) -> None:
        """A zone in an outage makes a question fail that concerns it."""
        zones = [
            value for one in params.get("Filters", ()) if one["Name"] == "availability-zone" for value in one["Values"]
        ]
        for zone in zones or self.site.zones:
            self._dark(zone)

    def _dark(self, zone: str) -> None:
        if zone in self.site.dark:
            raise Ec2Error("Unavailable", "The service is unavailable. Please try again shortly.", 503)

    def _page(self, found: list[Any], params: Params) -> tuple[list[Any], Params]:
        size = params.get("MaxResults")
        if size is None:
            return found, {}
        if not 5 <= size <= PAGE:
            raise Ec2Error("InvalidParameterValue", f"Value ( {size} ) for parameter maxResults is invalid.")
        first, size = int(params.get("NextToken") or 0), min(size, self.pages)
        page, rest = found[first : first + size], found[first + size :]
        return page, {"NextToken": str(first + size)} if rest else {}


def show_created(volume: Volume) -> Params:
    """What CreateVolume answers; under a token that was used, the first answer again, whatever became of the volume."""
    told = show_volume(volume)
    told.pop("Attachments")
    return told


def _zone_of(params: Params) -> str:
    return str(params.get("AvailabilityZone") or params.get("Placement", {}).get("AvailabilityZone", ""))


def _without(params: Params) -> object:
    return {key: value for key, value in params.items() if key != "ClientToken"}


def _filtered(found: Iterable[Any], params: Params, known: dict[str, Callable[[Any], str]]) -> list[Any]:
    out = list(found)
    for one in params.get("Filters", ()):
        name, values = one["Name"], one["Values"]
        if len(values) > 200:
            raise Ec2Error("FilterLimitExceeded", "The maximum number of filter values")
        tagged = TAGGED.match(name)
        if tagged:
            out = [item for item in out if item.tags.get(tagged[1]) in values]
        elif name in known:
            out = [item for item in out if known[name](item) in values]
        else:
            raise Ec2Error("InvalidParameterValue", f"The filter '{name}' is invalid")
    return out


__all__ = ["TOKEN_S", "Ec2Service"]
