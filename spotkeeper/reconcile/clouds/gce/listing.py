"""Compute Engine's lists. A list is complete or fails; if the list of all zones fails, each zone is listed by itself.

A list requests only the fields that are used, a tenth of an instance's 4 KB of JSON: a list of 10,000 whole instances
would have 40 MB. The fields are named as in Google's partial responses (``items/*/instances(name,disks(source))``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import msgspec
from msgspec import inspect

from spotkeeper.contract import codec
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.clouds.base import LIST_S, ListError, Looked, look
from spotkeeper.reconcile.clouds.gce.api import Api, NoAnswerError
from spotkeeper.reconcile.clouds.gce.errors import parse_error
from spotkeeper.reconcile.clouds.gce.schema import Aggregated, Page, Part, by_label, is_partial, last_part

PAGE = 500
MAX_PAGES = 200  # 100,000 items; an endless chain of pages must not block a round

MORE = "nextPageToken,warning/code"
T = TypeVar("T")
log = logging.getLogger(__name__)


class Lists:
    """The lists of one stack. Thread-safe. ``ends`` is a deadline on ``time.monotonic``."""

    def __init__(self, api: Api, project: str, stack: str) -> None:
        self._api = api
        self._project = f"projects/{project}"
        self._stack = stack
        self._whole = False  # whether requests name no fields

    def everywhere(self, what: str, kind: type[T], zones: Sequence[str], ends: float) -> Looked[T]:
        """List *all* zones, so that resources in a zone that the stack no longer uses are seen too.

        If this fails, each of ``zones`` is listed by itself.
        """
        return look(
            what,
            lambda: self._aggregated(what, kind, zones, ends),
            lambda zone: self.ours(f"zones/{zone}/{what}", kind, ends),
            zones,
        )

    def ours(self, path: str, kind: type[T], ends: float) -> list[T]:
        """Return the whole list of items with the stack's label.

        Raises:
            ListError: the list is incomplete.
        """
        return self._pages(path, kind, {"filter": by_label(self._stack)}, ends)

    def newest(self, path: str, kind: type[T], matching: str, pages: int, ends: float) -> list[T]:
        """Return the newest items that match a filter, newest first, at most this many ``pages``.

        Raises:
            ListError: a page failed.
        """
        return self._pages(path, kind, {"filter": matching, "orderBy": "creationTimestamp desc"}, ends, pages)

    def _aggregated(self, what: str, kind: type[T], zones: Sequence[str], ends: float) -> Looked[T]:
        items: list[T] = []
        silent: set[str] = set()
        seen: set[str] = set(zones)
        query = {"filter": by_label(self._stack), "maxResults": str(PAGE), "fields": of_all_zones(what, kind)}
        for _ in range(MAX_PAGES):
            page = self._get(f"aggregated/{what}", query, Aggregated[kind], ends)  # type: ignore[valid-type]
            if page.error is not None:
                raise ListError("the answer is an error, not a list")
            if is_partial(page.warning) and not page.unreachables:
                raise ListError(f"warning {page.warning.code if page.warning else ''}")
            silent |= _zones_in(page.unreachables, zones)
            for scope, part in page.items.items():
                seen.add(last_part(scope))
                if is_partial(part.warning):
                    silent.add(last_part(scope))
                items += getattr(part, what)
            if not page.next_page_token:
                return Looked(tuple(items), frozenset(seen - silent))
            query["pageToken"] = page.next_page_token
        raise ListError(f"more than {MAX_PAGES} pages")

    def _pages(
        self, path: str, kind: type[T], query: dict[str, str], ends: float, newest_pages: int | None = None
    ) -> list[T]:
        """Return the whole list, or its first ``newest_pages`` pages."""
        query = {**query, "maxResults": str(PAGE), "fields": of_a_page(kind)}
        items: list[T] = []
        for _ in range(newest_pages or MAX_PAGES):
            page = self._get(path, query, Page[kind], ends)  # type: ignore[valid-type]
            if page.error is not None:
                raise ListError("the answer is an error, not a list")
            if page.warning is not None and is_partial(page.warning):
                raise ListError(f"warning {page.warning.code}")
            items += page.items
            if not page.next_page_token:
                return items
            query["pageToken"] = page.next_page_token
        if newest_pages is None:
            raise ListError(f"more than {MAX_PAGES} pages")
        return items

    def _get(self, path: str, query: dict[str, str], kind: type[T], ends: float) -> T:
        asked = {name: value for name, value in query.items() if name != "fields"} if self._whole else query
        left = min(LIST_S, ends - time.monotonic())
        if left <= 0:
            raise ListError(f"{path}: no time is left for this listing")
        try:
            answer = self._api.call("GET", f"{self._project}/{path}", left, asked)
        except NoAnswerError as error:
            raise ListError(str(error)) from error
        if answer.status == 400 and "fields" in asked:  # a refused field must not hide the list
            log.warning("%s: %s; now requesting all fields", path, parse_error(answer.status, answer.body)[1])
            self._whole = True
            return self._get(path, query, kind, ends)
        if answer.status != 200:
            raise ListError(parse_error(answer.status, answer.body)[1])
        try:
            return codec.decode(answer.body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ListError(f"{path}: the answer is not a list: {error}") from error


def _zones_in(scopes: Iterable[str], zones: Sequence[str]) -> set[str]:
    """Return the zones in these scopes, each a zone, or a region with all of its ``zones``."""
    names = set(map(last_part, scopes))
    return names | {zone for zone in zones if region_of(zone) in names}


# -- fields of a list, from the structs that its answer is decoded into


def of_a_page(kind: type) -> str:
    return f"items({_read_of(kind)}),{MORE}"


def of_all_zones(what: str, kind: type) -> str:
    """Return the ``fields`` parameter of an aggregated list: items, and zones that did not answer."""
    return f"items/*/{what}({_read_of(kind)}),items/*/warning/code,unreachables,{MORE}"


@lru_cache(maxsize=16)
def _read_of(kind: type) -> str:
    return _names(codec.type_info(kind))


def _names(of: inspect.Type) -> str:
    """Return the fields to request of this type, nested as in ``name,disks(source)``; '' to request the whole value."""
    if isinstance(of, inspect.UnionType):
        return next((found for one in of.types if (found := _names(one))), "")
    if isinstance(of, inspect.VarTupleType):
        return _names(of.item_type)
    if not isinstance(of, inspect.StructType) or not issubclass(of.cls, Part):
        return ""
    return ",".join(_name(field.encode_name, _names(field.type)) for field in of.fields)


def _name(name: str, within: str) -> str:
    return f"{name}({within})" if within else name
