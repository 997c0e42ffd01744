"""How much memory a process may still take: of this machine, and of each control group around the process.

If a control group exceeds its memory limit, the kernel returns no error but kills a process, perhaps the trainer. So
the saver checks the limits before it takes memory. Standard library only: this runs in the saver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LEAST = 64 << 20  # bytes that must stay free for training; a share of the limit if that is more
SAVE_SHARE, IMAGE_SHARE = 50, 8  # 1/50 stays free beside a save; a loss costs more steps if training needs an image's
_PROC = Path("/proc")
_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # of cgroup version 1


@dataclass(frozen=True)
class Headroom:
    """One memory limit, of ``limit`` bytes. ``bytes``: how many of them are free, less a reserve."""

    source: str
    limit: int
    bytes: int


def memory_refusal(wanted: int, share: int = SAVE_SHARE) -> str:
    """Return why this process may not take ``wanted`` more bytes of memory; "" if it may.

    Args:
        wanted: bytes.
        share: 1/``share`` of each limit must stay free.
    """
    tightest = min(_limits(share), key=lambda each: each.bytes, default=None)
    if tightest is None or wanted <= tightest.bytes:
        return ""
    return (
        f"a save's copy of the training state needs {wanted >> 20} MB more memory, but {tightest.source} leaves only "
        f"{max(0, tightest.bytes) >> 20} MB of {tightest.limit >> 20} MB: raise this limit or train with a smaller "
        "state"
    )


def _limits(share: int) -> Iterator[Headroom]:
    with contextlib.suppress(OSError, ValueError, LookupError):
        known = _table(_PROC / "meminfo")
        total, free = known["MemTotal:"] << 10, known["MemAvailable:"] << 10
        yield _headroom("this machine", total, total - free, share)
    for folder, version in _groups():
        with contextlib.suppress(OSError, ValueError, LookupError):  # no limit, or another kernel's files
            yield _group(folder, version, share)


def _headroom(source: str, limit: int, used: int, share: int) -> Headroom:
    return Headroom(source, limit, limit - used - max(_LEAST, limit // share))


def _group(folder: Path, version: int, share: int) -> Headroom:
    """Return the headroom of one control group. Raises ValueError if it has no limit ("max")."""
    limit_file, used_file = ("memory.max", "memory.current") if version == 2 else _FIRST
    limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
    stat = _table(folder / "memory.stat")
    prefix = "" if version == 2 else "total_"
    cache = stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]  # the kernel frees these before it kills
    return _headroom(f"the memory limit of control group {folder}", limit, used - cache, share)


def _groups() -> Iterator[tuple[Path, int]]:
    """Yield (folder, version) of the control groups of this process, innermost first."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        own = [line.split(":", 2) for line in (_PROC / "self/cgroup").read_text().splitlines()]
        for line in (_PROC / "self/mountinfo").read_text().splitlines():
            words = line.split()
            kind, options = words[words.index("-") + 1], words[-1].split(",")
            for number, names, path in own:
                if kind == "cgroup2" and number == "0":
                    yield from ((folder, 2) for folder in _upwards(Path(words[4]), words[3], path))
                elif kind == "cgroup" and "memory" in options and "memory" in names.split(","):
                    yield from ((folder, 1) for folder in _upwards(Path(words[4]), words[3], path))


def _upwards(mount: Path, root: str, path: str) -> Iterator[Path]:
    """Yield the folder of control group ``path``, then the folders of its parent groups; the last one is ``mount``.

    ``mount``: the folder of control group ``root``. Folders that this process cannot see are left out; a container
    often sees only ``mount``.
    """
    inner = path.removeprefix(root.rstrip("/")).strip("/")
    folder = mount / inner
    while folder != mount:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount


def _table(path: Path) -> dict[str, int]:
    """Read a file with a name and an integer in each line."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
