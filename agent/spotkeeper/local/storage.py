"""The bucket over HTTP, as VMs and the deployment use it: media reads, media uploads, deletes, one bucket.

The objects are the SQLite twin's, the very file the function reads. A VM is let in by its access token and
only to what its identity may touch: its program, its job's source, its job's logs, checkpoints and output.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.local import errors
from spotkeeper.local.errors import ApiError
from spotkeeper.local.instances import Vm
from spotkeeper.local.resources import BUCKET, Resource, Resources
from spotkeeper.local.tokens import Principal
from spotkeeper.local.wire import JsonObject
from spotkeeper.local.world import World
from spotkeeper.reconcile.objects import BadKeyError, ConflictError, Objects
from spotkeeper.reconcile.objects_sqlite import SqliteObjects
from spotkeeper.spec.names import LABEL_JOB

_READ = re.compile(r"bundles/[^/]+\Z|jobs/(?P<job>[^/]+)/(?:source|logs|ckpt|out)/.+\Z")
_WRITE = re.compile(r"jobs/(?P<job>[^/]+)/(?:logs|ckpt|out)/.+\Z")


class Buckets:
    """The effect of ``storage:bucket``. A one-machine cloud has one: ``bucket.sqlite`` in its folder."""

    def __init__(self, world: World, resources: Resources) -> None:
        self._world = world
        self._resources = resources
        self._objects = SqliteObjects(Path(world.folder) / "bucket.sqlite")
        resources.register(BUCKET, self)

    def check(self, name: str, properties: JsonObject) -> None:
        others = [bucket.name for bucket in self._resources.list(BUCKET) if bucket.name != name]
        if others:
            raise errors.not_built(f"a second bucket beside {others[0]}")

    def apply(self, resource: Resource) -> dict[str, str]:
        self.objects().list("stack/")  # makes the file
        return {}

    def remove(self, resource: Resource) -> None:
        """As the provider: a bucket with objects goes only with forceDestroy."""
        objects = self.objects()
        keys = objects.list("")
        if keys and resource.properties.get("forceDestroy") is not True:
            raise ApiError(409, "conflict", f"The bucket {resource.name} you tried to delete is not empty.")
        for key in keys:
            objects.delete(key)

    def objects(self) -> Objects:
        return self._objects

    def read(self, bucket: str, key: str) -> bytes | None:
        """An object's bytes; None where the bucket or the object is not there."""
        if self._resources.get(BUCKET, bucket) is None:
            return None
        blob = self.objects().get(key)
        return blob.data if blob else None


Who = Callable[[Request], Principal | None]


class StorageApi:
    def __init__(self, buckets: Buckets, resources: Resources, who: Who, vm: Callable[[str], Vm | None]) -> None:
        self._buckets = buckets
        self._resources = resources
        self._who = who
        self._vm = vm

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
            blob = self._buckets.objects().get(key)
            if blob is None:
                raise ApiError(404, "notFound", f"No such object: {bucket}/{key}")
            if request.method == "DELETE":
                self._buckets.objects().delete(key)
                return Response(status_code=204)
            if request.query_params.get("alt") != "media":
                return _json(_metadata(bucket, key, blob.data, blob.tag))
            headers = {"x-goog-generation": blob.tag, "ETag": blob.tag}
            return Response(blob.data, media_type="application/octet-stream", headers=headers)
        except (ApiError, BadKeyError) as error:
            return _refused(error)

    async def _upload(self, request: Request) -> Response:
        bucket, key = request.path_params["bucket"], request.query_params.get("name", "")
        try:
            if request.query_params.get("uploadType") != "media":
                raise errors.not_built(f"uploadType={request.query_params.get('uploadType')}")
            condition = request.query_params.get("ifGenerationMatch", "")
            if condition not in ("", "0"):
                raise errors.not_built("replacing one version over HTTP (the function writes the twin itself)")
            self._allow(request, key, write=True)
            self._bucket(bucket)
            data = await request.body()
            objects = self._buckets.objects()
            tag = objects.create(key, data) if condition else objects.put(key, data)
            return _json(_metadata(bucket, key, data, tag))
        except ConflictError:
            message = "At least one of the pre-conditions you specified did not hold."
            return _refused(ApiError(412, "conditionNotMet", message))
        except (ApiError, BadKeyError) as error:
            return _refused(error)

    def _bucket(self, name: str) -> None:
        if self._resources.get(BUCKET, name) is None:
            raise ApiError(404, "notFound", "The specified bucket does not exist.")

    def _allow(self, request: Request, key: str, write: bool) -> None:
        """Whoever names no token is the operator on this machine; a VM is held to its paths.

        Raises:
            ApiError: 401 for a token that does not hold, 403 for a path that is not the VM's.
        """
        if "authorization" not in request.headers:
            return
        principal = self._who(request)
        if principal is None:
            raise ApiError(401, "authError", "Invalid Credentials")
        if not principal.vm:
            return
        vm = self._vm(principal.vm)
        found = (_WRITE if write else _READ).match(key)
        own = (vm.wire.labels or {}).get(LABEL_JOB) if vm is not None else None
        job = found.groupdict().get("job") if found else None
        # A static node has no job on its label: the allocation document lends it to one.
        if vm is None or found is None or (job is not None and own is not None and job != own):
            verb = "storage.objects.create" if write else "storage.objects.get"
            raise ApiError(403, "forbidden", f"{principal.email} does not have {verb} access to the object {key}.")


def _metadata(bucket: str, key: str, data: bytes, tag: str) -> JsonObject:
    md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    about: JsonObject = {"kind": "storage#object", "bucket": bucket, "name": key, "generation": tag}
    return {**about, "size": str(len(data)), "md5Hash": md5}


def _json(body: JsonObject) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _refused(error: ApiError | BadKeyError) -> Response:
    if isinstance(error, BadKeyError):
        error = ApiError(400, "invalid", str(error))
    return Response(msgspec.json.encode(error.body()), error.code, media_type="application/json")
