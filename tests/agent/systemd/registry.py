"""A container registry with one image: this machine's Python, for tests with the real podman."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import subprocess
import tarfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
PROGRAMS = ("/bin/sh", "/usr/bin/python3.11")


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer(files: dict[str, str]) -> bytes:
    """A Debian's Python with the libraries that it needs, and these programs. Some of it belongs to another user."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        found = {*PROGRAMS, *_libraries(*PROGRAMS, *glob.glob("/usr/lib/python3.11/lib-dynload/*.so"))}  # noqa: PTH207
        for name in sorted(found):
            tar.add(os.path.realpath(name), name.lstrip("/"))
        tar.add("/usr/lib/python3.11", "usr/lib/python3.11", filter=_of_use)
        for name, text in files.items():
            about = tarfile.TarInfo(name)
            about.size, about.mode, about.uid, about.gid = len(text.encode()), 0o755, 1000, 1000
            tar.addfile(about, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _of_use(about: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if {"__pycache__", "test", "config-3.11-x86_64-linux-gnu"} & set(about.name.split("/")) else about


def _libraries(*files: str) -> set[str]:
    told = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    return {word for line in told.splitlines() for word in line.split() if word.startswith("/") and word[-1] != ":"}


class Registry:
    """Answers what a pull asks. ``reference``: the image, by its digest."""

    def __init__(self, files: dict[str, str]) -> None:
        contents = layer(files)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/bin/false"], "Env": ["PATH=/usr/bin:/bin", "OF_IMAGE=1"], "User": "1000"},
            "rootfs": {"type": "layers", "diff_ids": [digest(contents)]},
        }
        about = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _entry("application/vnd.oci.image.config.v1+json", about),
            "layers": [_entry("application/vnd.oci.image.layer.v1.tar", contents)],
        }
        self._manifest = json.dumps(manifest).encode()
        self._blobs = {digest(data): data for data in (contents, about, self._manifest)}

    def server(self) -> ThreadingHTTPServer:
        blobs, main = self._blobs, digest(self._manifest)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                name = Path(self.path).name
                data = b"{}" if self.path == "/v2/" else blobs.get(name)
                self.send_response(404 if data is None else 200)
                self.send_header("Content-Type", MANIFEST if name == main else "application/octet-stream")
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                if self.command == "GET" and data is not None:
                    self.wfile.write(data)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def reference(self, server: ThreadingHTTPServer) -> str:
        return f"127.0.0.1:{server.server_port}/a-team/an-image@{digest(self._manifest)}"


def _entry(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": digest(data), "size": len(data)}
