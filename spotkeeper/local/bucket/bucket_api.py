"""Cloud Storage's JSON API: the bucket as a deployment uses it, and single objects for VMs and the deployment.

``BucketApi``: insert, get, patch, delete, policies, listing. Machines get 403. A bucket's declared fields are stored
and returned; only its name and its objects have an effect. ``StorageApi``: reads, uploads, deletes. A VM's access token
gives access only to the agent's bundles, its job's source, and its job's logs, checkpoints and output.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from email import message_from_bytes
from email.message import Message
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.contract.names import LABEL_JOB
from spotkeeper.local.access.auth import Principal
from spotkeeper.local.bucket.storage import CLASS, OCTETS, described
from spotkeeper.local.compute.resources import BUCKET, Declaration, Resource
from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import decode, fingerprint, json_answer, refused, timestamp, without_nulls
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.server.wiring import CloudParts
from spotkeeper.reconcile.store.objects import BadKeyError, ConflictError

KEPT = frozenset(
    {"labels", "location", "storageClass", "iamConfiguration", "lifecycle", "softDeletePolicy", "versioning"}
)
SHOWN = KEPT | {"timeCreated", "updated"}
_READ = re.compile(r"bundles/[^/]+\Z|jobs/(?P<job>[^/]+)/(?:source|logs|ckpt|out)/.+\Z")
_WRITE = re.compile(r"jobs/(?P<job>[^/]+)/(?:logs|ckpt|out)/.+\Z")
FindPrincipal = Callable[[Request], Principal | None]
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
        """Refuse a request that carries a machine's token."""
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
        """Change the fields that the body has; labels are replaced as a whole."""
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
        """List all objects below a prefix in one answer.

        ``versions`` and ``maxResults`` have no effect: each object has one version, and lists have no pages.
        """
        unknown = set(request.query_params) - {"prefix", "versions", "alt", "prettyPrint", "projection", "maxResults"}
        if unknown:
            raise errors.not_built(f"a list of objects cannot have the parameters {', '.join(sorted(unknown))}")
        name, prefix = self._found(request).name, request.query_params.get("prefix", "")
        found: list[JsonValue] = list(self._buckets.listed(name, prefix, self._world.config.endpoint))
        return {"kind": "storage#objects", **({"items": found} if found else {})}

    async def _caches(self, request: Request) -> JsonObject:
        """Return an empty list, because this cloud has no zonal caches of buckets."""
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
    """Return the bucket's fields in a request body; ApiError 400 if not an object, 501 for an unsupported field."""
    clean = without_nulls(body)
    if not isinstance(clean, dict):
        raise ApiError(400, "parseError", "Expected a bucket.")
    unknown = sorted(set(clean) - KEPT - {"name", "kind"})
    if unknown:
        raise errors.not_built(f"the bucket field '{unknown[0]}' is not supported")
    return {key: value for key, value in clean.items() if key != "kind"}


def _of_bucket(name: str, policy: JsonObject) -> JsonObject:
    return {"kind": "storage#policy", "resourceId": f"projects/_/buckets/{name}", **policy}


# -- objects


class StorageApi:
    """The HTTP interface of objects."""

    def __init__(self, parts: CloudParts, find_principal: FindPrincipal) -> None:
        self._endpoint, self._find_vm = parts.world.config.endpoint, parts.machines.find
        self._buckets, self._resources, self._find_principal = parts.buckets, parts.resources, find_principal

    def routes(self) -> list[Route]:
        one = "/storage/v1/b/{bucket}/o/{object:path}"
        return [
            Route(one, self._object, methods=["GET", "DELETE"]),
            Route("/upload/storage/v1/b/{bucket}/o", self._upload, methods=["POST"]),
        ]

    async def _object(self, request: Request) -> Response:
        bucket, key = request.path_params["bucket"], request.path_params["object"]
        try:
            self._allow(request, key, write=request.method != "GET")
            self._bucket(bucket)
            blob = self._buckets.objects.get(key)
            if blob is None or request.query_params.get("generation", blob.tag) != blob.tag:
                raise ApiError(404, "notFound", f"No such object: {bucket}/{key}")
            if request.method == "DELETE":
                self._buckets.delete(key)
                return Response(status_code=204)
            if request.query_params.get("alt") != "media":
                return json_answer(self._buckets.about(bucket, key, self._endpoint) or {})
            headers = {"x-goog-generation": blob.tag, "ETag": blob.tag}
            return Response(blob.data, media_type=OCTETS, headers=headers)
        except BadKeyError as error:
            return refused(ApiError(400, "invalid", str(error)))
        except ApiError as error:
            return refused(error)

    async def _upload(self, request: Request) -> Response:
        bucket = request.path_params["bucket"]
        try:
            sent = _upload(request, await request.body())
            condition = request.query_params.get("ifGenerationMatch", "")
            if condition not in ("", "0"):
                raise errors.not_built("an upload supports only the condition ifGenerationMatch=0 (the object is new)")
            self._allow(request, sent.name, write=True)
            self._bucket(bucket)
            self._buckets.put(sent.name, sent.data, sent.kind, new=bool(condition))
            return json_answer(self._buckets.about(bucket, sent.name, self._endpoint) or {})
        except ConflictError:
            message = "At least one of the pre-conditions you specified did not hold."
            return refused(ApiError(412, "conditionNotMet", message))
        except BadKeyError as error:
            return refused(ApiError(400, "invalid", str(error)))
        except ApiError as error:
            return refused(error)

    def _bucket(self, name: str) -> None:
        if self._resources.get(BUCKET, name) is None:
            raise ApiError(404, "notFound", "The specified bucket does not exist.")

    def _allow(self, request: Request, key: str, write: bool) -> None:
        """Raise ApiError (403) if a VM uses a path that is not its own; operator and function may use all paths."""
        principal = self._find_principal(request)
        if principal is None or not principal.vm:  # the guard has refused requests without a valid token
            return
        vm = self._find_vm(principal.vm)
        found = (_WRITE if write else _READ).match(key)
        own = (vm.wire.labels or {}).get(LABEL_JOB) if vm is not None else None
        job = found.groupdict().get("job") if found else None
        # A static machine's label names no job: the allocation document assigns it one.
        if vm is None or found is None or (job is not None and own is not None and job != own):
            verb = "storage.objects.create" if write else "storage.objects.get"
            raise ApiError(403, "forbidden", f"{principal.email} does not have {verb} access to the object {key}.")


class Upload(NamedTuple):
    """An uploaded object. ``kind``: its content type."""

    name: str
    kind: str
    data: bytes


def _upload(request: Request, body: bytes) -> Upload:
    """Read a simple or a multipart upload; ApiError 400 if it is malformed, 501 if it is resumable."""
    how, kind = request.query_params.get("uploadType"), request.headers.get("content-type", "")
    name = request.query_params.get("name", "")
    if how == "media":
        return Upload(name, kind or OCTETS, body)
    if how != "multipart":
        raise errors.not_built(f"uploadType={how} is not supported")
    boundary = Message()
    boundary["content-type"] = kind
    mark = b"\r\n--" + str(boundary.get_param("boundary", "")).encode()
    parts = (b"\r\n" + body).split(mark)
    if len(parts) != 4 or not parts[-1].startswith(b"--"):
        raise ApiError(400, "badRequest", "Expected a multipart/related body: a description, then the object's bytes.")
    _, _, told = parts[1].partition(b"\r\n\r\n")
    head, _, data = parts[2].partition(b"\r\n\r\n")
    about = decode(told)
    if not isinstance(about, dict):
        raise ApiError(400, "parseError", "Expected a description of the object as a JSON object.")
    if about.get("storageClass") == CLASS:
        del about["storageClass"]
    unknown = sorted(set(about) - {"bucket", "name", "contentType", "kind"})
    if unknown:
        raise errors.not_built(f"the object field '{unknown[0]}' is not supported")
    return Upload(name or str(about.get("name", "")), str(about.get("contentType", "")) or _kind(head), data)


def _kind(head: bytes) -> str:
    return str(message_from_bytes(head.strip() + b"\r\n\r\n").get("content-type", OCTETS))
