"""Who may do what with a thing, as IAM keeps it: whole policies, changed by whoever has read the newest.

Only kept: this cloud lets the operator do everything, and machines what ``storage.py`` says.
"""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.local import errors
from spotkeeper.local.errors import ApiError
from spotkeeper.local.tags import fingerprint
from spotkeeper.local.wire import BodyError, JsonObject, JsonValue, parse, to_json
from spotkeeper.local.world import World

KIND = "policies"
WITH_CONDITIONS = 3


class Condition(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``expression``: in CEL, which nobody evaluates here."""

    expression: str
    title: str = ""
    description: str = ""
    location: str = ""


class Binding(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    role: str
    members: list[str] = []
    condition: Condition | None = None


class Policy(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """``etag``: of which version this is, or a change is meant for ("": of any)."""

    etag: str = ""
    version: int = 1
    bindings: list[Binding] = []


class Policies:
    def __init__(self, world: World) -> None:
        self._world = world

    def get(self, path: str) -> JsonObject:
        """Of a thing that is there; one that nobody has set lets nobody in."""
        return to_json(self._found(path))

    def put(self, path: str, body: JsonValue) -> JsonObject:
        """Replace the whole policy.

        Raises:
            ApiError: 400 for what is none, 409 where somebody else has changed it since it was read.
        """
        try:
            new = parse(body, Policy)
        except BodyError as bad:
            raise ApiError(400, "badRequest", str(bad)) from None
        if new.etag not in ("", self._found(path).etag):
            message = "There were concurrent policy changes. Please retry the whole read-modify-write."
            raise ApiError(409, "aborted", message)
        if new.version < WITH_CONDITIONS and any(binding.condition for binding in new.bindings):
            raise errors.invalid("policy.version", new.version, f"Conditions need version {WITH_CONDITIONS}.")
        kept = Policy(_etag(new.bindings), new.version, new.bindings)
        self._world.state.put(KIND, path, kept)
        return to_json(kept)

    def forget(self, path: str) -> None:
        """Whatever takes the name again begins with an empty one."""
        self._world.state.delete(KIND, path)

    def _found(self, path: str) -> Policy:
        return self._world.state.get(KIND, path, Policy) or Policy(_etag([]))


def _etag(bindings: list[Binding]) -> str:
    return fingerprint([to_json(binding) for binding in bindings])
