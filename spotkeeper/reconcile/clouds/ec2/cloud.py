"""The adapter of EC2 to ``contract.cloud.Cloud``: one listing, and one call per action.

A resource belongs to the stack if both its tag and its name (the tag ``Name``) say so. EC2 lists a terminated machine
for an hour; such a machine counts as gone. ``listing.py`` has the lists, ``actions.py`` the actions, ``errors.py`` the
meaning of errors. Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (tests check every request against
botocore's model).
"""

from __future__ import annotations

import builtins
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import Action, Listing, Result, Vm
from spotkeeper.contract.market import Chances, PriceRun
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.clouds.base import Addresses, ListError, addresses_around, known, perform
from spotkeeper.reconcile.clouds.ec2 import advice, schema
from spotkeeper.reconcile.clouds.ec2.actions import Ec2Verbs
from spotkeeper.reconcile.clouds.ec2.api import Api, Ec2RefusedError
from spotkeeper.reconcile.clouds.ec2.errors import classify, detail_of
from spotkeeper.reconcile.clouds.ec2.listing import Filters, everywhere, pages, snapshots
from spotkeeper.reconcile.clouds.ec2.schema import HOLDING, Attachment, InstanceIn, Instances, VolumeIn, Volumes, by_tag
from spotkeeper.reconcile.clouds.http_client import NoAnswerError
from spotkeeper.reconcile.store.objects import LISTING_S

ASKED_AT_ONCE = 200  # most values of a filter

log = logging.getLogger(__name__)


class Ec2:
    """The cloud of one stack.

    Args:
        stack: the stack as declared: its pools, templates, zones and subnets.
        api: the client that makes the calls.
        clock: for the time in results.
        addresses: networks of machines' addresses; by default the private ones.
    """

    def __init__(self, stack: StackState, api: Api, clock: Clock, addresses: Addresses | None = None) -> None:
        self._stack = stack
        self._api = api
        self._clock = clock
        self._addresses = addresses or Addresses()
        self._alive: frozenset[str] = frozenset()  # ids of machines in the last complete listing
        self._verbs = Ec2Verbs(stack, api, clock)
        self._zone_ids: dict[str, str] = {}  # "use1-az1" -> "us-east-1a", of this account

    def list(self, stack: str) -> Listing:
        """List machines and disks by tag. ``answered`` lacks zones that failed.

        One call lists the whole region; if it fails, each of the stack's zones is listed by its own call.
        """
        zones = self._stack.zones()
        ends = time.monotonic() + LISTING_S
        with ThreadPoolExecutor(3) as pool:
            vms = pool.submit(everywhere, "instances", self._instances, zones, ends)
            disks = pool.submit(everywhere, "disks", self._volumes, zones, ends)
            shots = pool.submit(snapshots, self._api, self._stack.stack, ends)
            machines, volumes, found = vms.result(), disks.result(), shots.result()
        self._verbs.remember(volumes.items)
        attached = _attached(volumes.items)
        names_of = {item.instance_id: item.labels.get(schema.NAME, "") or item.instance_id for item in machines.items}
        answered = machines.answered & volumes.answered
        return Listing(
            vms=known(
                schema.to_vm(item, stack, self._addresses, attached.get(item.instance_id, ()))
                for item in machines.items
            ),
            disks=known(schema.to_disk(item, stack, names_of) for item in volumes.items),
            snapshots=schema.to_snapshots(found or (), stack),
            # If snapshots are unknown no zone counts as answered: an existing snapshot could be created again.
            answered=answered if found is not None else frozenset(),
            results=known(schema.to_result(item, stack) for item in machines.items),
            ran=known(schema.to_ran(item, stack) for item in machines.items),
        )

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

    def find(self, uid: str, deadline_s: float) -> Vm | None:
        """Return the machine with this id, even if it ended within the last hour.

        None: EC2 lists no such machine, it is not the stack's, or the request failed.
        """
        try:
            found = self._by([{"Name": "instance-id", "Values": [uid]}], time.monotonic() + deadline_s)
        except ListError as error:
            log.warning("machine %s: %s", uid, error)
            return None
        stack = self._stack.stack
        return next(iter(known(schema.to_vm(item, stack, self._addresses, ended=True) for item in found)), None)

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Return spot prices of the pool's machine type, by zone; None if EC2 gave none."""
        found = self._stack.pool(pool)
        if found is None:
            return None
        try:
            question = advice.question(found, self._clock.now())
            answer = self._api.call("describe_spot_price_history", deadline_s, question)
        except (NoAnswerError, Ec2RefusedError) as error:
            log.warning("prices of pool %s: %s", pool, error)
            return None
        return advice.price_runs(answer, frozenset(found.zones))

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """Return each zone's placement score for the pool's ``max_machines`` at once; None if EC2 gave none."""
        found, ends = self._stack.pool(pool), time.monotonic() + deadline_s
        if found is None:
            return None
        try:
            if not self._zone_ids:
                query = {"Filters": advice.OF_REGION}
                self._zone_ids = advice.zone_names(self._api.once("describe_availability_zones", query, ends))
            question = advice.score_question(found, self._stack.region)
            answer = self._api.once("get_spot_placement_scores", question, ends)
        except (NoAnswerError, Ec2RefusedError) as error:
            log.info("placement scores of pool %s: %s", pool, error)
            return None
        return advice.chances(answer, self._zone_ids, frozenset(found.zones), self._clock.now())

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Perform one action. A refusal is a result, not an exception; ACCEPTED means under way, not done."""
        try:
            return perform(self._verbs, action, deadline_s, self._clock)
        except Ec2RefusedError as error:
            kind, detail = classify(error.code, error.status, error.message), detail_of(error.code, error.message)
            return Result(action, kind, detail, self._clock.now())


def open_ec2(stack: StackState, clock: Clock, endpoint: str | None = None) -> Ec2:
    """Return the stack's cloud; its calls use this process's identity.

    Args:
        endpoint: root of the EC2 API; None means the environment's (``AWS_ENDPOINT_URL``), otherwise AWS's.
    """
    named = endpoint or os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL") or ""
    api = Api(stack.region, endpoint)
    api.open()
    return Ec2(stack, api, clock, addresses_around(named))


def _attached(volumes: Iterable[VolumeIn]) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for item in volumes:
        name = next((tag.value for tag in item.tags if tag.key == schema.NAME), "")
        for one in filter(_holds, item.attachments):
            out[one.instance_id] = (*out.get(one.instance_id, ()), name)
    return out


def _holds(attachment: Attachment) -> bool:
    return attachment.state in HOLDING
