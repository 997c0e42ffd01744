"""The function's interface as an OpenAPI 3.1 document, made from the types that the function itself uses.

``python -m spotkeeper.reconcile.service.openapi`` writes ``openapi.json`` beside this file; a test fails if the written
file is outdated. The package contains ``openapi.json``; the function does not import this module.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from spotkeeper.contract.generation import Sync, SyncReply
from spotkeeper.reconcile.service.http import ChannelTested, Empty, Notified
from spotkeeper.reconcile.service.request_body import MAX_BODY, MAX_DEPTH, STATUS, Push, Refusal
from spotkeeper.reconcile.service.rounds import Ticked

FILE = Path(__file__).with_suffix(".json")
_REF = "#/components/schemas/{name}"
_ABOUT = f"""One function for a stack. Bodies are JSON of at most {MAX_BODY} bytes and {MAX_DEPTH} levels, without
duplicate keys, and are read only after the caller is authenticated. A refused request gets one word, which says why."""
_CHANNEL = "^[a-z]([-a-z0-9]{0,30}[a-z0-9])?$"
Json = dict[str, object]


def document() -> Json:
    types = [Sync, SyncReply, Empty, Ticked, Notified, ChannelTested, Push]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    words = {"type": "string", "enum": sorted(word.value for word in Refusal)}
    refused = {"type": "object", "properties": {"error": words}, "required": ["error"], "additionalProperties": False}
    job = {"name": "job", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[a-z0-9]{8}$"}}
    channel = {"name": "channel", "in": "path", "required": True, "schema": {"type": "string", "pattern": _CHANNEL}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Spotkeeper reconcile", "version": "1", "description": _ABOUT},
        "paths": {
            "/v1/sync": {"post": _post("A report and the answer to it", "Sync", "SyncReply", "node")},
            "/v1/tick": {"post": _post("A round of every unfinished job", "Empty", "Ticked", "invoker")},
            "/v1/event": {"post": _event()},
            "/v1/notify/{job}": {
                "parameters": [job],
                "post": _post("A round of one job", "Empty", "Notified", "invoker", 404),
            },
            "/v1/channels/{channel}/test": {
                "parameters": [channel],
                "post": _post("A test message to a channel", "Empty", "ChannelTested", "invoker", 404),
            },
            "/v1/health": {"get": _health()},
        },
        "components": {
            "schemas": {**_plain(schemas), "Refused": refused},
            "securitySchemes": {
                "node": {"type": "http", "scheme": "bearer", "description": "A VM's own identity token"},
                "invoker": {"type": "http", "scheme": "bearer", "description": "An invoker's identity token"},
            },
        },
    }


def text() -> str:
    return json.dumps(document(), indent=1, sort_keys=True) + "\n"


def _post(summary: str, body: str, answer: str, caller: str, *more: int) -> Json:
    codes = sorted({400, 401, 413, 415, 500, 503, *more})
    return {
        "summary": summary,
        "operationId": body.lower() if body != "Empty" else answer.lower(),
        "security": [{caller: []}],
        "requestBody": {"required": body != "Empty", "content": _content(body)},
        "responses": {
            "200": {"description": "Done", "content": _content(answer)},
            **{str(code): _refusal(code) for code in codes},
        },
    }


def _event() -> Json:
    """Return the description of ``/v1/event``. It accepts any push, because a refused push is repeated for days."""
    push = {"application/json": {"schema": {"anyOf": [{"$ref": _REF.format(name="Push")}, {}]}}}
    about = "A Pub/Sub push: a hint that a job needs a round. An unreadable push is ignored and answered with 200"
    return {**_post(about, "Push", "Ticked", "invoker"), "requestBody": {"required": False, "content": push}}


def _health() -> Json:
    ok = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
    answer = {"description": "It serves", "content": {"application/json": {"schema": ok}}}
    return {"summary": "Whether it serves", "operationId": "health", "security": [], "responses": {"200": answer}}


def _refusal(code: int) -> Json:
    words = " or ".join(word.value for word, status in STATUS.items() if status == code)
    return {"description": words, "content": _content("Refused")}


def _content(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


def _plain(schemas: object) -> Json:
    """Return schemas as plain JSON values: msgspec's contain tuples and enums as fields' defaults."""
    plain: Json = json.loads(msgspec.json.encode(schemas))
    return plain


if __name__ == "__main__":
    FILE.write_text(text())
