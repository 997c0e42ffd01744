"""The real driver: Pulumi's own engine, where the ``pulumi`` command is installed.

It runs the project as a user would (`pulumi up` in the checkout), with state in a folder
of the one-machine cloud, a stand-in for the `gcp` provider on PATH, and nothing fetched.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spotkeeper.local.deploy.config import PROJECT_FILE, ROOT, addresses, stack_config
from spotkeeper.local.deploy.names import ENDPOINT, PLUGIN
from spotkeeper.local.deploy.result import DeployError, DeployResult, Event, Op, Resource

OnEvent = Callable[[Event], None]
_TAIL = 40  # lines of diagnostics that an error repeats
_OPS = {
    "create": Op.CREATE, "create-replacement": Op.REPLACE, "update": Op.UPDATE,
    "delete": Op.DELETE, "delete-replaced": Op.DELETE, "discard-replaced": Op.DELETE, "same": Op.SAME,
}  # fmt: skip
_STACK = "pulumi:pulumi:Stack"
# What Pulumi's SDK puts around a provider's words: where in the provider they were heard.
_SDKS_WORDS = re.compile(r"\AUnexpected <class 'Exception'>: |:\n  File \".*\Z", re.DOTALL)


def up(stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.up`."""
    engine = Engine(stack, endpoint.rstrip("/"), folder, on_event)
    engine.select(config_file)
    changes = engine.run("up", "--yes", "--skip-preview")
    return engine.result(changes)


def preview(stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.preview`."""
    engine = Engine(stack, endpoint.rstrip("/"), folder, on_event)
    engine.select(config_file)
    return engine.result(engine.run("preview"))


def destroy(stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent) -> DeployResult:
    """See :func:`spotkeeper.local.deploy.destroy`."""
    engine = Engine(stack, endpoint.rstrip("/"), folder, on_event)
    if not engine.exists():
        return DeployResult("pulumi", {}, (), {})
    engine.select(config_file)
    # With its preview: a protected resource is met there, before anything is deleted, and in the middle without.
    changes = engine.run("destroy", "--yes")
    engine.call("stack", "rm", "--yes", stack)
    return DeployResult("pulumi", {}, (), changes)


@dataclass(frozen=True)
class Engine:
    """One stack of the project, its state below ``folder``."""

    stack: str
    endpoint: str
    folder: Path
    on_event: OnEvent

    @property
    def _project(self) -> Path:
        """The engine writes into a project's stack files and deletes them with a stack: not into the checkout's."""
        return (self.folder / "project").absolute()

    def exists(self) -> bool:
        return (self.folder / "state" / ".pulumi" / "stacks").exists()

    def select(self, config_file: Path) -> None:
        """Make project, plugin and stack: the checkout's own program under a stack file with this cloud's addresses."""
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
        """An engine that was killed leaves its lock; one that lives keeps it."""
        for lock in (self.folder / "state" / ".pulumi" / "locks").glob("**/*.json"):
            pid = int(json.loads(lock.read_bytes()).get("pid", 0))
            if not Path(f"/proc/{pid}").exists():
                lock.unlink(missing_ok=True)

    def call(self, *words: str) -> str:
        """A short command; its output.

        Raises:
            DeployError: it failed, with its last words.
        """
        done = subprocess.run(
            self._command(*words), env=self._environment(), capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise DeployError(f"pulumi {' '.join(words)}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return done.stdout

    def run(self, *words: str) -> Mapping[Op, int]:
        """A deployment, told as it goes."""
        hearing = _Hearing(self.on_event, planning=words[0] == "preview")
        notes: list[str] = []
        command = [*self._command(*words), "--json"]
        with subprocess.Popen(
            command, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for event in _events(process.stdout, notes):
                hearing.hear(event, notes)
        if process.returncode:
            raise DeployError(f"pulumi {words[0]} failed:\n" + "\n".join(hearing.refused or notes[-_TAIL:]))
        return hearing.changes

    def result(self, changes: Mapping[Op, int]) -> DeployResult:
        outputs = json.loads(self.call("stack", "output", "--json") or "{}")
        exported = json.loads(self.call("stack", "export"))
        resources = tuple(
            Resource(str(entry["type"]), str(entry["urn"]).rsplit("::", 1)[-1], str(entry.get("id", "")))
            for entry in (exported.get("deployment") or {}).get("resources") or ()
            if not str(entry["type"]).startswith("pulumi:")
        )
        return DeployResult("pulumi", outputs, resources, changes)

    def _command(self, *words: str) -> list[str]:
        return [
            "pulumi",
            "--cwd",
            str(self._project),
            "--non-interactive",
            "--color",
            "never",
            *words,
            *self._stack(words),
        ]

    def _stack(self, words: tuple[str, ...]) -> list[str]:
        return [] if words[:2] in (("stack", "select"), ("stack", "rm")) else ["--stack", self.stack]

    def _environment(self) -> dict[str, str]:
        """Touches nothing outside: no account, no update check, no plugin fetched."""
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
        }


def _events(lines: Iterator[str] | Any, notes: list[str]) -> Iterator[dict[str, Any]]:
    """One engine event a line; anything else is something to repeat when the run fails."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            notes.append(line.rstrip())
            continue
        if isinstance(event, dict):
            yield event


class _Hearing:
    """The engine's events as ours. A component is told of when it begins and when its outputs are registered."""

    def __init__(self, on_event: OnEvent, planning: bool) -> None:
        self._on_event = on_event
        self._planning = planning  # whether a preview is what is told, or what is done behind one
        self._began: dict[str, float] = {}
        self._done: set[tuple[str, Op]] = set()
        self.changes: Counter[Op] = Counter()
        self.refused: list[str] = []  # what resources failed of: the program that is ended by it has its own words

    def hear(self, event: dict[str, Any], notes: list[str]) -> None:
        if "diagnosticEvent" in event:
            found = event["diagnosticEvent"]
            if found.get("severity") in ("error", "info#err"):
                said = _SDKS_WORDS.sub("", str(found.get("message", ""))).strip()
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
            if op is not Op.SAME:
                self._on_event(Event(op, type_, name, parent, done=False))
            return
        if (urn, op) in self._done:
            return
        self._done.add((urn, op))
        failed = kind == "resOpFailedEvent"
        if not failed:
            self.changes[op] += 1
        seconds = time.monotonic() - self._began.get(urn, time.monotonic())
        self._on_event(Event(op, type_, name, parent, True, seconds, "failed" if failed else ""))
