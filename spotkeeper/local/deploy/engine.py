"""Deploys with Pulumi's own engine, if the ``pulumi`` command is installed.

It runs the checkout's program, as `pulumi up` does for a user, but from a copy of ``Pulumi.yaml`` in the folder of the
one-machine cloud. Pulumi's state is in that folder too, and PATH has a replacement for the `gcp` provider. The engine
downloads nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from spotkeeper.local.deploy.config import ENDPOINT, PLUGIN, PROJECT_FILE, ROOT, TOKEN, addresses, stack_config
from spotkeeper.local.deploy.result import (
    DeployedResource,
    DeployError,
    DeployEvent,
    DeployOp,
    DeployResult,
    Endpoint,
    OnEvent,
)

_TAIL = 40  # lines of diagnostics that an error repeats
_OPS = {
    "create": DeployOp.CREATE, "create-replacement": DeployOp.REPLACE, "update": DeployOp.UPDATE, "same": DeployOp.SAME,
    "delete": DeployOp.DELETE, "delete-replaced": DeployOp.DELETE, "discard-replaced": DeployOp.DELETE,
}  # fmt: skip
_STACK = "pulumi:pulumi:Stack"
# The traceback that Pulumi's SDK adds to a provider's message.
_TRACEBACK = re.compile(r"\AUnexpected <class 'Exception'>: |:\n  File \".*\Z", re.DOTALL)


def up(stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.up`."""
    engine = _engine(stack, cloud, folder, on_event)
    engine.select(config_file)
    return engine.result(engine.run("up", "--yes", "--skip-preview"))


def preview(stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.preview`."""
    engine = _engine(stack, cloud, folder, on_event)
    engine.select(config_file)
    return engine.result(engine.run("preview"))


def destroy(stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.destroy`."""
    engine = _engine(stack, cloud, folder, on_event)
    if not engine.exists():
        return DeployResult("pulumi", {}, (), {})
    engine.select(config_file)
    # No --skip-preview: the preview finds a protected resource before the first deletion.
    changes = engine.run("destroy", "--yes")
    engine.call("stack", "rm", "--yes", stack)
    return DeployResult("pulumi", {}, (), changes)


def _engine(stack: str, cloud: Endpoint, folder: Path, on_event: OnEvent) -> Engine:
    return Engine(stack, cloud.endpoint.rstrip("/"), cloud.token, folder, on_event)


@dataclass(frozen=True)
class Engine:
    """Runs Pulumi's engine for one stack of the project, with its state below ``folder``."""

    stack: str
    endpoint: str
    token: str = field(repr=False)
    folder: Path
    on_event: OnEvent

    @property
    def _project(self) -> Path:
        """The folder with a copy of ``Pulumi.yaml``; the engine writes and deletes its stack files in this folder."""
        return (self.folder / "project").absolute()

    def exists(self) -> bool:
        return (self.folder / "state" / ".pulumi" / "stacks").exists()

    def select(self, config_file: Path) -> None:
        """Write ``Pulumi.yaml``, a stack file with this cloud's addresses, and the provider; select the stack."""
        for name in ("state", "home", "bin", "project"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        plugin = self.folder / "bin" / PLUGIN
        plugin.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spotkeeper.local.deploy.provider "$@"\n')
        plugin.chmod(0o755)
        project = msgspec.yaml.decode(PROJECT_FILE.read_bytes())
        del project["stackConfigDir"]
        project["main"] = str(ROOT / "infra" / "__main__.py")
        (self._project / "Pulumi.yaml").write_bytes(msgspec.yaml.encode(project))
        config = {"config": stack_config(config_file, self.endpoint)}
        (self._project / f"Pulumi.{self.stack}.yaml").write_bytes(msgspec.yaml.encode(config))
        self._unlock()
        self.call("stack", "select", "--create", self.stack)

    def _unlock(self) -> None:
        """Remove locks of killed engines."""
        for lock in (self.folder / "state" / ".pulumi" / "locks").glob("**/*.json"):
            pid = int(json.loads(lock.read_bytes()).get("pid", 0))
            if not Path(f"/proc/{pid}").exists():
                lock.unlink(missing_ok=True)

    def call(self, *words: str) -> str:
        """Run a short command and return its output; DeployError, with the end of its output, if it fails."""
        done = subprocess.run(
            self._command(*words), env=self._environment(), capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise DeployError(f"pulumi {' '.join(words)}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return done.stdout

    def run(self, *words: str) -> Mapping[DeployOp, int]:
        """Run a deploying command of Pulumi (``up``, ``preview``, ``destroy``) and report its events as they come.

        Args:
            words: the command and its options.

        Returns:
            The number of resources by action.

        Raises:
            DeployError: the command failed.
        """
        listener = _EventListener(self.on_event, planning=words[0] == "preview")
        notes: list[str] = []
        command = [*self._command(*words), "--json"]
        with subprocess.Popen(
            command, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for event in _events(process.stdout, notes):
                listener.take(event, notes)
        if process.returncode:
            raise DeployError(f"pulumi {words[0]} failed:\n" + "\n".join(listener.refused or notes[-_TAIL:]))
        return listener.changes

    def result(self, changes: Mapping[DeployOp, int]) -> DeployResult:
        outputs = json.loads(self.call("stack", "output", "--json") or "{}")
        exported = json.loads(self.call("stack", "export"))
        resources = tuple(
            DeployedResource(str(entry["type"]), str(entry["urn"]).rsplit("::", 1)[-1], str(entry.get("id", "")))
            for entry in (exported.get("deployment") or {}).get("resources") or ()
            if not str(entry["type"]).startswith("pulumi:")
        )
        return DeployResult("pulumi", outputs, resources, changes)

    def _command(self, *words: str) -> list[str]:
        stack = [] if words[:2] in (("stack", "select"), ("stack", "rm")) else ["--stack", self.stack]
        options = ("--cwd", str(self._project), "--non-interactive", "--color", "never")
        return ["pulumi", *options, *words, *stack]

    def _environment(self) -> dict[str, str]:
        """The environment that isolates the engine: no account, no update check, no plugin download."""
        state = (self.folder / "state").absolute()
        python = [str(Path(sys.executable).parent)]
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PULUMI_")},
            "PATH": os.pathsep.join([str((self.folder / "bin").absolute()), *python, os.environ["PATH"]]),
            "PULUMI_PYTHON_CMD": sys.executable,
            "PULUMI_BACKEND_URL": f"file://{state}",
            "PULUMI_CONFIG_PASSPHRASE": "",
            "PULUMI_HOME": str((self.folder / "home").absolute()),
            "PULUMI_SKIP_UPDATE_CHECK": "1",
            "PULUMI_ENABLE_STREAMING_JSON_PREVIEW": "1",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "1",
            "SPOTKEEPER_COMPUTE_ENDPOINT": addresses(self.endpoint)["compute"],
            ENDPOINT: self.endpoint,
            TOKEN: self.token,
        }


def _events(lines: Iterator[str] | Any, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the engine's event of each line; append other lines to ``notes``, for the error of a failed run."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            notes.append(line.rstrip())
            continue
        if isinstance(event, dict):
            yield event


class _EventListener:
    """Converts the engine's events: ``resourcePreEvent`` starts an action, ``resOutputsEvent`` or a failure ends it."""

    def __init__(self, on_event: OnEvent, planning: bool) -> None:
        self._on_event = on_event
        self._planning = planning  # report the steps of the preview; if False, those of the run after it
        self._began: dict[str, float] = {}
        self._done: set[tuple[str, DeployOp]] = set()
        self.changes: Counter[DeployOp] = Counter()
        self.refused: list[str] = []  # errors of single resources, without the program's error that follows them

    def take(self, event: dict[str, Any], notes: list[str]) -> None:
        if "diagnosticEvent" in event:
            found = event["diagnosticEvent"]
            if found.get("severity") in ("error", "info#err"):
                said = _TRACEBACK.sub("", str(found.get("message", ""))).strip()
                notes.append(said)
                if found.get("urn") and f"::{_STACK}::" not in found["urn"] and said:
                    self.refused.append(said)
        for kind in ("resourcePreEvent", "resOutputsEvent", "resOpFailedEvent"):
            if kind in event and bool(event[kind].get("planning")) == self._planning:
                self._step(kind, event[kind]["metadata"])

    def _step(self, kind: str, step: dict[str, Any]) -> None:
        op, type_, urn = _OPS.get(str(step["op"])), str(step["type"]), str(step["urn"])
        if op is None or type_ == _STACK or type_.startswith("pulumi:providers:"):
            return
        parent = str((step.get("new") or step.get("old") or {}).get("parent", "")).rsplit("::", 1)[-1]
        name = urn.rsplit("::", 1)[-1]
        if kind == "resourcePreEvent":
            self._began[urn] = time.monotonic()
            if op is not DeployOp.SAME:
                self._on_event(DeployEvent(op, type_, name, parent, done=False))
            return
        if (urn, op) in self._done:
            return
        self._done.add((urn, op))
        failed = kind == "resOpFailedEvent"
        if not failed:
            self.changes[op] += 1
        seconds = time.monotonic() - self._began.get(urn, time.monotonic())
        self._on_event(DeployEvent(op, type_, name, parent, True, seconds, "failed" if failed else ""))
