"""The bucket over Cloud Storage's JSON API, as a deployment uses it: insert, get, patch, delete, policies, listing.

``storage.py`` serves single objects. Machines get 403. A bucket's declared fields are stored and returned; only its
name and its objects have an effect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.local.bucket.storage import FindPrincipal, described
from spotkeeper.local.compute.resources import BUCKET, Declaration, Resource
from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import decode, fingerprint, json_answer, refused, timestamp, without_nulls
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.server.wiring import CloudParts

KEPT = frozenset(
    {"labels", "location", "storageClass", "iamConfiguration", "lifecycle", "softDeletePolicy", "versioning"}
)
SHOWN = KEPT | {"timeCreated", "updated"}
Handler = Callable[[Request], Awaitable[JsonObject | None]]


class BucketApi:
    def __init__(self, parts: CloudParts, find_principal: FindPrincipal) -> None:
        self._world, self._buckets = parts.world, parts.buckets
        self._resources, self._policies = parts.resources, parts.policies
        self._find_principal = find_principal

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
            return Response(status_code=204) if body is None else json_answer(body)

        return endpoint

    def _allow(self, request: Request) -> None:
        """Refuse a request with a machine's token."""
        principal = self._find_principal(request)
        if principal is not None and principal.vm:
            raise errors.forbidden(f"{principal.email} does not have access to the bucket.")

    async def _insert(self, request: Request) -> JsonObject:
        body = _fields(decode(await request.body()))
        name = body.pop("name", None)
        if not isinstance(name, str) or not name:
            raise errors.required("name")
        now = timestamp(self._world.now())
        with self._world.state.transaction():
            made = self._resources.create(BUCKET, Declaration(name, {**body, "timeCreated": now, "updated": now}))
        return self._shown(made)

    async def _get(self, request: Request) -> JsonObject:
        return self._shown(self._found(request))

    async def _patch(self, request: Request) -> JsonObject:
        """Change the named fields; labels are replaced as a whole, unless one of them is null."""
        old = self._found(request)
        body = _fields(decode(await request.body()))
        changed = {**old.properties, **body, "updated": timestamp(self._world.now())}
        with self._world.state.transaction():
            return self._shown(self._resources.update(BUCKET, Declaration(old.name, changed)))

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
        body = decode(await request.body())
        if isinstance(body, dict):
            body = {key: value for key, value in body.items() if key not in ("kind", "resourceId")}
        with self._world.state.transaction():
            return _of_bucket(name, self._policies.put(f"buckets/{name}", body))

    async def _list(self, request: Request) -> JsonObject:
        """List all objects below a prefix at once; each has one version."""
        unknown = set(request.query_params) - {"prefix", "versions", "alt", "prettyPrint", "projection", "maxResults"}
        if unknown:
            raise errors.not_built(f"a list of objects by {', '.join(sorted(unknown))}")
        name, prefix = self._found(request).name, request.query_params.get("prefix", "")
        found: list[JsonValue] = list(self._buckets.listed(name, prefix, self._world.config.endpoint))
        return {"kind": "storage#objects", **({"items": found} if found else {})}

    async def _caches(self, request: Request) -> JsonObject:
        """List the bucket's caches in zones, of which this cloud has none."""
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
    """Return a bucket's fields in a request; ApiError 400 for another JSON type, 501 for an unsupported field."""
    clean = without_nulls(body)
    if not isinstance(clean, dict):
        raise ApiError(400, "parseError", "Expected a bucket.")
    unknown = sorted(set(clean) - KEPT - {"name", "kind"})
    if unknown:
        raise errors.not_built(f"bucket field '{unknown[0]}'")
    return {key: value for key, value in clean.items() if key != "kind"}


def _of_bucket(name: str, policy: JsonObject) -> JsonObject:
    return {"kind": "storage#policy", "resourceId": f"projects/_/buckets/{name}", **policy}
