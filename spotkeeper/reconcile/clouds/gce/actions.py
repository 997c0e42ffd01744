"""The actions on Compute Engine, each by one call that does not wait for its operation.

A launch gives name, labels and placement; everything else, metadata included, comes from the instance template that
Pulumi declared.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import msgspec

from spotkeeper.contract import codec, names
from spotkeeper.contract.cloud import (
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    ResultKind,
)
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.clouds.base import Meaning
from spotkeeper.reconcile.clouds.gce.api import Answer, Api
from spotkeeper.reconcile.clouds.gce.errors import classify, detail_of, parse_error
from spotkeeper.reconcile.clouds.gce.schema import Id, OperationIn, disk_body, instance_body, partial_url

DEVICE = "sk-data"  # the agent mounts /dev/disk/by-id/google-sk-data
REMEMBERED = 10_000
GONE = Answer(404, b'{"error":{"code":404,"message":"The machine is gone","errors":[{"reason":"notFound"}]}}')


class GceVerbs:
    """The implementation of :class:`~.base.Verbs`; ``asked``: this process's requests to create, by idempotency key."""

    def __init__(self, stack: StackState, api: Api) -> None:
        self._stack = stack
        self._api = api
        self._project = f"projects/{stack.project}"
        self.asked: OrderedDict[str, InsertVm | CreateDisk] = OrderedDict()

    def insert_vm(self, action: InsertVm, ends: float) -> Meaning:
        pool = self._stack.pool(action.pool)
        template = self._stack.template(action.pool, action.model, action.zone)
        if pool is None or not template:
            told = f"pool {action.pool!r} has no {action.model.template} template for {action.zone}"
            return ResultKind.PERMANENT, told
        query = {
            "sourceInstanceTemplate": partial_url(template),
            "requestId": names.idempotency_key(
                action.job, action.uid, "insert", action.node, action.attempt, action.zone
            ),
        }
        self._remember(query["requestId"], action)
        path = f"zones/{action.zone}/instances"
        return self._create(path, query, instance_body(self._stack.stack, pool, action), ends)

    def delete_vm(self, action: DeleteVm, ends: float) -> Meaning:
        path = f"zones/{action.zone}/instances/{action.name}"
        other = self._other(path, action.uid, ends)
        if other is None:
            return self._delete(path, ends)
        return (ResultKind.ACCEPTED, "was gone") if other is GONE else meaning(other)

    def create_disk(self, action: CreateDisk, ends: float) -> Meaning:
        pool = self._stack.pool(action.pool)
        if pool is None:
            return ResultKind.PERMANENT, f"no pool {action.pool!r} in the stack"
        query = {
            "requestId": names.idempotency_key(action.job, action.uid, "disk", action.node, action.number, action.zone)
        }
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
        path = f"zones/{action.zone}/instances/{action.vm}"
        other = self._other(path, action.vm_uid, ends)
        return meaning(other or self._post(f"{path}/attachDisk", {}, body, ends))

    def detach_disk(self, action: DetachDisk, ends: float) -> Meaning:
        path = f"zones/{action.zone}/instances/{action.vm}"
        answer = self._other(path, action.vm_uid, ends)
        answer = answer or self._post(f"{path}/detachDisk", {"deviceName": DEVICE}, None, ends)
        if answer.status == 404 or (answer.status == 400 and b"No attached disk" in answer.body):
            return ResultKind.ACCEPTED, "was not attached"
        return meaning(answer)

    def delete_disk(self, action: DeleteDisk, ends: float) -> Meaning:
        return self._delete(f"zones/{action.zone}/disks/{action.disk}", ends)

    def create_snapshot(self, action: CreateSnapshot, ends: float) -> Meaning:
        stack = self._stack.stack
        disk = names.disk_name(stack, action.job, action.node, action.number)
        copy = names.disk_name(stack, action.job, action.node, action.copy)
        labels = {
            names.LABEL_STACK: stack,
            names.LABEL_JOB: action.job,
            names.LABEL_NODE: str(action.node),
        }
        path = f"zones/{action.zone}/disks/{disk}/createSnapshot"
        body: dict[str, object] = {"name": copy, "labels": labels}
        if action.region:
            body["storageLocations"] = [action.region]
        answer = self._post(path, {}, body, ends)
        return (ResultKind.ACCEPTED, "is there already") if answer.status == 409 else meaning(answer)

    def delete_snapshot(self, action: DeleteSnapshot, ends: float) -> Meaning:
        return self._delete(f"global/snapshots/{action.name}", ends)

    def _remember(self, key: str, action: InsertVm | CreateDisk) -> None:
        """Remember the action: if it fails later, its operation in the listing lacks pool and provisioning model."""
        self.asked[key] = action
        while len(self.asked) > REMEMBERED:
            self.asked.popitem(last=False)

    def _create(self, path: str, query: dict[str, str], body: dict[str, object], ends: float) -> Meaning:
        """Create a machine or disk with an idempotency key. If the name exists already, it counts as created."""
        answer = self._post(path, query, body, ends)
        if answer.status == 409:
            return ResultKind.ACCEPTED, "is there already"
        kind, detail = meaning(answer)
        if kind is ResultKind.ACCEPTED and (dead := self._replayed(path, str(body["name"]), answer, ends)):
            return ResultKind.DEAD_KEY, dead
        return kind, detail

    def _replayed(self, path: str, name: str, answer: Answer, ends: float) -> str:
        """Return why the idempotency key is used up; "" if the resource that was created with it still exists.

        Compute Engine answers a repeated key with the first call's operation, even if its resource is deleted by now.
        """
        operation = _operation(answer)
        if operation is None or operation.status != "DONE":
            return ""
        found = self._call("GET", f"{path}/{name}", ends)
        if found.status == 404:
            return f"{name} was created with this idempotency key and no longer exists"
        if found.status != 200:
            return ""
        there = codec.decode(found.body, Id)
        if there.id == operation.target_id:
            return ""
        return f"the {name} created with this idempotency key no longer exists; the present one is newer"

    def _other(self, path: str, uid: str, ends: float) -> Answer | None:
        """Return None if the machine at this path has this unique id; otherwise the answer to report.

        IAM conditions test names, so the action must give the name, not the numeric id. So this call compares the id
        first. No other machine can take the name before the action, because attempt numbers are never reused.
        """
        found = self._call("GET", path, ends, {"fields": "id"})
        if found.status != 200:
            return GONE if found.status == 404 else found
        return None if codec.decode(found.body, Id).id == uid else GONE

    def _delete(self, path: str, ends: float) -> Meaning:
        answer = self._call("DELETE", path, ends)
        return (ResultKind.ACCEPTED, "was gone") if answer.status == 404 else meaning(answer)

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
    """Return what the answer to a change means. HTTP 200 with a failed operation counts as a failure."""
    if not 200 <= answer.status < 300:
        return parse_error(answer.status, answer.body)
    operation = _operation(answer)
    if operation is None:
        return ResultKind.AMBIGUOUS, f"HTTP {answer.status} without an operation"
    if operation.error is not None and operation.error.errors:
        status, errors = operation.http_error_status_code, operation.error.errors
        return classify(status, errors), detail_of(status, errors)
    return ResultKind.ACCEPTED, ""


def _operation(answer: Answer) -> OperationIn | None:
    try:
        return codec.decode(answer.body, OperationIn)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
