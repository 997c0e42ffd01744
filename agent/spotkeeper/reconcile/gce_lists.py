"""Compute Engine's lists: all pages of one, whole or not at all, and zone by zone where it does not answer for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from spotkeeper.reconcile.adapter import LIST_S, ListError, Looked, look
from spotkeeper.reconcile.gce_api import Api, NoAnswerError
from spotkeeper.reconcile.gce_errors import parse_error
from spotkeeper.reconcile.gce_fields import of_a_page, of_all_zones
from spotkeeper.reconcile.gce_wire import Aggregated, Page, by_label, is_partial, last_part
from spotkeeper.spec import codec

PAGE = 500
MAX_PAGES = 200  # 100,000 things; a server that always names a next page must not hold a round for ever

T = TypeVar("T")
log = logging.getLogger(__name__)


class Lists:
    """Of one stack in one project. Thread-safe. ``ends``: of ``time.monotonic``."""

    def __init__(self, api: Api, project: str, stack: str) -> None:
        self._api = api
        self._project = f"projects/{project}"
        self._stack = stack
        self._whole = False  # whether lists are asked for without naming fields

    def everywhere(self, what: str, kind: type[T], zones: Sequence[str], ends: float) -> Looked[T]:
        """Over *all* zones, so that what is in a zone that has left the stack is still seen.

        Where that fails, ``zones`` are asked for themselves.
        """
        return look(
            what,
            lambda: self._aggregated(what, kind, zones, ends),
            lambda zone: self.ours(f"zones/{zone}/{what}", kind, ends),
            zones,
        )

    def ours(self, path: str, kind: type[T], ends: float) -> list[T]:
        """The whole list of what bears the stack's label.

        Raises:
            ListError: it did not come whole.
        """
        return self._pages(path, kind, {"filter": by_label(self._stack)}, ends)

    def newest(self, path: str, kind: type[T], matching: str, pages: int, ends: float) -> list[T]:
        """The first pages, newest first, of what fits a filter.

        Raises:
            ListError: one of them did not come.
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
                raise ListError("an error for a list")
            if is_partial(page.warning) and not page.unreachables:
                raise ListError(f"warning {page.warning.code if page.warning else ''}")
            silent |= {last_part(scope) for scope in page.unreachables}
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
        """The whole list, or its first pages where only the newest matter."""
        query = {**query, "maxResults": str(PAGE), "fields": of_a_page(kind)}
        items: list[T] = []
        for _ in range(newest_pages or MAX_PAGES):
            page = self._get(path, query, Page[kind], ends)  # type: ignore[valid-type]
            if page.error is not None:
                raise ListError("an error for a list")
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
            raise ListError(f"{path}: no time left in this look")
        try:
            answer = self._api.call("GET", f"{self._project}/{path}", left, asked)
        except NoAnswerError as error:
            raise ListError(str(error)) from error
        if answer.status == 400 and "fields" in asked:  # never a reason to see nothing
            log.warning("%s: %s; asking for whole answers", path, parse_error(answer.status, answer.body)[1])
            self._whole = True
            return self._get(path, query, kind, ends)
        if answer.status != 200:
            raise ListError(parse_error(answer.status, answer.body)[1])
        try:
            return codec.decode(answer.body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ListError(f"{path}: an answer that is no list: {error}") from error
