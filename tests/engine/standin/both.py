"""Two `gcp` provider plugins as one: Google's own for what is asked of Compute Engine and Cloud Storage, the stand-in
for every other resource. Calls pass as they came, and so do answers and refusals: it reads of a call whose it is, and
nothing else.

Started by the engine in the place of either. ``GOOGLES``: the path of Google's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from pulumi.runtime.proto import provider_pb2

GOOGLES = "STANDIN_GOOGLES"
THEIRS = ("gcp:compute/", "gcp:storage/")
_SERVICE = "/pulumirpc.ResourceProvider/"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_OF_BOTH = ("CheckConfig", "DiffConfig", "Configure", "Cancel")
_OF_A_RESOURCE = ("Check", "Diff", "Create", "Read", "Update", "Delete")
# On configure it asks Google who it is, and waits for minutes where nobody answers: here somebody refuses at once.
_ALONE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "PULUMI_GCP_SKIP_REGION_VALIDATION": "true"}


class Plugin:
    """A provider's process, of our group, which the engine ends as a whole; and the way to it."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen([*command, *sys.argv[1:]], env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port.isdigit():
            raise SystemExit(f"{command[0]}: said {port!r}, not where it listens")
        threading.Thread(target=self._pass_on, daemon=True).start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)

    def _pass_on(self) -> None:
        for line in self._process.stdout or ():
            sys.stderr.write(line)

    def call(self, method: str, request: bytes) -> bytes:
        answer: bytes = self._channel.unary_unary(method)(request)
        return answer


class Both(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, googles: Plugin, standin: Plugin) -> None:
        self._googles = googles
        self._standin = standin

    def service(self, details: Any) -> Any:
        method: str = details.method

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return self._answer(method, request)
            except grpc.RpcError as refusal:
                context.set_trailing_metadata(refusal.trailing_metadata() or ())
                context.abort(refusal.code(), refusal.details())
                raise

        return grpc.unary_unary_rpc_method_handler(answer)

    def _answer(self, method: str, request: bytes) -> bytes:
        verb = method.removeprefix(_SERVICE)
        if verb in _OF_BOTH:
            self._standin.call(method, request)
        elif verb in _OF_A_RESOURCE and not type_of(verb, request).startswith(THEIRS):
            return self._standin.call(method, request)
        return self._googles.call(method, request)


def type_of(verb: str, request: bytes) -> str:
    """Of the resource that a call is about; inside a component, its own."""
    urn: str = getattr(provider_pb2, f"{verb}Request").FromString(request).urn
    return urn.split("::")[2].rsplit("$", 1)[-1]


def main() -> None:
    """Serves until the engine ends it."""
    googles = Plugin([os.environ[GOOGLES]], {**os.environ, **_ALONE})  # first: where it fails, no child is left behind
    standin = Plugin([sys.executable, "-W", "ignore", "-m", "tests.engine.standin.provider"], dict(os.environ))
    server = grpc.server(ThreadPoolExecutor(64), options=_OPTIONS, handlers=[Both(googles, standin)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
