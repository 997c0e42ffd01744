"""Serves the one bucket's objects over HTTP to VMs and the deployment: reads, uploads, deletes.

The objects are in the SQLite file that the function reads. A VM's access token gives access only to the agent's
bundles, its job's source, and its job's logs, checkpoints and output.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from email import message_from_bytes
from email.message import Message
from typing import NamedTuple
from urllib.parse import quote

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.contract.names import LABEL_JOB
from spotkeeper.local.access.auth import Principal
from spotkeeper.local.compute.resources import BUCKET, Effect, Resource, Resources
from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import decode, json_answer, refused
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.local.core.vm import LocalVm
from spotkeeper.local.core.world import World
from spotkeeper.reconcile.store.objects import BadKeyError, Blob, ConflictError, Objects
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects

_READ = re.compile(r"bundles/[^/]+\Z|jobs/(?P<job>[^/]+)/(?:source|logs|ckpt|out)/.+\Z")
_WRITE = re.compile(r"jobs/(?P<job>[^/]+)/(?:logs|ckpt|out)/.+\Z")
OCTETS = "application/octet-stream"
KINDS = "content-types"
CLASS = "STANDARD"  # of every object; Google's provider sends it when it replaces one


class ContentType(Struct, frozen=True):
    """An object's content type, which the SQLite file does not store; only a deployment reads it."""

    value: str


class Buckets(Effect):
    """The effect of ``storage:bucket``. A one-machine cloud has one bucket: ``bucket.sqlite`` in its folder."""

    def __init__(self, world: World, resources: Resources) -> None:
        self._world = world
        self._resources = resources
        self.objects: Objects = SqliteObjects(world.folder / "bucket.sqlite")
        resources.register(BUCKET, self)

    def check(self, name: str, properties: JsonObject) -> None:
        others = [bucket.name for bucket in self._resources.list(BUCKET) if bucket.name != name]
        if others:
            raise errors.not_built(f"a second bucket beside {others[0]}")

    def apply(self, resource: Resource) -> dict[str, str]:
        self.objects.list("stack/")  # makes the file
        return {}

    def remove(self, resource: Resource) -> None:
        """Delete the bucket's objects; like the provider, refuse if it has objects and no forceDestroy."""
        if resource.properties.get("forceDestroy") is not True:
            self.must_be_empty(resource.name)
        for key in self.objects.list(""):
            self.delete(key)

    def must_be_empty(self, name: str) -> None:
        """Raise ApiError (409) if the bucket has objects; the API has no force option."""
        if self.objects.list(""):
            raise ApiError(409, "conflict", f"The bucket {name} you tried to delete is not empty.")

    def put(self, key: str, data: bytes, kind: str, *, new: bool = False) -> None:
        """Store an object. ``kind``: its content type; ``new``: refuse to replace one, with ConflictError."""
        if new:
            self.objects.create(key, data)
        else:
            self.objects.put(key, data)
        with self._world.state.transaction():
            self._world.state.put(KINDS, key, ContentType(kind))

    def delete(self, key: str) -> None:
        self.objects.delete(key)
        with self._world.state.transaction():
            self._world.state.delete(KINDS, key)

    def about(self, bucket: str, key: str, endpoint: str) -> JsonObject | None:
        """Return an object as the API shows it; None if it is missing."""
        blob = self.objects.get(key)
        if blob is None:
            return None
        kept = self._world.state.get(KINDS, key, ContentType)
        return _object_resource(endpoint, bucket, key, blob, kept.value if kept else OCTETS)

    def listed(self, bucket: str, prefix: str, endpoint: str) -> Iterator[JsonObject]:
        """All objects whose name begins with ``prefix``, in order."""
        for key in self.objects.list(""):
            found = self.about(bucket, key, endpoint) if key.startswith(prefix) else None
            if found is not None:
                yield found

    def read(self, bucket: str, key: str) -> bytes | None:
        """Return an object's bytes; None if the bucket or the object is missing."""
        if self._resources.get(BUCKET, bucket) is None:
            return None
        blob = self.objects.get(key)
        return blob.data if blob else None


FindPrincipal = Callable[[Request], Principal | None]


class StorageApi:
    """The HTTP interface of objects. ``endpoint``: root of this cloud, for links; ``find_vm``: finds a VM by path."""

    def __init__(
        self,
        endpoint: str,
        buckets: Buckets,
        resources: Resources,
        find_principal: FindPrincipal,
        find_vm: Callable[[str], LocalVm | None],
    ) -> None:
        self._endpoint = endpoint
        self._buckets = buckets
        self._resources = resources
        self._find_principal = find_principal
        self._find_vm = find_vm

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
                raise errors.not_built("replacing one version over HTTP (the function writes the SQLite file itself)")
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
        """Raise ApiError (403) if a VM uses another path than its own; the operator and the function may use all."""
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
    """Read an upload in one piece: the bytes alone, or a description and the bytes.

    Raises:
        ApiError: 400 for a malformed body, 501 for an upload in several pieces.
    """
    how, kind = request.query_params.get("uploadType"), request.headers.get("content-type", "")
    name = request.query_params.get("name", "")
    if how == "media":
        return Upload(name, kind or OCTETS, body)
    if how != "multipart":
        raise errors.not_built(f"uploadType={how}")
    boundary = Message()
    boundary["content-type"] = kind
    mark = b"\r\n--" + str(boundary.get_param("boundary", "")).encode()
    parts = (b"\r\n" + body).split(mark)
    if len(parts) != 4 or not parts[-1].startswith(b"--"):
        raise ApiError(400, "badRequest", "Expected a description and the object's bytes, in multipart/related.")
    _, _, told = parts[1].partition(b"\r\n\r\n")
    head, _, data = parts[2].partition(b"\r\n\r\n")
    about = decode(told)
    if not isinstance(about, dict):
        raise ApiError(400, "parseError", "Expected a description of the object.")
    if about.get("storageClass") == CLASS:
        del about["storageClass"]
    unknown = sorted(set(about) - {"bucket", "name", "contentType", "kind"})
    if unknown:
        raise errors.not_built(f"object field '{unknown[0]}'")
    return Upload(name or str(about.get("name", "")), str(about.get("contentType", "")) or _kind(head), data)


def _kind(head: bytes) -> str:
    """The content type in a part's header."""
    return str(message_from_bytes(head.strip() + b"\r\n\r\n").get("content-type", OCTETS))


def described(endpoint: str, what: str, bucket: str, key: str = "") -> JsonObject:
    """The fields that buckets and objects share."""
    path = f"/b/{bucket}" + (f"/o/{quote(key, safe='')}" if key else "")
    about: JsonObject = {"kind": f"storage#{what}", "name": key or bucket, "selfLink": f"{endpoint}/storage/v1{path}"}
    return {**about, "id": bucket} if not key else about


def _object_resource(endpoint: str, bucket: str, key: str, blob: Blob, kind: str) -> JsonObject:
    md5 = base64.b64encode(hashlib.md5(blob.data, usedforsecurity=False).digest()).decode()
    about = described(endpoint, "object", bucket, key)
    media = f"{about['selfLink']}?generation={blob.tag}&alt=media".replace("/storage/", "/download/storage/")
    return {
        **about,
        "id": f"{bucket}/{key}/{blob.tag}",
        "bucket": bucket,
        "generation": blob.tag,
        "metageneration": "1",
        "contentType": kind,
        "storageClass": CLASS,
        "size": str(len(blob.data)),
        "md5Hash": md5,
        "mediaLink": media,
        "etag": blob.tag,
    }
