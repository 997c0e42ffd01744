"""EC2's lists: all pages of one, whole or not at all, and zone by zone where the region does not answer as one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from spotkeeper.reconcile.adapter import LIST_S, ListError, Looked, look
from spotkeeper.reconcile.ec2_api import Api, RefusedError
from spotkeeper.reconcile.ec2_errors import classify
from spotkeeper.reconcile.ec2_wire import Instances, SnapshotIn, Snapshots, Volumes, by_tag
from spotkeeper.reconcile.wire import NoAnswerError
from spotkeeper.spec import codec
from spotkeeper.spec.cloud import Class

PAGE = 1000  # EC2's most
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
    """One question for the region (zone None); where that fails (an outage of a zone makes it), one for each zone."""

    def whole() -> Looked[T]:
        return Looked(tuple(ask(None, ends)), frozenset(zones))

    return look(what, whole, lambda zone: ask(zone, ends), zones)


def pages(api: Api, kind: type[Paged], filters: Filters, ends: float) -> list[Paged]:
    """The whole list.

    Raises:
        ListError: it did not come whole.
    """
    query: dict[str, object] = {"Filters": filters, "MaxResults": PAGE}
    if kind is Snapshots:
        query["OwnerIds"] = ["self"]  # otherwise everybody's public ones are searched
    out: list[Paged] = []
    for _ in range(MAX_PAGES):
        left = min(LIST_S, ends - time.monotonic())
        if left <= 0:
            raise ListError(f"{OPERATION[kind]}: no time left in this look")
        page = _page(api, kind, query, left)
        out.append(page)
        if not page.next_token:
            return out
        query["NextToken"] = page.next_token
    raise ListError(f"{OPERATION[kind]}: more than {MAX_PAGES} pages")


def _page(api: Api, kind: type[Paged], query: Mapping[str, object], left_s: float) -> Paged:
    try:
        return codec.convert(api.call(OPERATION[kind], left_s, query), kind)
    except RefusedError as error:
        raise ListError(str(error), classify(error.code, error.status) is Class.THROTTLED) from error
    except NoAnswerError as error:
        raise ListError(str(error)) from error
    except msgspec.ValidationError as error:
        raise ListError(f"{OPERATION[kind]}: an answer that is no list: {error}") from error


def snapshots(api: Api, stack: str, ends: float, **more: str) -> list[SnapshotIn] | None:
    """The stack's, or those of them that ``more`` fits; None: not known."""
    try:
        found = pages(api, Snapshots, by_tag(stack, **more), ends)
    except ListError as error:
        log.warning("snapshots did not answer: %s", error)
        return None
    return [item for page in found for item in page.snapshots]
