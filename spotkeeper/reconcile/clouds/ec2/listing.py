"""EC2's lists. A list is complete or fails; if the region's list fails, each zone is listed by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.cloud import ResultKind
from spotkeeper.reconcile.clouds.base import LIST_S, ListError, Looked, look
from spotkeeper.reconcile.clouds.ec2.api import Api, Ec2RefusedError
from spotkeeper.reconcile.clouds.ec2.errors import classify
from spotkeeper.reconcile.clouds.ec2.schema import Instances, SnapshotIn, Snapshots, Volumes, by_tag
from spotkeeper.reconcile.clouds.http_client import NoAnswerError

PAGE = 1000  # EC2's maximum
MAX_PAGES = 100

T = TypeVar("T")
Paged = TypeVar("Paged", Instances, Volumes, Snapshots)
Filters = Sequence[Mapping[str, object]]
OPERATION: dict[type, str] = {
    Instances: "describe_instances",
    Volumes: "describe_volumes",
    Snapshots: "describe_snapshots",
}
log = logging.getLogger(__name__)


def everywhere(
    what: str, ask: Callable[[str | None, float], list[T]], zones: tuple[str, ...], ends: float
) -> Looked[T]:
    """List the whole region by one request; if it fails, as in the outage of a zone, list each zone by itself."""

    def whole() -> Looked[T]:
        return Looked(tuple(ask(None, ends)), frozenset(zones))

    return look(what, whole, lambda zone: ask(zone, ends), zones)


def pages(api: Api, kind: type[Paged], filters: Filters, ends: float) -> list[Paged]:
    """Return the whole list, from all of its pages.

    Raises:
        ListError: the list is incomplete.
    """
    query: dict[str, object] = {"Filters": filters, "MaxResults": PAGE}
    if kind is Snapshots:
        query["OwnerIds"] = ["self"]  # otherwise EC2 searches all public snapshots
    out: list[Paged] = []
    for _ in range(MAX_PAGES):
        left = min(LIST_S, ends - time.monotonic())
        if left <= 0:
            raise ListError(f"{OPERATION[kind]}: no time is left for this listing")
        page = _page(api, kind, query, left)
        out.append(page)
        if not page.next_token:
            return out
        query["NextToken"] = page.next_token
    raise ListError(f"{OPERATION[kind]}: more than {MAX_PAGES} pages")


def _page(api: Api, kind: type[Paged], query: Mapping[str, object], left_s: float) -> Paged:
    try:
        return codec.convert(api.call(OPERATION[kind], left_s, query), kind)
    except Ec2RefusedError as error:
        raise ListError(str(error), classify(error.code, error.status) is ResultKind.THROTTLED) from error
    except NoAnswerError as error:
        raise ListError(str(error)) from error
    except msgspec.ValidationError as error:
        raise ListError(f"{OPERATION[kind]}: the answer is not a list: {error}") from error


def snapshots(api: Api, stack: str, ends: float, **more: str) -> list[SnapshotIn] | None:
    """Return the stack's snapshots that match the filters ``more``; None if the list failed."""
    try:
        found = pages(api, Snapshots, by_tag(stack, **more), ends)
    except ListError as error:
        log.warning("listing the snapshots failed: %s", error)
        return None
    return [item for page in found for item in page.snapshots]
