"""The adapter of Compute Engine to ``contract.cloud.Cloud``: one listing, and one call per action.

A resource belongs to the stack if both its label and its name say so. No call waits for its operation to end: the next
listing lists operations too, and recognises a failed one by its idempotency key. ``listing.py`` has the lists,
``advice.py`` prices and estimates, ``actions.py`` the actions, ``errors.py`` the meaning of errors.

Source: https://cloud.google.com/compute/docs/reference/rest/v1 (tests check request bodies against the discovery
document).
"""

from __future__ import annotations

import builtins
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import Action, DiskSnapshot, Listing, Result
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.clouds.base import Addresses, ListError, addresses_around, known, perform
from spotkeeper.reconcile.clouds.gce.actions import GceVerbs
from spotkeeper.reconcile.clouds.gce.advice import Hints
from spotkeeper.reconcile.clouds.gce.api import DEFAULT_ENDPOINT, Api, GivenToken, MetadataToken
from spotkeeper.reconcile.clouds.gce.listing import Lists
from spotkeeper.reconcile.clouds.gce.schema import (
    ENDINGS,
    DiskIn,
    InstanceIn,
    OperationIn,
    SnapshotIn,
    to_disk,
    to_ran,
    to_result,
    to_snapshot,
    to_vm,
)
from spotkeeper.reconcile.store.objects import LISTING_S

PARALLEL_LISTS = 8
OPERATIONS = " OR ".join(f'(operationType = "{kind}")' for kind in ("insert", *ENDINGS))
OPERATION_PAGES = 4  # newest first; older failures were seen by earlier rounds

log = logging.getLogger(__name__)


class Gce(Hints):
    """The cloud of one stack.

    Args:
        stack: the stack as declared: its pools, templates, zones and project.
        api: the client that makes the calls.
        clock: for the time in results.
        addresses: networks of machines' addresses; by default the private ones.
    """

    def __init__(self, stack: StackState, api: Api, clock: Clock, addresses: Addresses | None = None) -> None:
        super().__init__(stack, api, clock)
        self._addresses = addresses or Addresses()
        self._lists = Lists(api, stack.project, stack.stack)
        self._verbs = GceVerbs(stack, api)

    def list(self, stack: str) -> Listing:
        """List machines and disks by label. ``answered`` lacks zones with errors or warnings."""
        zones = self._stack.zones()
        ends = time.monotonic() + LISTING_S
        with ThreadPoolExecutor(PARALLEL_LISTS) as pool:
            vms = pool.submit(self._lists.everywhere, "instances", InstanceIn, zones, ends)
            disks = pool.submit(self._lists.everywhere, "disks", DiskIn, zones, ends)
            snapshots = pool.submit(self._snapshots, stack, ends)
            past = [pool.submit(self._operations, zone, ends) for zone in zones]
            seen_vms, seen_disks = vms.result(), disks.result()
            answered = seen_vms.answered & seen_disks.answered
            found = snapshots.result()
            operations = {zone: future.result() for zone, future in zip(zones, past, strict=True)}
        return Listing(
            vms=known(to_vm(item, stack, self._addresses) for item in seen_vms.items),
            disks=known(to_disk(item, stack) for item in seen_disks.items),
            snapshots=found or (),
            # If snapshots are unknown no zone counts as answered: an existing snapshot could be created again.
            answered=answered if found is not None else frozenset(),
            results=tuple(result for zone, of in operations.items() for result in self._failed(stack, zone, of)),
            ran=tuple(ran for zone, of in operations.items() for ran in to_ran(of, stack, zone)),
        )

    def _snapshots(self, stack: str, ends: float) -> tuple[DiskSnapshot, ...] | None:
        try:
            found = self._lists.ours("global/snapshots", SnapshotIn, ends)
        except ListError as error:
            log.warning("listing the snapshots failed: %s", error)
            return None
        return known(to_snapshot(item, stack) for item in found)

    def _operations(self, zone: str, ends: float) -> builtins.list[OperationIn]:
        """Return recent operations that made or ended machines; [] if the list fails: the next listing has them too."""
        try:
            return self._lists.newest(f"zones/{zone}/operations", OperationIn, OPERATIONS, OPERATION_PAGES, ends)
        except ListError as error:
            log.warning("zone %s: listing its operations failed: %s", zone, error)
            return []

    def _failed(self, stack: str, zone: str, operations: builtins.list[OperationIn]) -> Iterable[Result]:
        """Return the results of creations that were accepted at first and failed later."""
        now = self._clock.now()  # a time in the future would block the offer until then
        found = known(to_result(item, stack, zone, self._verbs.asked) for item in operations)
        return (replace(result, at=min(result.at, now)) for result in found)

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Perform one action. A refusal is a result, not an exception; ACCEPTED means under way, not done."""
        return perform(self._verbs, action, deadline_s, self._clock)


def open_gce(stack: StackState, clock: Clock, endpoint: str | None = None, token: str = "") -> Gce:
    """Return the stack's cloud; its calls use this machine's identity or the given token.

    Args:
        endpoint: root of the Compute API; None means Google's. An endpoint with plain http must be on this machine; it
            gets the token of the metadata server only if ``GCE_METADATA_HOST`` is set.
        token: the operator's, for a one-machine cloud.
    """
    root = endpoint or DEFAULT_ENDPOINT
    own = root.startswith("https://") or "GCE_METADATA_HOST" in os.environ
    bearer = GivenToken(token) if token else MetadataToken(clock) if own else None
    return Gce(stack, Api(root, bearer), clock, addresses_around(root))
