"""The one bucket and its objects, in the SQLite file that the function reads; ``bucket_api.py`` serves them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from urllib.parse import quote

from msgspec import Struct

from spotkeeper.local.compute.resources import BUCKET, Effect, Resource, Resources
from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.local.core.world import World
from spotkeeper.reconcile.store.objects import Blob, Objects
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects

OCTETS = "application/octet-stream"
KINDS = "content-types"
CLASS = "STANDARD"  # storage class of every object; Google's provider sends it when it replaces an object


class ContentType(Struct, frozen=True):
    """An object's content type, kept in the cloud's ``state.sqlite``: ``bucket.sqlite`` has no column for it."""

    value: str


class Buckets(Effect):
    """Implements ``storage:bucket``. A one-machine cloud has one bucket: ``bucket.sqlite`` in its folder."""

    def __init__(self, world: World, resources: Resources) -> None:
        self._world = world
        self._resources = resources
        self.objects: Objects = SqliteObjects(world.folder / "bucket.sqlite")
        resources.register(BUCKET, self)

    def check(self, name: str, properties: JsonObject) -> None:
        others = [bucket.name for bucket in self._resources.list(BUCKET) if bucket.name != name]
        if others:
            raise errors.not_built(f"this cloud can have only one bucket, and {others[0]} exists")

    def apply(self, resource: Resource) -> dict[str, str]:
        self.objects.list("stack/")  # creates the bucket's file
        return {}

    def remove(self, resource: Resource) -> None:
        """Delete the bucket's objects; like Google's provider, refuse to delete any unless ``forceDestroy`` is true."""
        if resource.properties.get("forceDestroy") is not True:
            self.must_be_empty(resource.name)
        for key in self.objects.list(""):
            self.delete(key)

    def must_be_empty(self, name: str) -> None:
        """Raise ApiError (409) if the bucket has objects: the API, unlike the provider, cannot force a deletion."""
        if self.objects.list(""):
            raise ApiError(409, "conflict", f"The bucket {name} you tried to delete is not empty.")

    def put(self, key: str, data: bytes, kind: str, *, new: bool = False) -> None:
        """Store an object. ``kind``: its content type; ``new``: raise ConflictError instead of replacing an object."""
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
