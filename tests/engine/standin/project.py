"""A Pulumi project for one test: the checkout's program, the real engine, a file backend, stand-in providers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from spotkeeper.vm.launcher.process import NODE, sweep

from tests.engine.standin.provider import FOLDER
from tests.engine.standin.shapes import shape_of
from tests.infra.conftest import ROOT

PATIENCE_S = 900.0  # of a machine that others use as well


class Step(NamedTuple):
    """Of the engine's: ``op`` as it names it."""

    op: str
    type: str
    name: str


@dataclass(frozen=True)
class Outcome:
    code: int
    steps: tuple[Step, ...]
    said: str  # diagnostics, and whatever else the engine wrote

    def changed(self) -> list[Step]:
        return [step for step in self.steps if step.op not in ("same", "read", "refresh")]

    def names(self, *ops: str) -> list[str]:
        return [step.name for step in self.steps if step.op in ops]


@dataclass(frozen=True)
class Project:
    """``folder``: everything of this stack. ``checkout``: whose program and whose drain are run."""

    folder: Path
    cloud: str
    config: dict[str, Any]
    environment: Mapping[str, str]
    checkout: Path = ROOT
    stack: str = "demo"
    needed: tuple[str, ...] = field(default=(), repr=False)

    def write(self, plugin: str = "tests.engine.standin.provider") -> None:
        """Project, stack file, plugin and what the plugin knows."""
        for name in ("state", "home", "bin", "project"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        script = self.folder / "bin" / f"pulumi-resource-{self.cloud}"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m {plugin} "$@"\n')
        script.chmod(0o755)
        if not (self.folder / "shapes.json").exists():
            (self.folder / "shapes.json").write_text(json.dumps({type_: shape_of(type_) for type_ in self.needed}))
        project = msgspec.yaml.decode((self.checkout / "Pulumi.yaml").read_bytes())
        del project["stackConfigDir"]
        project["main"] = str(self.checkout / "infra" / "__main__.py")
        (self.folder / "project" / "Pulumi.yaml").write_bytes(msgspec.yaml.encode(project))
        stack = {"config": self.config}
        (self.folder / "project" / f"Pulumi.{self.stack}.yaml").write_bytes(msgspec.yaml.encode(stack))

    def copied(self, folder: Path, **changes: Any) -> Project:
        """This stack as it is now, for another test to change."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("home"))
        made = Project(folder, self.cloud, self.config, self.environment, self.checkout, self.stack, self.needed)
        return made.with_(**changes)

    def anew(self, folder: Path) -> Project:
        """The same stack file, and nothing made yet."""
        folder.mkdir(parents=True)
        shutil.copy(self.folder / "shapes.json", folder)
        made = Project(folder, self.cloud, self.config, self.environment, self.checkout, self.stack, self.needed)
        made.write()
        return made

    def with_(self, *, checkout: Path | None = None, **config: Any) -> Project:
        """Another stack file, or another checkout, from now on."""
        given = {f"spotkeeper:{key}": value for key, value in config.items()}
        made = Project(self.folder, self.cloud, {**self.config, **given}, self.environment,
                       checkout or self.checkout, self.stack, self.needed)  # fmt: skip
        made.write()
        return made

    # --- the engine ----------------------------------------------------------------------

    def up(self, *words: str) -> Outcome:
        self.call("stack", "select", "--create", self.stack)
        return self.run("up", "--yes", "--skip-preview", *words)

    def run(self, *words: str) -> Outcome:
        """A deployment, to its end."""
        with self.running(*words) as process:
            text, _ = process.communicate(timeout=PATIENCE_S)
        return _outcome(process.returncode, text)

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A deployment under way, ended with the block, its providers too."""
        command = [*self._command(*words), "--json", "--stack", self.stack]
        process = subprocess.Popen(
            command, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            sweep(self.folder, set())  # an engine that is killed leaves its providers, each in a group of its own
            if process.poll() is None:
                process.communicate()

    def call(self, *words: str) -> str:
        done = subprocess.run(
            self._command(*words),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"pulumi {' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout

    def _command(self, *words: str) -> list[str]:
        return ["pulumi", "--cwd", str(self.folder / "project"), "--non-interactive", "--color", "never", *words]

    def _environment(self) -> dict[str, str]:
        """Touches nothing outside: no account, no update check, no plugin fetched."""
        paths = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PULUMI_", "AWS_"))},
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": os.pathsep.join([str(self.checkout), str(self.checkout / "agent"), str(ROOT)]),
            NODE: str(self.folder),
            "PULUMI_PYTHON_CMD": sys.executable,
            "PULUMI_BACKEND_URL": f"file://{self.folder / 'state'}",
            "PULUMI_CONFIG_PASSPHRASE": "",
            "PULUMI_HOME": str(self.folder / "home"),
            "PULUMI_SKIP_UPDATE_CHECK": "1",
            "PULUMI_ENABLE_STREAMING_JSON_PREVIEW": "1",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "1",
            FOLDER: str(self.folder),
            **self.environment,
        }

    # --- what the stand-in saw ------------------------------------------------------------

    def log(self) -> list[tuple[str, str, str]]:
        """(what, type, name) of every change, in order."""
        path = self.folder / "log.jsonl"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def there(self) -> dict[str, Any]:
        """What exists, by the stand-in's own keys."""
        return dict(json.loads((self.folder / "cloud.json").read_text()))

    def hand(self, name: str, value: str | None) -> None:
        """See the stand-in: ``fail``, ``hang``, ``gone``."""
        path = self.folder / name
        path.unlink(missing_ok=True) if value is None else path.write_text(value)

    def until_noted(self, what: str, name: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not any((w, n) == (what, name) for w, _, n in self.log()):
            assert time.monotonic() < end, f"{what} {name}: never seen"
            time.sleep(0.1)


def checkout(folder: Path) -> Path:
    """A copy of this one as far as a stack needs it: its own, whatever is edited meanwhile."""
    for name in ("infra", "templates", "agent"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "Pulumi.yaml", folder)
    return folder


def _outcome(code: int, text: str) -> Outcome:
    steps: list[Step] = []
    said: list[str] = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            said.append(line)
            continue
        if event.get("diagnosticEvent", {}).get("severity") not in (None, "debug"):
            said.append(str(event["diagnosticEvent"].get("message", "")))
        if (found := event.get("resOutputsEvent")) and not found.get("planning"):
            step = found["metadata"]
            steps.append(Step(step["op"], step["type"], step["urn"].rsplit("::", 1)[-1]))
    return Outcome(code, tuple(steps), "\n".join(said))
