"""Operations: the cloud accepts each change at once and completes it later.

Each verb, a kind of operation, has two steps: ``begin`` runs when the operation turns RUNNING, ``finish`` when it turns
DONE. Both may raise :class:`FailedOperationError`. The same requestId returns the same operation, failed or not.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from msgspec import Struct

from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import FailedOperationError
from spotkeeper.local.core.rest import Ref, timestamp
from spotkeeper.local.core.schema import Operation, OperationErrors
from spotkeeper.local.core.world import World

KIND = "operations"
USER = "operator@local.iam.gserviceaccount.com"
SYSTEM = "system@google.com"


class OpDoc(Struct, frozen=True):
    """An operation and the data that its verb needs to complete it. ``target``: its resource's canonical path."""

    path: str
    verb: str
    target: str
    operation: Operation
    data: dict[str, str] = {}


@dataclass(frozen=True)
class Verb:
    """The two steps of an operation.

    ``begin`` returns the virtual seconds until ``finish``, or None if the verb itself calls :meth:`Operations.end`.
    """

    begin: Callable[[OpDoc], float | None]
    finish: Callable[[OpDoc], None]


class _Request(Struct, frozen=True):
    operation: str
    target: str


class Operations:
    def __init__(self, world: World) -> None:
        self._world = world
        self._verbs: dict[str, Verb] = {}
        self._done: list[Callable[[str], None]] = []
        world.handlers["op.run"] = self._run
        world.handlers["op.done"] = self._finish

    def register(self, verb: str, begin: Callable[[OpDoc], float | None], finish: Callable[[OpDoc], None]) -> None:
        self._verbs[verb] = Verb(begin, finish)

    def on_done(self, callback: Callable[[str], None]) -> None:
        """Register a function that is called with an operation's path after its end is on disk."""
        self._done.append(callback)

    def replay(self, project: str, request_id: str | None, target: str, verb: str) -> OpDoc | None:
        """Return the operation that this requestId has already started, even a failed one; None if it started none.

        Raises:
            ApiError: 400 for an invalid or zero UUID, or a UUID that was used for another request.
        """
        if request_id is None:
            return None
        try:
            parsed = uuid.UUID(request_id)
        except ValueError:
            raise errors.invalid("requestId", request_id, "Must be a UUID.") from None
        if parsed.int == 0:
            raise errors.invalid("requestId", request_id, "The zero UUID is not supported.")
        seen = self._world.state.get("requests", f"{project}/{parsed}", _Request)
        if seen is None:
            return None
        if seen.target != f"{verb} {target}":
            raise errors.invalid("requestId", request_id, f"This UUID was used before, for '{seen.target}'.")
        return self.get(seen.operation)

    def start(self, verb: str, target: Ref, target_id: int, request_id: str | None = None, **data: str) -> OpDoc:
        """Accept an operation: PENDING now, RUNNING after ``accept_s``. The caller must have opened a transaction."""
        doc = self._new(verb, target, target_id, request_id, USER, data)
        self._world.soon(self._world.timing.accept_s, "op.run", doc.path)
        if request_id is not None:
            key = f"{target.project}/{uuid.UUID(request_id)}"
            self._world.state.put("requests", key, _Request(doc.path, f"{verb} {target.path}"))
        return doc

    def note(self, verb: str, target: Ref, target_id: int) -> None:
        """Record an action of the provider, such as ``compute.instances.preempted``, as a completed operation."""
        doc = self._new(verb, target, target_id, None, SYSTEM, {})
        now = timestamp(self._world.now())
        self._put(doc, status="DONE", progress=100, start_time=now, end_time=now)

    def _new(
        self, verb: str, target: Ref, target_id: int, request_id: str | None, user: str, data: dict[str, str]
    ) -> OpDoc:
        world = self._world
        number = world.new_id()
        name = f"operation-{int(world.now() * 1000)}-{number:x}"
        path = Ref(target.project, target.scope, KIND, name).path
        scope, link = target.scope.split("/")[0], world.self_link(f"projects/{target.project}/{target.scope}")
        operation = Operation(
            kind="compute#operation",
            id=number,
            name=name,
            operation_type=_type(verb),
            target_link=world.self_link(target.path),
            target_id=target_id,
            status="PENDING",
            user=user,
            insert_time=timestamp(world.now()),
            self_link=world.self_link(path),
            progress=0,
            client_operation_id=request_id,
            zone=link if scope == "zones" else None,
            region=link if scope == "regions" else None,
        )
        doc = OpDoc(path, verb, target.path, operation, data)
        world.state.put(KIND, path, doc)
        return doc

    def get(self, path: str) -> OpDoc | None:
        return self._world.state.get(KIND, path, OpDoc)

    def list(self, prefix: str) -> list[OpDoc]:
        return self._world.state.all(KIND, OpDoc, prefix)

    def _put(self, doc: OpDoc, **changes: object) -> OpDoc:
        changed = msgspec.structs.replace(doc, operation=msgspec.structs.replace(doc.operation, **changes))
        self._world.state.put(KIND, doc.path, changed)
        return changed

    def _run(self, path: str) -> None:
        doc = self.get(path)
        if doc is None or doc.operation.status != "PENDING":
            return
        doc = self._put(doc, status="RUNNING", start_time=timestamp(self._world.now()))
        try:
            delay_s = self._verbs[doc.verb].begin(doc)
        except FailedOperationError as failure:
            self.end(path, failure)
            return
        if delay_s is not None:
            self._world.soon(delay_s, "op.done", path)

    def _finish(self, path: str) -> None:
        doc = self.get(path)
        if doc is None or doc.operation.status != "RUNNING":
            return
        try:
            self._verbs[doc.verb].finish(doc)
        except FailedOperationError as failure:
            self.end(path, failure)
            return
        self.end(path)

    def show_error(self, path: str, failure: FailedOperationError) -> None:
        """Add an error to an operation that still runs: Compute Engine shows a stockout before the operation ends."""
        doc = self.get(path)
        if doc is not None and doc.operation.status == "RUNNING":
            self._put(doc, **_failure(failure))

    def end(self, path: str, failure: FailedOperationError | None = None) -> None:
        """End the operation, with an error if it failed; no effect on an ended operation."""
        doc = self.get(path)
        if doc is None or doc.operation.status == "DONE":
            return
        now = timestamp(self._world.now())
        extra = _failure(failure) if failure else {}
        self._put(doc, status="DONE", progress=100, start_time=doc.operation.start_time or now, end_time=now, **extra)
        for callback in self._done:
            self._world.state.after(lambda callback=callback: callback(path))  # type: ignore[misc]


def _type(verb: str) -> str:
    """The operation's type as the API shows it: "insert" for ``insertDisk``."""
    return next((plain for plain in ("insert", "delete") if verb.startswith(plain)), verb)


def _failure(failure: FailedOperationError) -> dict[str, OperationErrors | int | str]:
    return {
        "error": failure.error,
        "http_error_status_code": failure.status,
        "http_error_message": HTTPStatus(failure.status).phrase.upper(),
    }
