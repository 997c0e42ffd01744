"""How long a restart's ``attach()`` takes longer than a fresh one, beside a cold read and hash of the same file.

Two ranks over gloo, as on two machines: each has a saver and a disk of its own. A generation trains and saves; the next
one resumes from the savers' memory, or from disk after the savers were replaced and the page cache was dropped. In the
same run each rank reads and hashes its file with one thread, and loads the same state with ``torch.load`` and
``dcp.load``. Both ranks do the same thing at the same time; the slower one counts. Medians of all rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SIZE_MB = int(os.environ.get("SPOTKEEPER_BENCH_RESTORE_MB", "500"))
ROUNDS = 3
RANKS = 2
TENSORS = 24
LIMIT_S = 300.0

Times = dict[str, list[float]]  # seconds by what was measured


def figures(device: str = "cpu") -> list[dict[str, object]]:
    """For ``bench/run.py``. ``device``: where the state is; all ranks share it."""
    times = measure(device)
    read_s, fresh_s = median(times["read and hash"]), median(times["fresh"])
    told = ", ".join(f"{what} {min(each):.2f} to {max(each):.2f} s" for what, each in times.items())
    return [
        _figure(f"restore.vs_read.{source}", (median(times[source]) - fresh_s) / read_s, goal, told)
        for source, goal in (("disk", 1.5), ("memory", 0.3))
    ]


def _figure(name: str, value: float, goal: float, told: str) -> dict[str, object]:
    shown = {"name": name, "value": round(value, 3), "unit": "x", "goal": f"<= {goal:g}", "holds": value <= goal}
    return {**shown, "against": f"{SIZE_MB} MB, {RANKS} ranks: {told}"}


def measure(device: str = "cpu") -> Times:
    root = Path(tempfile.mkdtemp(prefix="bench-restore-", dir=REPOSITORY / "bench"))
    times: Times = {}
    try:
        for number in range(ROUNDS):
            _round(root / str(number), times, device)
            shutil.rmtree(root / str(number))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return times


def _round(root: Path, times: Times, device: str) -> None:
    savers = _savers(root)
    try:
        _add(times, _run(root, 1, "train", device))
        _add(times, {"memory": _run(root, 2, "resume", device)["attach"]})
        for saver in savers:
            saver.kill()
            saver.wait()
        savers = _savers(root)
        _add(times, {"disk": _run(root, 3, "cold", device)["attach"]})
        _add(times, _run(root, 4, "others", device))
    finally:
        for saver in savers:
            saver.kill()
            saver.wait()


def _add(times: Times, found: dict[str, float]) -> None:
    for what, seconds in found.items():
        times.setdefault("fresh" if what == "attach" else what, []).append(seconds)


def _savers(root: Path) -> list[subprocess.Popen[bytes]]:
    from spotkeeper.train.checkpoint import saver

    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    for rank in range(RANKS):
        (root / str(rank)).mkdir(parents=True, exist_ok=True)
    return [subprocess.Popen(saver.command(root / str(rank) / "saver"), env=env) for rank in range(RANKS)]


def _run(root: Path, gen: int, what: str, device: str) -> dict[str, float]:
    """Run one generation. Returns seconds by what was measured, of the slower rank."""
    from spotkeeper.train.agent_link.control import NAME, Control

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        run = root / str(rank) / f"run{gen}"
        run.mkdir()
        Control.create(run / NAME).close()
        env = {
            "PYTHONPATH": str(REPOSITORY),
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": "0",
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SPOTKEEPER_RUN": str(run),
            "SPOTKEEPER_GEN": str(gen),
            "SPOTKEEPER_SAVER": str(root / str(rank) / "saver"),
            "SPOTKEEPER_CKPT": str(root / str(rank) / "ckpt"),
            "SPOTKEEPER_SNAPSHOTS": "1",
            "SPOTKEEPER_INTERVAL_S": "100000",
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, __file__, "--rank", what, str(root / str(rank)), device]
        ranks.append(subprocess.Popen(argv, env=os.environ | env, stdout=subprocess.PIPE))
    try:
        told = [json.loads(each.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for each in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return {key: max(each[key] for each in told) for key in told[0]}


def rank_main(what: str, home: Path, device: str) -> dict[str, float]:
    """One rank of one generation."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import spotkeeper

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    each = SIZE_MB * 1_000_000 // (12 * TENSORS)  # float32 and two moments
    model = nn.ParameterList([nn.Parameter(torch.randn(each, device=device)) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if what == "others":
        return _others(home, model, optimizer)
    if what == "cold":
        _forget(home)
    dist.barrier()
    began = time.monotonic()
    run = spotkeeper.attach(model, optimizer)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    took = time.monotonic() - began
    if run.steps_done == 0:
        for _ in run.steps(range(4)):
            for param in model:
                param.grad = torch.full_like(param, 1e-3)
            optimizer.step()
    elif what == "train":
        raise RuntimeError("a fresh run has resumed")
    return {"attach": took}


def _others(home: Path, model: Any, optimizer: Any) -> dict[str, float]:
    """Time to read and hash the file, and to load the same state by other means, seconds, always from a cold cache."""
    import torch
    import torch.distributed.checkpoint as dcp

    for param in model:
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, home / "plain.pt")
    dcp.save(state, checkpoint_id=home / "sharded", no_dist=True)
    file = max(home.glob("ckpt/*/state.bin"))
    return {
        "read and hash": _cold(home, lambda: _read(file)),
        "torch.load": _cold(home, lambda: _load(home / "plain.pt", model, optimizer)),
        "dcp.load": _cold(home, lambda: dcp.load(state, checkpoint_id=home / "sharded", no_dist=True)),
    }


def _cold(home: Path, work: Callable[[], object]) -> float:
    import torch.distributed as dist

    _forget(home)
    dist.barrier()
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _read(path: Path) -> None:
    digest, piece = hashlib.sha256(), memoryview(bytearray(16 << 20))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(piece):
            digest.update(piece[:count])


def _load(path: Path, model: Any, optimizer: Any) -> None:
    import torch

    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _forget(home: Path) -> None:
    """Drop all files below ``home`` from the page cache."""
    os.sync()
    for path in home.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    sys.path.insert(0, str(REPOSITORY))
    if sys.argv[1:2] == ["--rank"]:
        print(json.dumps(rank_main(sys.argv[2], Path(sys.argv[3]), sys.argv[4])), flush=True)
        os._exit(0)  # the end of the interpreter is not measured
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")


if __name__ == "__main__":
    main()
