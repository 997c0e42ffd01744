"""What reconcile does on Compute Engine: a call for each kind of action. Waits for no operation.

A body says name, labels and placement; everything else comes from the template that Pulumi declared, and metadata
never from here.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from spotkeeper.reconcile.adapter import Meaning
from spotkeeper.reconcile.gce_api import Answer, Api
from spotkeeper.reconcile.gce_errors import classify, detail_of, parse_error
from spotkeeper.reconcile.gce_wire import Id, OperationIn, disk_body, instance_body, partial_url
from spotkeeper.spec import codec, names
from spotkeeper.spec.cloud import (
    AttachDisk,
    Class,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
)
from spotkeeper.spec.stack import StackState

DEVICE = "sk-data"  # the agent mounts /dev/disk/by-id/google-sk-data
REMEMBERED = 10_000


class GceVerbs:
    """:class:`~spotkeeper.reconcile.adapter.Verbs`. ``asked``: creations by idempotency key; to name failures."""

    def __init__(self, stack: StackState, api: Api) -> None:
        self._stack = stack
        self._api = api
        self._project = f"projects/{stack.project}"
        self.asked: OrderedDict[str, InsertVm | CreateDisk] = OrderedDict()

    def insert_vm(self, action: InsertVm, ends: float) -> Meaning:
        pool = self._stack.pool(action.pool)
        template = pool.templates.get(action.model.value) if pool else None
        if pool is None or not template:
            return Class.PERMANENT, f"pool {action.pool!r} has no {action.model.value} template"
        query = {
            "sourceInstanceTemplate": partial_url(template),
            "requestId": names.idempotency_key(action.uid, "insert", action.rank, action.attempt, action.zone),
        }
        self._remember(query["requestId"], action)
        path = f"zones/{action.zone}/instances"
        return self._create(path, query, instance_body(self._stack.stack, pool, action), ends)

    def delete_vm(self, action: DeleteVm, ends: float) -> Meaning:
        return self._delete(f"zones/{action.zone}/instances/{action.uid}", ends)

    def create_disk(self, action: CreateDisk, ends: float) -> Meaning:
        pool = self._stack.pool(action.pool)
        if pool is None:
            return Class.PERMANENT, f"no pool {action.pool!r} in the stack"
        query = {"requestId": names.idempotency_key(action.uid, "disk", action.rank, action.number, action.zone)}
        self._remember(query["requestId"], action)
        return self._create(f"zones/{action.zone}/disks", query, disk_body(self._stack, pool, action), ends)

    def attach_disk(self, action: AttachDisk, ends: float) -> Meaning:
        source = f"{self._project}/zones/{action.zone}/disks/{action.disk}"
        body: dict[str, object] = {
            "source": source,
            "deviceName": DEVICE,
            "mode": "READ_WRITE",
            "type": "PERSISTENT",
            "autoDelete": False,
        }
        return meaning(self._post(f"zones/{action.zone}/instances/{action.vm_uid}/attachDisk", {}, body, ends))

    def detach_disk(self, action: DetachDisk, ends: float) -> Meaning:
        path = f"zones/{action.zone}/instances/{action.vm_uid}/detachDisk"
        answer = self._post(path, {"deviceName": DEVICE}, None, ends)
        if answer.status == 404 or (answer.status == 400 and b"No attached disk" in answer.body):
            return Class.ACCEPTED, "was not attached"
        return meaning(answer)

    def delete_disk(self, action: DeleteDisk, ends: float) -> Meaning:
        return self._delete(f"zones/{action.zone}/disks/{action.disk}", ends)

    def create_snapshot(self, action: CreateSnapshot, ends: float) -> Meaning:
        stack = self._stack.stack
        disk = names.disk_name(stack, action.job, action.rank, action.number)
        copy = names.disk_name(stack, action.job, action.rank, action.copy)
        labels = {
            names.LABEL_STACK: stack,
            names.LABEL_JOB: action.job,
            names.LABEL_RANK: str(action.rank),
        }
        path = f"zones/{action.zone}/disks/{disk}/createSnapshot"
        answer = self._post(path, {}, {"name": copy, "labels": labels}, ends)
        return (Class.ACCEPTED, "is there already") if answer.status == 409 else meaning(answer)

    def delete_snapshot(self, action: DeleteSnapshot, ends: float) -> Meaning:
        return self._delete(f"global/snapshots/{action.name}", ends)

    def _remember(self, key: str, action: InsertVm | CreateDisk) -> None:
        """An operation that fails later does not say which pool and model it was for; this process may know."""
        self.asked[key] = action
        while len(self.asked) > REMEMBERED:
            self.asked.popitem(last=False)

    def _create(self, path: str, query: dict[str, str], body: dict[str, object], ends: float) -> Meaning:
        """A creation with an idempotency key. The name being there already is what was wanted."""
        answer = self._post(path, query, body, ends)
        if answer.status == 409:
            return Class.ACCEPTED, "is there already"
        kind, detail = meaning(answer)
        if kind is Class.ACCEPTED and (dead := self._replayed(path, str(body["name"]), answer, ends)):
            return Class.DEAD_KEY, dead
        return kind, detail

    def _replayed(self, path: str, name: str, answer: Answer, ends: float) -> str:
        """Why the key is used up, or "". A key seen before gives the old operation, ended, though its thing is gone."""
        operation = _operation(answer)
        if operation is None or operation.status != "DONE":
            return ""
        found = self._call("GET", f"{path}/{name}", ends)
        if found.status == 404:
            return f"the key's {name} was made and is gone"
        if found.status != 200:
            return ""
        there = codec.decode(found.body, Id)
        return "" if there.id == operation.target_id else f"the key's {name} is gone, another has its name"

    def _delete(self, path: str, ends: float) -> Meaning:
        answer = self._call("DELETE", path, ends)
        return (Class.ACCEPTED, "was gone") if answer.status == 404 else meaning(answer)

    def _post(self, path: str, query: dict[str, str], body: dict[str, object] | None, ends: float) -> Answer:
        return self._call("POST", path, ends, query, body)

    def _call(
        self,
        method: str,
        path: str,
        ends: float,
        query: dict[str, str] | None = None,
        body: dict[str, object] | None = None,
    ) -> Answer:
        return self._api.call(method, f"{self._project}/{path}", ends - time.monotonic(), query, body)


def meaning(answer: Answer) -> Meaning:
    """What the answer to a mutation means: 200 with a failed operation is a failure."""
    if not 200 <= answer.status < 300:
        return parse_error(answer.status, answer.body)
    operation = _operation(answer)
    if operation is None:
        return Class.AMBIGUOUS, f"HTTP {answer.status} without an operation"
    if operation.error is not None and operation.error.errors:
        status, errors = operation.http_error_status_code, operation.error.errors
        return classify(status, errors), detail_of(status, errors)
    return Class.ACCEPTED, ""


def _operation(answer: Answer) -> OperationIn | None:
    try:
        return codec.decode(answer.body, OperationIn)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
