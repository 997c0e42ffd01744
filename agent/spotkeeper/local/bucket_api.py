"""The bucket itself over Cloud Storage's JSON API: made, shown, given rights, listed and removed, as a deployment does.

Its objects, one at a time, are ``storage.py``'s. No machine gets in here. What a bucket is declared with is kept and
shown again; only its name and its objects have an effect on one machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.local import call, catalog, errors
from spotkeeper.local.errors import ApiError
from spotkeeper.local.paths import timestamp
from spotkeeper.local.policies import Policies
from spotkeeper.local.resources import BUCKET, Declared, Resource, Resources
from spotkeeper.local.storage import Buckets, Who, described, refused
from spotkeeper.local.tags import fingerprint
from spotkeeper.local.wire import JsonObject, JsonValue, without_nulls
from spotkeeper.local.world import World

KEPT = frozenset(
    {"labels", "location", "storageClass", "iamConfiguration", "lifecycle", "softDeletePolicy", "versioning"}
)
SHOWN = KEPT | {"timeCreated", "updated"}
Handler = Callable[[Request], Awaitable[JsonObject | None]]


class BucketApi:
    def __init__(self, world: World, buckets: Buckets, resources: Resources, policies: Policies, who: Who) -> None:
        self._world = world
        self._buckets = buckets
        self._resources = resources
        self._policies = policies
        self._who = who

    def routes(self) -> list[Route]:
        one = "/storage/v1/b/{bucket}"
        return [
            Route("/storage/v1/b", self._answer(self._insert), methods=["POST"]),
            Route(one, self._answer(self._get), methods=["GET"]),
            Route(one, self._answer(self._patch), methods=["PATCH"]),
            Route(one, self._answer(self._delete), methods=["DELETE"]),
            Route(f"{one}/iam", self._answer(self._get_policy), methods=["GET"]),
            Route(f"{one}/iam", self._answer(self._set_policy), methods=["PUT"]),
            Route(f"{one}/o", self._answer(self._list), methods=["GET"]),
            Route(f"{one}/anywhereCaches", self._answer(self._caches), methods=["GET"]),
        ]

    def _answer(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                self._allow(request)
                body = await handler(request)
            except ApiError as error:
                return refused(error)
            if body is None:
                return Response(status_code=204)
            return Response(msgspec.json.encode(body), media_type="application/json")

        return endpoint

    def _allow(self, request: Request) -> None:
        """Whoever names no token is the operator on this machine."""
        if "authorization" not in request.headers:
            return
        principal = self._who(request)
        if principal is None:
            raise ApiError(401, "authError", "Invalid Credentials")
        if principal.vm:
            raise errors.forbidden(f"{principal.email} does not have access to the bucket.")

    # The bucket

    async def _insert(self, request: Request) -> JsonObject:
        body = _fields(call.decode(await request.body()))
        name = body.pop("name", None)
        if not isinstance(name, str) or not name:
            raise errors.required("name")
        now = timestamp(self._world.now())
        with self._world.state.transaction():
            made = self._resources.create(BUCKET, Declared(name, {**body, "timeCreated": now, "updated": now}))
        return self._shown(made)

    async def _get(self, request: Request) -> JsonObject:
        return self._shown(self._found(request))

    async def _patch(self, request: Request) -> JsonObject:
        """What is named is changed; a map of labels as a whole, where none of them is null."""
        old = self._found(request)
        body = _fields(call.decode(await request.body()))
        changed = {**old.properties, **body, "updated": timestamp(self._world.now())}
        with self._world.state.transaction():
            return self._shown(self._resources.update(BUCKET, Declared(old.name, changed)))

    async def _delete(self, request: Request) -> None:
        found = self._found(request)
        with self._world.state.transaction():
            self._buckets.must_be_empty(found.name)
            self._resources.delete(BUCKET, found.name)
            self._policies.forget(f"buckets/{found.name}")

    async def _get_policy(self, request: Request) -> JsonObject:
        name = self._found(request).name
        return _of_bucket(name, self._policies.get(f"buckets/{name}"))

    async def _set_policy(self, request: Request) -> JsonObject:
        name = self._found(request).name
        body = call.decode(await request.body())
        if isinstance(body, dict):
            body = {key: value for key, value in body.items() if key not in ("kind", "resourceId")}
        with self._world.state.transaction():
            return _of_bucket(name, self._policies.put(f"buckets/{name}", body))

    async def _list(self, request: Request) -> JsonObject:
        """All objects at once, by their folder; each has the one version that is there."""
        unknown = set(request.query_params) - {"prefix", "versions", "alt", "prettyPrint", "projection", "maxResults"}
        if unknown:
            raise errors.not_built(f"a list of objects by {', '.join(sorted(unknown))}")
        name, prefix = self._found(request).name, request.query_params.get("prefix", "")
        found: list[JsonValue] = list(self._buckets.listed(name, prefix, self._world.config.endpoint))
        return {"kind": "storage#objects", **({"items": found} if found else {})}

    async def _caches(self, request: Request) -> JsonObject:
        """No bucket on one machine has a cache elsewhere."""
        self._found(request)
        return {"kind": "storage#anywhereCaches"}

    def _found(self, request: Request) -> Resource:
        found = self._resources.get(BUCKET, request.path_params["bucket"])
        if found is None:
            raise ApiError(404, "notFound", "The specified bucket does not exist.")
        return found

    def _shown(self, bucket: Resource) -> JsonObject:
        kept = {key: value for key, value in bucket.properties.items() if key in SHOWN}
        about = described(self._world.config.endpoint, "bucket", bucket.name)
        number = str(catalog.PROJECT_NUMBER)
        return {
            "storageClass": "STANDARD",
            "locationType": "region",
            **kept,
            **about,
            "projectNumber": number,
            "metageneration": "1",
            "etag": fingerprint(kept),
        }


def _fields(body: JsonValue) -> JsonObject:
    """
    Raises:
        ApiError: 400 for what is no bucket, 501 for a field that is not kept.
    """
    clean = without_nulls(body)
    if not isinstance(clean, dict):
        raise ApiError(400, "parseError", "Expected a bucket.")
    unknown = sorted(set(clean) - KEPT - {"name", "kind"})
    if unknown:
        raise errors.not_built(f"bucket field '{unknown[0]}'")
    return {key: value for key, value in clean.items() if key != "kind"}


def _of_bucket(name: str, policy: JsonObject) -> JsonObject:
    return {"kind": "storage#policy", "resourceId": f"projects/_/buckets/{name}", **policy}
