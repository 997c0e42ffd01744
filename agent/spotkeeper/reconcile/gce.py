"""Compute Engine behind ``spec.cloud.Cloud``: one look, and one call per action. Decides nothing.

What is ours is known by label *and* name. No call waits for an operation: its failure is found by the next listing,
through the idempotency key. How lists are asked for is in ``gce_lists.py``, hints in
``gce_hints.py``, what is done in ``gce_verbs.py``.

Sources: https://cloud.google.com/compute/docs/reference/rest/v1 (bodies are checked against the discovery
document in the tests); error classes: ``gce_errors.py``.
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
from spotkeeper.reconcile.adapter import LOOK_S, ListError, addresses_around, known, perform
from spotkeeper.reconcile.addresses import Addresses
from spotkeeper.reconcile.gce_api import DEFAULT_ENDPOINT, Api, MetadataToken
from spotkeeper.reconcile.gce_hints import Hints
from spotkeeper.reconcile.gce_lists import Lists
from spotkeeper.reconcile.gce_verbs import GceVerbs
from spotkeeper.reconcile.gce_wire import (
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
from spotkeeper.spec.cloud import Action, Listing, Result, Snapshot
from spotkeeper.spec.market import Chances, PriceRun
from spotkeeper.spec.stack import StackState

PARALLEL_LISTS = 8
OPERATIONS = " OR ".join(f'operationType = "{kind}"' for kind in ("insert", *ENDINGS))
OPERATION_PAGES = 4  # newest first; older failures were seen by earlier rounds

log = logging.getLogger(__name__)


class Gce:
    """The cloud of one stack.

    Args:
        stack: what Pulumi declared; names pools, templates, zones and the project.
        api: where the calls go.
        clock: for the time in results.
        addresses: what its machines may have; by default, private ones.
    """

    def __init__(self, stack: StackState, api: Api, clock: Clock, addresses: Addresses | None = None) -> None:
        self._stack = stack
        self._clock = clock
        self._addresses = addresses or Addresses()
        self._lists = Lists(api, stack.project, stack.stack)
        self._verbs = GceVerbs(stack, api)
        self._hints = Hints(stack, api, clock)

    def list(self, stack: str) -> Listing:
        """One look over all zones, by label. A zone with an error or a warning is not in ``answered``."""
        zones = self._stack.zones()
        ends = time.monotonic() + LOOK_S
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
            # A snapshot that cannot be seen could be taken for one that must be made again.
            answered=answered if found is not None else frozenset(),
            results=tuple(result for zone, of in operations.items() for result in self._failed(stack, zone, of)),
            ran=tuple(ran for zone, of in operations.items() for ran in to_ran(of, stack, zone)),
        )

    def _snapshots(self, stack: str, ends: float) -> tuple[Snapshot, ...] | None:
        """None: not known."""
        try:
            found = self._lists.ours("global/snapshots", SnapshotIn, ends)
        except ListError as error:
            log.warning("snapshots did not answer: %s", error)
            return None
        return known(to_snapshot(item, stack) for item in found)

    def _operations(self, zone: str, ends: float) -> builtins.list[OperationIn]:
        """What was made and what ended lately. Advisory: where this list fails, a later one tells."""
        try:
            return self._lists.newest(f"zones/{zone}/operations", OperationIn, OPERATIONS, OPERATION_PAGES, ends)
        except ListError as error:
            log.warning("operations of zone %s did not answer: %s", zone, error)
            return []

    def _failed(self, stack: str, zone: str, operations: builtins.list[OperationIn]) -> Iterable[Result]:
        """Inserts that were accepted and failed since."""
        now = self._clock.now()  # a time of the cloud's future would keep its offer cold until then
        found = known(to_result(item, stack, zone, self._verbs.asked) for item in operations)
        return (replace(result, at=min(result.at, now)) for result in found)

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Spot prices of the pool's machine type in the stack's region; None where the cloud does not tell them."""
        return self._hints.prices(pool, deadline_s)

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """How likely machines are to be had in each zone, and to stay, as the cloud guesses; None: unknown."""
        return self._hints.chances(pool, deadline_s)

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Make one call. Never raises for what a cloud can answer; ACCEPTED means on its way, not done."""
        return perform(self._verbs, action, deadline_s, self._clock)


def open_gce(stack: StackState, clock: Clock, endpoint: str | None = None) -> Gce:
    """The stack's cloud with this machine's identity.

    Args:
        endpoint: root of the Compute API; None means Google's. Plain http is taken for loopback only,
            and gets a token only where ``GCE_METADATA_HOST`` names who gives it.
    """
    root = endpoint or DEFAULT_ENDPOINT
    wants_token = root.startswith("https://") or "GCE_METADATA_HOST" in os.environ
    api = Api(root, MetadataToken(clock) if wants_token else None)
    return Gce(stack, api, clock, addresses_around(root))
