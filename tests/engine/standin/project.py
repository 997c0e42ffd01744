"""A Pulumi project for one test: the checkout's program, the real engine, a file backend, stand-in providers."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
from pulumi.automation import LocalWorkspaceOptions, Stack, create_or_select_stack

from spotkeeper_agent.launcher.process import MARK, sweep
from tests.engine.standin.engine import Command, Told
from tests.engine.standin.provider import FOLDER
from tests.engine.standin.shapes import shape_of
from tests.infra.conftest import ROOT

PATIENCE_S = 900.0  # of a machine that others use as well


@dataclass(frozen=True)
class Project:
    """``folder``: everything of this stack. ``checkout``: whose program and whose drain are run. ``needed``: the types
    that its cloud has."""

    folder: Path
    cloud: str
    config: dict[str, Any]
    environment: Mapping[str, str]
    checkout: Path = ROOT
    name: str = "demo"
    needed: tuple[str, ...] = field(default=(), repr=False)
    plugin: str = "tests.engine.standin.provider"

    def write(self) -> Project:
        """Project, stack file, plugin and what the plugin knows."""
        for name in ("state", "home", "bin", "project"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        script = self.folder / "bin" / f"pulumi-resource-{self.cloud}"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m {self.plugin} "$@"\n')
        script.chmod(0o755)
        if not (self.folder / "shapes.json").exists():
            (self.folder / "shapes.json").write_text(json.dumps({type_: shape_of(type_) for type_ in self.needed}))
        project = msgspec.yaml.decode((self.checkout / "Pulumi.yaml").read_bytes())
        del project["stackConfigDir"]
        project["main"] = str(self.checkout / "infra" / "__main__.py")
        (self.folder / "project" / "Pulumi.yaml").write_bytes(msgspec.yaml.encode(project))
        stack = {"config": self.config}
        (self.folder / "project" / f"Pulumi.{self.name}.yaml").write_bytes(msgspec.yaml.encode(stack))
        return self

    def copied(self, folder: Path) -> Project:
        """This stack as it is now, for another test to change."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("home"))
        return replace(self, folder=folder).write()

    def anew(self, folder: Path) -> Project:
        """The same stack file, and nothing made yet."""
        folder.mkdir(parents=True)
        shutil.copy(self.folder / "shapes.json", folder)
        return replace(self, folder=folder).write()

    def with_(self, *, checkout: Path | None = None, **config: Any) -> Project:
        """Another stack file, or another checkout, from now on."""
        given = {f"spotkeeper:{key}": value for key, value in config.items()}
        return replace(self, config={**self.config, **given}, checkout=checkout or self.checkout).write()

    # --- the engine: what it refuses is a CommandError ------------------------------------

    @cached_property
    def stack(self) -> Stack:
        """Made, if it is not there yet."""
        options = LocalWorkspaceOptions(env_vars=self._environment(), pulumi_command=Command())
        return create_or_select_stack(self.name, work_dir=str(self.folder / "project"), opts=options)

    def up(self, told: Told | None = None, **options: Any) -> Told:
        return self._told(Stack.up, told, **options)

    def preview(self, told: Told | None = None, **options: Any) -> Told:
        return self._told(Stack.preview, told, **options)

    def drift(self) -> Told:
        """A refresh that changes nothing; where it would, it is refused."""
        return self._told(Stack.preview_refresh, expect_no_changes=True)

    def refresh(self, **options: Any) -> Told:
        return self._told(Stack.refresh, **options)

    def destroy(self) -> Told:
        """As the command does it: a protected resource is met in its preview, before anything is deleted."""
        self._told(Stack.preview_destroy)
        return self._told(Stack.destroy)

    def foreseen(self) -> bytes:
        """A preview as it is reviewed, in one document. `Stack.preview` has no word for what stays as it is."""
        workspace = self.stack.workspace
        words = ["preview", "--json", "--show-sames", "--stack", self.name]
        return workspace.pulumi_command.run(words, workspace.work_dir, workspace.env_vars).stdout.encode()

    def kill(self) -> int:
        """The engine and all that it has started. Providers are in groups of their own, but bear the same mark."""
        return sweep(self.folder, set())

    def _told(self, deployment: Callable[..., object], told: Told | None = None, **options: Any) -> Told:
        told = told or Told()
        limit = Timer(PATIENCE_S, self.kill)
        limit.start()
        try:
            deployment(self.stack, on_event=told, color="never", **options)
        finally:
            limit.cancel()
            self.kill()
        return told

    def _environment(self) -> dict[str, str]:
        """Touches nothing outside: no account, no update check, no plugin fetched."""
        paths = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": os.pathsep.join([str(self.checkout), str(self.checkout / "agent"), str(ROOT)]),
            MARK: str(self.folder),
            "PULUMI_PYTHON_CMD": sys.executable,
            "PULUMI_BACKEND_URL": f"file://{self.folder / 'state'}",
            "PULUMI_CONFIG_PASSPHRASE": "",
            "PULUMI_HOME": str(self.folder / "home"),
            "PULUMI_SKIP_UPDATE_CHECK": "1",
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
        """See the stand-in: ``fail``, ``hang``, ``gone``, ``stuck``."""
        path = self.folder / name
        path.unlink(missing_ok=True) if value is None else path.write_text(value)


def checkout(folder: Path) -> Path:
    """A copy of this one as far as a stack needs it: its own, whatever is edited meanwhile."""
    for name in ("infra", "templates", "agent", "spotkeeper"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("Pulumi.yaml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    return folder
