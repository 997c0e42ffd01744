"""What comes and goes in each cloud while a stack stands, which is in no state of Pulumi's: machines of jobs, their
disks, a snapshot; and those of another stack beside them, which nobody of this one may touch.

On Google Cloud in a cloud that remembers; on AWS in the strict EC2 stand-in, made by reconcile's own adapter, with the
stack's bucket in moto's S3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import AttachDisk, CreateSnapshot, ResultKind
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import encode_versioned
from tests.infra.cloud import Cloud
from tests.reconcile.clouds.ec2.region import JOB, STACK, STILL, UID, Region, insert, region
from tests.reconcile.clouds.ec2.standin.site import Site
from tests.reconcile.clouds.ec2.standin.things import Run, Vol, Volume
from tests.reconcile.clouds.ec2.standin.verbs import Ec2Service

OTHER = "demo2"
LOOK_S = 30.0  # passes with each look at the machines: longer than one takes to go


class Machines(Protocol):
    def appear(self, count: int) -> None:
        """Of a job of the stack ``demo``: so many, each with its disk, and a snapshot."""

    def left(self) -> list[str]:
        """Names of all that is there, of whichever stack."""

    def forget(self, zone: str) -> None:
        """Leave a disk of a job in this zone of another region, as after a move that nobody tidied."""

    def hold(self, record: Record | None) -> None:
        """Let the bucket have this record of a job; None: remove it."""

    def clear(self) -> None: ...

    def marked(self) -> bool:
        """Whether the bucket says that the stack is drained."""


def written(record: Record | None) -> dict[str, str]:
    """Return the objects of an unfinished job by path; without a record, their texts are empty."""
    return {paths.record(JOB): encode_versioned(record).decode() if record else "", paths.active(JOB): "1.0"}


@dataclass
class OnGoogle:
    cloud: Cloud
    project: str = "/compute/v1/projects/acme-train"
    zone: str = "us-central1-a"

    def appear(self, count: int) -> None:
        for stack, machines in (("demo", count), (OTHER, 1)):
            for node in range(machines):
                self._put(f"zones/{self.zone}/instances", stack, names.vm_name(stack, JOB, node, 1))
                self._put(f"zones/{self.zone}/disks", stack, names.disk_name(stack, JOB, node, 0))
            self._put("global/snapshots", stack, names.disk_name(stack, JOB, 0, 0))

    def _put(self, where: str, stack: str, name: str) -> None:
        labels = {names.LABEL_STACK: stack, names.LABEL_POOL: "burst", names.LABEL_JOB: JOB}
        self.cloud.things[f"{self.project}/{where}/{name}"] = {"name": name, "labels": labels}

    def left(self) -> list[str]:
        return sorted(key.rsplit("/", 1)[1] for key in self.cloud.things if key.startswith(self.project))

    def forget(self, zone: str) -> None:
        self._put(f"zones/{zone}/disks", "demo", names.disk_name("demo", JOB, 0, 0))

    def hold(self, record: Record | None) -> None:
        for path, data in written(record).items():
            self.cloud.things[f"/storage/v1/b/sk-acme-train-demo/o/{path}"] = data
            if record is None:
                del self.cloud.things[f"/storage/v1/b/sk-acme-train-demo/o/{path}"]

    def clear(self) -> None:
        self.cloud.things.clear()

    def marked(self) -> bool:
        return any(key.endswith("/stack/drain") for key in self.cloud.things)


class Passing(Ec2Service):
    """Time goes on with each look at the machines, and stands still between two."""

    def handle(self, body: bytes) -> tuple[int, bytes]:
        if b"Action=DescribeInstances" in body:
            self.site.time.run(self.site.time.now() + LOOK_S)  # type: ignore[attr-defined]
        return super().handle(body)


@dataclass
class OnAmazon:
    here: Region
    s3: str
    bucket: str
    attempts: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def appear(self, count: int) -> None:
        attempt = next(self.attempts)  # a token never stands for a second machine
        for node in range(count):
            vm, disk = self.here.machine(node, attempt), self.here.disk(node, attempt)
            assert self.here.kind(AttachDisk(disk.name, vm.name, vm.uid, vm.zone)) is ResultKind.ACCEPTED
        self.here.pass_(3.0)
        assert self.here.kind(CreateSnapshot(JOB, UID, 0, attempt, vm.zone, attempt + 1)) is ResultKind.ACCEPTED
        self._of_other(insert(0, attempt))
        self.here.pass_(60.0)

    def _of_other(self, launch: Any) -> None:
        from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2

        theirs = open_ec2(replace(STACK, stack=OTHER), self.here.engine)  # type: ignore[arg-type]
        assert theirs.perform(replace(launch, uid=UID[::-1]), 20.0).kind is ResultKind.ACCEPTED

    def left(self) -> list[str]:
        found = []
        for site in (self.here.site, *(service.site for service in self.here.abroad.values())):
            found += [one for one in site.instances.values() if one.state is not Run.TERMINATED]
            found += [*site.volumes.values(), *site.snapshots.values()]
        return sorted(one.tags["Name"] for one in found)

    def forget(self, zone: str) -> None:
        region = region_of(zone)
        site = Site(self.here.engine, {zone: "y-az1"}, delays=STILL, region=region)
        self.here.abroad[region] = Passing(site)
        tags = {"Name": names.disk_name("demo", JOB, 0, 0), names.LABEL_STACK: "demo", names.LABEL_JOB: JOB}
        site.add_volume(Volume(site.id("vol"), zone, 50, "gp3", tags, "", 0.0, 0.0, state=Vol.AVAILABLE))

    def hold(self, record: Record | None) -> None:
        s3 = client(self.s3)
        for path, data in written(record).items():
            s3.put_object(Bucket=self.bucket, Key=path, Body=data.encode())
            if record is None:
                s3.delete_object(Bucket=self.bucket, Key=path)

    def clear(self) -> None:
        for kept in (self.here.site.instances, self.here.site.volumes, self.here.site.snapshots):
            kept.clear()

    def marked(self) -> bool:
        found = client(self.s3).list_objects_v2(Bucket=self.bucket, Prefix="stack/drain")
        return bool(found.get("Contents"))


@contextmanager
def on_amazon(bucket: str) -> Iterator[OnAmazon]:
    """Afterwards every request must have been EC2's."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    s3 = "http://{}:{}".format(*server.get_host_and_port())
    client(s3).create_bucket(Bucket=bucket)
    client(s3).put_object(Bucket=bucket, Key="stack/pools.json", Body=json.dumps({"stack": "demo"}))
    with pytest.MonkeyPatch.context() as patch, region(patch, service=Passing) as here:
        yield OnAmazon(here, s3, bucket)
    server.stop()


def client(endpoint: str) -> Any:
    from botocore.session import get_session

    session = get_session()
    session.set_credentials("x", "x")
    return session.create_client("s3", "us-east-1", endpoint_url=endpoint)
