"""Google's batch requests: many calls in one multipart body, as gcloud sends them. Pure but for the callback."""

from __future__ import annotations

from collections.abc import Callable
from email import message_from_bytes
from email.message import Message
from urllib.parse import parse_qsl, unquote, urlsplit

from spotkeeper.local.errors import ApiError

One = Callable[[str, str, dict[str, str], bytes], tuple[int, bytes]]
BOUNDARY = "batch_spotkeeper_local"


def answer(content_type: str, body: bytes, one: One) -> tuple[bytes, str]:
    """The answering body and its content type.

    Raises:
        ApiError: 400 for what is no multipart/mixed of HTTP requests.
    """
    message = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
    if not message.is_multipart():
        raise ApiError(400, "badRequest", "Expected a multipart/mixed body of HTTP requests.")
    parts = message.get_payload()
    assert isinstance(parts, list)
    out = b"".join(_part(part, one) for part in parts if isinstance(part, Message))
    return out + f"--{BOUNDARY}--\r\n".encode(), f"multipart/mixed; boundary={BOUNDARY}"


def _part(part: Message, one: One) -> bytes:
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    head, _, body = payload.replace(b"\r\n", b"\n").partition(b"\n\n")
    words = head.split(b"\n", 1)[0].decode().split(" ")
    if len(words) < 2:
        raise ApiError(400, "badRequest", "A part is no HTTP request.")
    target = urlsplit(words[1])
    path = unquote(target.path).partition("/compute/")[2].partition("/")[2]
    status, answered = one(words[0], path, dict(parse_qsl(target.query)), body)
    name = str(part.get("Content-ID", "<0>")).strip("<>")
    lines = [
        f"--{BOUNDARY}",
        "Content-Type: application/http",
        f"Content-ID: <response-{name}>",
        "",
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}",
        "Content-Type: application/json; charset=UTF-8",
        f"Content-Length: {len(answered)}",
        "",
    ]
    return "\r\n".join(lines).encode() + b"\r\n" + answered + b"\r\n"
