"""One region of the stack, as EC2's API of this region shows it: its listing, spot prices and placement scores."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import Listing, Vm
from spotkeeper.contract.market import Chances, PriceRun
from spotkeeper.contract.stack import PoolState, StackState
from spotkeeper.reconcile.clouds.base import Addresses, ListError, known
from spotkeeper.reconcile.clouds.ec2 import advice, schema
from spotkeeper.reconcile.clouds.ec2.api import Api, Ec2RefusedError
from spotkeeper.reconcile.clouds.ec2.listing import Filters, everywhere, pages, snapshots
from spotkeeper.reconcile.clouds.ec2.schema import (
    HOLDING,
    Attachment,
    InstanceIn,
    Instances,
    SnapshotIn,
    VolumeIn,
    Volumes,
    by_tag,
)
from spotkeeper.reconcile.clouds.http_client import NoAnswerError

ASKED_AT_ONCE = 200  # most values of a filter

log = logging.getLogger(__name__)


class Found(Struct, frozen=True):
    """A region's listing, without snapshots; and its volumes and snapshots as EC2 lists them."""

    region: str
    listing: Listing
    volumes: tuple[VolumeIn, ...]
    snapshots: tuple[SnapshotIn, ...]


class Region:
    """``zones``: the stack's zones in this region."""

    def __init__(self, name: str, stack: StackState, api: Api, clock: Clock, addresses: Addresses) -> None:
        self.name = name
        self.zones = tuple(zone for zone in stack.zones() if stack.region_of(zone) == name)
        self._stack = stack
        self._api = api
        self._clock = clock
        self._addresses = addresses
        self._alive: frozenset[str] = frozenset()  # ids of machines in the last complete listing
        self._zone_ids: dict[str, str] = {}  # "use1-az1" -> "us-east-1a", of this account

    def list(self, ends: float) -> Found:
        """List machines and disks by tag. ``answered`` lacks zones that failed.

        One call lists the whole region; if it fails, each of the stack's zones is listed by its own call.
        """
        stack = self._stack.stack
        with ThreadPoolExecutor(3) as pool:
            vms = pool.submit(everywhere, "instances", self._instances, self.zones, ends)
            disks = pool.submit(everywhere, "disks", self._volumes, self.zones, ends)
            shots = pool.submit(snapshots, self._api, stack, ends)
            machines, volumes, found = vms.result(), disks.result(), shots.result()
        attached = _attached(volumes.items)
        names_of = {item.instance_id: item.labels.get(schema.NAME, "") or item.instance_id for item in machines.items}
        answered = machines.answered & volumes.answered
        listing = Listing(
            vms=known(
                schema.to_vm(item, stack, self._addresses, attached.get(item.instance_id, ()))
                for item in machines.items
            ),
            disks=known(schema.to_disk(item, stack, names_of) for item in volumes.items),
            # If snapshots are unknown no zone counts as answered: an existing snapshot could be created again.
            answered=answered if found is not None else frozenset(),
            results=known(schema.to_result(item, stack) for item in machines.items),
            ran=known(schema.to_ran(item, stack) for item in machines.items),
        )
        return Found(self.name, listing, volumes.items, tuple(found or ()))

    def _instances(self, zone: str | None, ends: float) -> builtins.list[InstanceIn]:
        """List instances, including terminated ones, whose end and reason EC2 reports for an hour."""
        items = self._by(self._filters(zone), ends)
        if zone is None:
            items += self._missed({item.instance_id for item in items}, ends)
            self._alive = frozenset(item.instance_id for item in items if item.state.name != schema.TERMINATED)
        return items

    def _missed(self, seen: set[str], ends: float) -> builtins.list[InstanceIn]:
        """Look up by id the machines of the last listing that are missing in this listing.

        A listing can lack a machine that exists, since listings are eventually consistent. An ended machine stays
        listed as terminated for an hour. So a missing machine most likely exists and must not count as lost.
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

    def _volumes(self, zone: str | None, ends: float) -> builtins.list[VolumeIn]:
        return [item for page in pages(self._api, Volumes, self._filters(zone), ends) for item in page.volumes]

    def _filters(self, zone: str | None) -> builtins.list[dict[str, object]]:
        return by_tag(self._stack.stack, **({"availability_zone": zone} if zone is not None else {}))

    def find(self, uid: str, ends: float) -> Vm | None:
        """Return the machine with this id, even if it ended within the last hour.

        None: this region lists no such machine, it is not the stack's, or the request failed.
        """
        try:
            found = self._by([{"Name": "instance-id", "Values": [uid]}], ends)
        except ListError as error:
            log.warning("machine %s: %s: %s", uid, self.name, error)
            return None
        stack = self._stack.stack
        return next(iter(known(schema.to_vm(item, stack, self._addresses, ended=True) for item in found)), None)

    def price_history(self, pool: PoolState, ends: float) -> tuple[PriceRun, ...]:
        """Return spot prices of the pool's machine type in this region's zones; () if EC2 gave none."""
        try:
            question = advice.question(pool, self._clock.now())
            answer = self._api.once("describe_spot_price_history", question, ends)
        except (NoAnswerError, Ec2RefusedError) as error:
            log.warning("prices of pool %s: %s: %s", pool.name, self.name, error)
            return ()
        return advice.price_runs(answer, self._own(pool)) or ()

    def chances(self, pool: PoolState, ends: float) -> Chances | None:
        """Return each zone's placement score for the pool's ``max_machines`` at once; None if EC2 gave none."""
        try:
            if not self._zone_ids:
                query = {"Filters": advice.OF_REGION}
                self._zone_ids = advice.zone_names(self._api.once("describe_availability_zones", query, ends))
            answer = self._api.once("get_spot_placement_scores", advice.score_question(pool, self.name), ends)
        except (NoAnswerError, Ec2RefusedError) as error:
            log.info("placement scores of pool %s: %s: %s", pool.name, self.name, error)
            return None
        return advice.chances(answer, self._zone_ids, self._own(pool), self._clock.now())

    def _own(self, pool: PoolState) -> frozenset[str]:
        return frozenset(self.zones) & frozenset(pool.zones)


def _attached(volumes: Iterable[VolumeIn]) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for item in volumes:
        name = next((tag.value for tag in item.tags if tag.key == schema.NAME), "")
        for one in filter(_holds, item.attachments):
            out[one.instance_id] = (*out.get(one.instance_id, ()), name)
    return out


def _holds(attachment: Attachment) -> bool:
    return attachment.state in HOLDING
