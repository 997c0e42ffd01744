"""The adapter of EC2 to ``contract.cloud.Cloud``: one listing, and one call per action.

A resource belongs to the stack if both its tag and its name (the tag ``Name``) say so. EC2 lists a terminated machine
for an hour; such a machine counts as gone. EC2 has an API for each region: all regions are asked at the same time, and
one that does not answer keeps nothing from the others. ``region.py`` has a region's listing and prices, ``listing.py``
the lists, ``actions.py`` the actions, ``errors.py`` the meaning of errors. Source:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference (tests check every request against botocore's model).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import Action, DeleteSnapshot, Listing, Result, ResultKind, Vm
from spotkeeper.contract.market import Chances, PriceRun
from spotkeeper.contract.stack import PoolState, StackState
from spotkeeper.reconcile.clouds.base import Addresses, addresses_around, perform
from spotkeeper.reconcile.clouds.ec2.actions import Ec2Verbs
from spotkeeper.reconcile.clouds.ec2.api import Api, Ec2RefusedError
from spotkeeper.reconcile.clouds.ec2.copies import Copies
from spotkeeper.reconcile.clouds.ec2.errors import classify, detail_of
from spotkeeper.reconcile.clouds.ec2.region import Region
from spotkeeper.reconcile.store.objects import LISTING_S

T = TypeVar("T")
log = logging.getLogger(__name__)


class Ec2:
    """The cloud of one stack.

    Args:
        stack: the stack as declared: its pools, templates, zones and subnets.
        apis: region -> the client that makes the calls there.
        clock: for the time in results.
        addresses: networks of machines' addresses; by default the private ones.
    """

    def __init__(
        self, stack: StackState, apis: Mapping[str, Api], clock: Clock, addresses: Addresses | None = None
    ) -> None:
        self._stack = stack
        self._clock = clock
        within = addresses or Addresses()
        self._regions = tuple(Region(name, stack, api, clock, within) for name, api in apis.items())
        self._verbs = Ec2Verbs(stack, apis, clock)
        self._copies = Copies(apis)

    def list(self, stack: str) -> Listing:
        """List machines and disks by tag. ``answered`` lacks zones that failed."""
        ends = time.monotonic() + LISTING_S
        found = _at_once(self._regions, lambda region: region.list(ends))
        self._verbs.remember(item for one in found for item in one.volumes)
        listings = [one.listing for one in found]
        return Listing(
            vms=tuple(vm for one in listings for vm in one.vms),
            disks=tuple(disk for one in listings for disk in one.disks),
            snapshots=self._copies.joined({one.region: one.snapshots for one in found}, stack, ends),
            answered=frozenset(zone for one in listings for zone in one.answered),
            results=tuple(result for one in listings for result in one.results),
            ran=tuple(ran for one in listings for ran in one.ran),
        )

    def find(self, uid: str, deadline_s: float) -> Vm | None:
        """Return the machine with this id, even if it ended within the last hour.

        None: EC2 lists no such machine, it is not the stack's, or the request failed.
        """
        ends = time.monotonic() + deadline_s
        found = _at_once(self._regions, lambda region: region.find(uid, ends))
        return next((vm for vm in found if vm is not None), None)

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Return spot prices of the pool's machine type, by zone; None if EC2 gave none."""
        ends = time.monotonic() + deadline_s
        told = self._told(pool, lambda region, found: region.price_history(found, ends))
        runs = [run for of_region in told for run in of_region]
        return tuple(sorted(runs, key=lambda run: (run.start, run.zone))) or None

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """Return each zone's placement score for the pool's ``max_machines`` at once; None if EC2 gave none."""
        ends = time.monotonic() + deadline_s
        told = [one for one in self._told(pool, lambda region, found: region.chances(found, ends)) if one is not None]
        if not told:
            return None
        return replace(told[0], by_zone={zone: guess for one in told for zone, guess in one.by_zone.items()})

    def _told(self, pool: str, ask: Callable[[Region, PoolState], T]) -> tuple[T, ...]:
        found = self._stack.pool(pool)
        if found is None:
            return ()
        return _at_once([each for each in self._regions if set(each.zones) & set(found.zones)], lambda r: ask(r, found))

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Perform one action. A refusal is a result, not an exception; ACCEPTED means under way, not done."""
        try:
            return perform(self._verbs, action, deadline_s, self._clock)
        except Ec2RefusedError as error:
            kind, detail = classify(error.code, error.status, error.message), detail_of(error.code, error.message)
            if kind is ResultKind.QUOTA and self._stack.regions and not isinstance(action, DeleteSnapshot):
                detail = f"{self._stack.region_of(action.zone)}: {detail}"  # a quota is a region's
            return Result(action, kind, detail, self._clock.now())


def open_ec2(stack: StackState, clock: Clock, endpoint: str | None = None) -> Ec2:
    """Return the stack's cloud; its calls use this process's identity.

    Args:
        endpoint: root of the EC2 API, for all regions; None means the environment's (``AWS_ENDPOINT_URL``), otherwise
            AWS's.
    """
    named = endpoint or os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL") or ""
    home = Api(stack.region, endpoint)
    apis = {stack.region: home} | {region: home.beside(region) for region in stack.regions if region != stack.region}
    for api in apis.values():
        api.open()
    return Ec2(stack, apis, clock, addresses_around(named))


def _at_once(regions: Iterable[Region], ask: Callable[[Region], T]) -> tuple[T, ...]:
    """Ask regions at the same time; each has the whole of the time."""
    every = tuple(regions)
    if len(every) == 1:
        return (ask(every[0]),)
    with ThreadPoolExecutor(max(1, len(every))) as threads:
        return tuple(threads.map(ask, every))
