"""Lists as Compute Engine answers them: filtered, ordered, in pages, and by zone with what does not answer.

A page's token is where the next one begins, so that nothing is listed twice however much changes in between.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable

from spotkeeper.local import errors
from spotkeeper.local.call import Call
from spotkeeper.local.errors import ApiError
from spotkeeper.local.filters import Filter, FilterError
from spotkeeper.local.wire import JsonObject, JsonValue
from spotkeeper.local.world import World

MAX_RESULTS = 500
NEWEST = "creationTimestamp desc"


class Lists:
    """``down``: whether a zone does not answer now."""

    def __init__(self, world: World, down: Callable[[str], bool]) -> None:
        self._world = world
        self._down = down

    def listed(self, call: Call, kind: str, items: Iterable[JsonObject]) -> JsonObject:
        """One collection, of one place."""
        page, token = _page(call, sorted(items, key=lambda item: str(item["selfLink"])))
        out: JsonObject = {"kind": kind, "id": call.path, "selfLink": self._world.self_link(call.path)}
        if page:
            out["items"] = list(page)
        if token:
            out["nextPageToken"] = token
        return out

    def aggregated(self, call: Call, kind: str, field: str, items: list[tuple[str, JsonObject]]) -> JsonObject:
        """By zone. A zone that does not answer says so in its warning, and is no empty zone."""
        down = [zone for zone in self._world.config.zones if self._down(zone)]
        ordered = sorted((item for zone, item in items if zone not in down), key=lambda item: str(item["selfLink"]))
        page, token = _page(call, ordered)
        scopes: JsonObject = {}
        for zone in self._world.config.zones:
            here: list[JsonValue] = [item for item in page if str(item["zone"]).rsplit("/", 1)[-1] == zone]
            scopes[f"zones/{zone}"] = {field: here} if here else {"warning": _warning(zone, zone in down)}
        out: JsonObject = {
            "kind": kind,
            "id": call.path,
            "items": scopes,
            "selfLink": self._world.self_link(call.path),
        }
        if down:
            out["unreachables"] = [f"zones/{zone}" for zone in down]
            out["warning"] = _warning(down[0], unreachable=True)
        if token:
            out["nextPageToken"] = token
        return out


def _page(call: Call, items: Iterable[JsonObject]) -> tuple[list[JsonObject], str | None]:
    """Filtered and cut; the token of the next page where there is one."""
    order = call.query.get("orderBy") or "name"
    if order not in ("name", NEWEST):
        raise errors.not_built(f"orderBy={order}")
    try:
        wanted = Filter.parse(call.query["filter"]) if call.query.get("filter") else None
    except FilterError as bad:
        raise ApiError(400, "invalid", str(bad)) from None
    found = [item for item in items if wanted is None or wanted.matches(item)]
    start, size = _token(call.query.get("pageToken")), _size(call.query.get("maxResults"))
    if order == NEWEST:
        found.sort(key=_age, reverse=True)
        after, key = [item for item in found if not start or _age(item) < start], _age
    else:
        after, key = [item for item in found if not start or str(item["selfLink"]) > start], _link
    more = len(after) > size
    return after[:size], _to_token(key(after[size - 1])) if more else None


def _warning(zone: str, unreachable: bool) -> JsonObject:
    scope: JsonValue = [{"key": "scope", "value": f"zones/{zone}"}]
    if unreachable:
        return {"code": "UNREACHABLE", "message": f"The scope 'zones/{zone}' is not reachable.", "data": scope}
    message = f"There are no results for scope 'zones/{zone}' on this page."
    return {"code": "NO_RESULTS_ON_PAGE", "message": message, "data": scope}


def _size(text: str | None) -> int:
    if not text:
        return MAX_RESULTS
    if not text.isdigit() or not 1 <= int(text) <= MAX_RESULTS:
        raise errors.invalid("maxResults", text, f"Must be between 1 and {MAX_RESULTS}.")
    return int(text)


def _to_token(link: str) -> str:
    return base64.urlsafe_b64encode(link.encode()).decode()


def _link(item: JsonObject) -> str:
    return str(item["selfLink"])


def _age(item: JsonObject) -> str:
    """Orders by birth; our timestamps are all of one zone, so their text orders as they do."""
    return f"{item.get('creationTimestamp') or item.get('insertTime') or ''} {item['selfLink']}"


def _token(text: str | None) -> str:
    if not text:
        return ""
    try:
        return base64.urlsafe_b64decode(text).decode()
    except ValueError:
        raise errors.invalid("pageToken", text, "The page token is malformed.") from None
