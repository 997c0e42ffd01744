"""EC2 behind ``spec.cloud.Cloud``: one look, and one call per action. Decides nothing.

What is ours is known by tag *and* name (the tag ``Name``). A terminated machine is listed for an hour, which for us
is "not there". How lists are asked for is in ``ec2_lists.py``, what is done in ``ec2_verbs.py``.

Sources: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (every request is checked against botocore's model in
the tests); error classes: ``ec2_errors.py``; what IAM must allow: ``ec2_rights.py``.
"""

from __future__ import annotations

import builtins
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from spotkeeper.clock import Clock
from spotkeeper.reconcile import ec2_advice, ec2_wire
from spotkeeper.reconcile.adapter import LOOK_S, ListError, addresses_around, known, perform
from spotkeeper.reconcile.addresses import Addresses
from spotkeeper.reconcile.ec2_api import Api, RefusedError
from spotkeeper.reconcile.ec2_calls import Calls
from spotkeeper.reconcile.ec2_errors import classify, detail_of
from spotkeeper.reconcile.ec2_lists import Filters, everywhere, pages, snapshots
from spotkeeper.reconcile.ec2_verbs import Ec2Verbs
from spotkeeper.reconcile.ec2_wire import HOLDING, Attachment, InstanceIn, Instances, VolumeIn, Volumes, by_tag
from spotkeeper.reconcile.wire import NoAnswerError
from spotkeeper.spec.cloud import Action, Listing, Result, Vm
from spotkeeper.spec.market import Chances, PriceRun
from spotkeeper.spec.stack import StackState

ASKED_AT_ONCE = 200  # values of a filter

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
        self._verbs = Ec2Verbs(stack, api, clock)
        self._zone_ids: dict[str, str] = {}  # "use1-az1" -> "us-east-1a", of this account

    def list(self, stack: str) -> Listing:
        """One look over all zones, by tag. A zone that could not be asked is not in ``answered``.

        One call answers for the whole region; where it fails, each of the stack's zones is asked for itself.
        """
        zones = self._stack.zones()
        ends = time.monotonic() + LOOK_S
        with ThreadPoolExecutor(3) as pool:
            vms = pool.submit(everywhere, "instances", self._instances, zones, ends)
            disks = pool.submit(everywhere, "disks", self._volumes, zones, ends)
            shots = pool.submit(snapshots, self._api, self._stack.stack, ends)
            machines, volumes, found = vms.result(), disks.result(), shots.result()
        self._verbs.remember(volumes.items)
        held = _held(volumes.items)
        names_of = {item.instance_id: item.labels.get(ec2_wire.NAME, "") or item.instance_id for item in machines.items}
        answered = machines.answered & volumes.answered
        return Listing(
            vms=known(
                ec2_wire.to_vm(item, stack, self._addresses, held.get(item.instance_id, ())) for item in machines.items
            ),
            disks=known(ec2_wire.to_disk(item, stack, names_of) for item in volumes.items),
            snapshots=ec2_wire.to_snapshots(found or (), stack),
            # A snapshot that cannot be seen could be taken for one that must be made again.
            answered=answered if found is not None else frozenset(),
            results=known(ec2_wire.to_result(item, stack) for item in machines.items),
            ran=known(ec2_wire.to_ran(item, stack) for item in machines.items),
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

    def _volumes(self, zone: str | None, ends: float) -> builtins.list[VolumeIn]:
        return [item for page in pages(self._api, Volumes, self._filters(zone), ends) for item in page.volumes]

    def _filters(self, zone: str | None) -> builtins.list[dict[str, object]]:
        return by_tag(self._stack.stack, **({"availability_zone": zone} if zone is not None else {}))

    def find(self, uid: str, deadline_s: float) -> Vm | None:
        """The machine of this id if it is one of the stack's, also for the hour after its end; None: unknown."""
        try:
            found = self._by([{"Name": "instance-id", "Values": [uid]}], time.monotonic() + deadline_s)
        except ListError as error:
            log.warning("machine %s: %s", uid, error)
            return None
        stack = self._stack.stack
        return next(iter(known(ec2_wire.to_vm(item, stack, self._addresses, ended=True) for item in found)), None)

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

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Make one call. Never raises for what a cloud can answer; ACCEPTED means on its way, not done."""
        try:
            return perform(self._verbs, action, deadline_s, self._clock)
        except RefusedError as error:
            kind, detail = classify(error.code, error.status, error.message), detail_of(error.code, error.message)
            return Result(action, kind, detail, self._clock.now())


def open_ec2(stack: StackState, clock: Clock, endpoint: str | None = None) -> Ec2:
    """The stack's cloud with this process's identity.

    Args:
        endpoint: root of the EC2 API; None: as the environment says (``AWS_ENDPOINT_URL``), else AWS's.
    """
    named = endpoint or os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return Ec2(stack, Api(stack.region, endpoint), clock, addresses_around(named))


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
