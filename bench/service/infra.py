"""Time to declare infrastructure, size of the agent's download, time to boot it on a machine."""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

GOAL_PROGRAM_S, GOAL_LINEAR, GOAL_BUNDLE_MB, GOAL_SCRIPT, GOAL_HELLO_S = 10.0, 1.5, 5.0, 60, 5.0
POOLS = (1, 50, 500)
PATIENCE_S = 120.0


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    warnings.simplefilter("ignore", DeprecationWarning)  # from the clouds' libraries
    return [*_program(), *_bundle(), _script(), _hello()]


# --- the program ---------------------------------------------------------------------------


def _program() -> list[dict[str, object]]:
    """Time the program. A first run loads the cloud's library, which any number of pools shares, and is not counted."""
    _declare(1)
    took = {count: _declare(count) for count in POOLS}
    one, fifty, many = (took[count] for count in POOLS)
    each = (many - fifty) / (POOLS[2] - POOLS[1])
    before = max((fifty - one) / (POOLS[1] - POOLS[0]), 1e-6)
    against = ", ".join(f"{count} pools in {seconds:.2f} s" for count, seconds in took.items()) + "; without engine"
    return [
        _figure("infra.program_500_pools_s", many, "s", f"<= {GOAL_PROGRAM_S:g}", many <= GOAL_PROGRAM_S, against),
        _figure(
            "infra.program_linear", each / before, "x", f"<= {GOAL_LINEAR:g}", each / before <= GOAL_LINEAR,
            f"a pool of the last 450 takes {1000 * each:.1f} ms, one of the first 50 {1000 * before:.1f} ms",
        ),
    ]  # fmt: skip


def _declare(pools: int) -> float:
    """Seconds of the example's program with ``pools`` spot pools."""
    import json

    from spotkeeper.local.deploy.config import read_config
    from tests.infra.conftest import STACKS, run_program

    config = read_config(STACKS / "Pulumi.example-gcp.yaml")
    burst = next(pool for pool in json.loads(config["spotkeeper:pools"]) if pool["kind"] == "spot")
    burst.pop("placement", None)
    config["spotkeeper:pools"] = json.dumps([{**burst, "name": f"burst-{at}"} for at in range(pools)])
    began = time.perf_counter()
    declared = run_program("demo", config)
    took = time.perf_counter() - began
    templates = sum(found.endswith(("-spot", "-od")) for found in declared)
    if templates != 2 * pools:
        raise RuntimeError(f"{pools} pools declared {templates} templates")
    return took


# --- what machines are given -----------------------------------------------------------------


def _bundle() -> list[dict[str, object]]:
    from infra import bundle

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        made = [bundle.bundle(Path(folder), "3.11") for folder in (one, other)]
        megabytes = made[0].path.stat().st_size / 1e6
        same = made[0].path.read_bytes() == made[1].path.read_bytes()
    return [
        _figure(
            "bundle.mb", megabytes, "MB", f"<= {GOAL_BUNDLE_MB:g}", megabytes <= GOAL_BUNDLE_MB, "a tar with wheels"
        ),
        _figure("bundle.reproducible", int(same), "", "1", same, "made twice, in two folders: equal byte for byte"),
    ]


def _script() -> dict[str, object]:
    from infra.boot import TEMPLATES

    lines = len((TEMPLATES / "startup.sh.j2").read_text("utf-8").splitlines())
    against = "of shell; beside it the units and what runs as root, each a file of its own"
    return _figure("boot.script_lines", lines, "lines", f"<= {GOAL_SCRIPT}", lines <= GOAL_SCRIPT, against)


def _hello() -> dict[str, object]:
    """From the startup script's first line until the function knows the machine; without the image's boot."""
    from spotkeeper.client.target import STACK, STACK_FILE, local_target
    from spotkeeper.local import deploy
    from spotkeeper.local.lifecycle.cloud import LocalCloud

    scale = 20.0
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as name:
        cloud = LocalCloud.up(Path(name) / "cloud", scale=scale, seed=1)
        try:
            began = _Began(cloud.folder / "serial")
            deploy.up(STACK, STACK_FILE, cloud, cloud.folder / "deploy", engine="in-process")
            store = local_target(cloud.folder).store()
            end = time.monotonic() + PATIENCE_S
            while not store.list_static_hellos():
                if time.monotonic() > end:
                    raise RuntimeError("the static machine never said hello")
                time.sleep(0.02)
            took = time.monotonic() - began.script(scale)
            deploy.destroy(STACK, STACK_FILE, cloud, cloud.folder / "deploy", engine="in-process")
        finally:
            cloud.down(purge=True)
    goal = f"<= {GOAL_HELLO_S:g}"
    against = "static machine of the one-machine cloud: script, bundle, check, agent, identity, hello; plus image time"
    return _figure("boot.to_hello_s", took, "s", goal, took <= GOAL_HELLO_S, against)


class _Began:
    """Notes the first line on the first machine's console, when its image begins to boot."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def script(self, scale: float) -> float:
        """Time at which the startup script began."""
        from spotkeeper.local.core.catalog import Timing

        if self._at is None:
            raise RuntimeError("no machine ever booted")
        return self._at + Timing().boot_s / scale

    def _watch(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self._at is None and time.monotonic() < end:
            if any(b"booting" in path.read_bytes() for path in self._folder.glob("sk-*.log")):
                self._at = time.monotonic()
            time.sleep(0.005)


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, Any]:
    shown = round(value, 3) if isinstance(value, float) else value
    return {"name": name, "value": shown, "unit": unit, "goal": goal, "holds": holds, "against": against}
