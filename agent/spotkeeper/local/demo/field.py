"""The one-machine cloud as the storm sees it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.local.cloud import LocalCloud
from spotkeeper.train.store import COMMIT


@dataclass
class Field:
    cloud: LocalCloud
    job: str
    _roots: dict[str, Path] = field(default_factory=dict)

    def preempt(self, vm: str, *, notice: bool) -> None:
        self.cloud.preempt(vm, notice=notice)

    def set_capacity(self, zone: str, nodes: int | None) -> None:
        """Machines that run stay: the storm takes the one it wants by itself."""
        self.cloud.set_capacity(zone, nodes, reclaim=False)

    def saving(self, vm: str) -> bool:
        """A checkpoint's folder is there, its COMMIT is not."""
        folder = self._root(vm) / "mnt" / "sk-data" / self.job / "ckpt"
        with contextlib.suppress(OSError):
            return any(
                not (home / COMMIT).exists() for home in folder.iterdir() if home.name.replace("-", "").isdigit()
            )
        return False

    def _root(self, vm: str) -> Path:
        if vm not in self._roots:
            self._roots = {view.name: Path(view.root) for view in self.cloud.status().vms}
        return self._roots.get(vm, Path("/nonexistent"))
