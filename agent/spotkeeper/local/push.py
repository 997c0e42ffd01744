"""One HTTP POST to a process on this machine, without a thread and without a library's import. Plain HTTP only."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit


async def post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> int:
    """The answer's status; real seconds.

    Raises:
        OSError: no answer (refused, reset, timed out, or an address that is not on this machine).
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or not parts.hostname.startswith("127."):
        raise OSError(f"{url}: not an address of this machine")
    try:
        return await asyncio.wait_for(
            _post(parts.hostname, parts.port or 80, parts.path or "/", body, headers), timeout_s
        )
    except TimeoutError:
        raise OSError(f"{url}: no answer within {timeout_s:.0f} s") from None


async def _post(host: str, port: int, path: str, body: bytes, headers: dict[str, str]) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        lines = [f"POST {path} HTTP/1.1", f"Host: {host}:{port}", f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        status = (await reader.readline()).split(b" ")
        if len(status) < 2 or not status[1].isdigit():
            raise OSError(f"{host}:{port}{path}: the connection ended without an answer")
        return int(status[1])
    finally:
        writer.close()
