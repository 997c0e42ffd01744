"""What is on a disk, read by rules of its own: it shares no code with what it judges."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

SEAL = 1 << 20  # bytes at an image's end


@dataclass(frozen=True, order=True)
class Found:
    """A folder that is named like a checkpoint. ``why``: what it lacks; '' for nothing."""

    gen: int
    step: int
    why: str

    @property
    def name(self) -> str:
        return f"{self.gen}-{self.step}"


def look(folder: Path) -> list[Found]:
    """All checkpoints of one disk, newest first."""
    found = []
    for home in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(ValueError):
            gen, step = map(int, home.name.split("-"))
            found.append(Found(gen, step, _lack(home)))
    return sorted(found, reverse=True)


def whole(folder: Path) -> list[Found]:
    return [each for each in look(folder) if not each.why]


def newest(folders: list[Path]) -> Found | None:
    """Of all disks together."""
    return max((each for folder in folders for each in whole(folder)), default=None)


def in_memory(pid: int) -> list[Found]:
    """The complete images in a saver's memory files; none where it is dead."""
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(link.readlink()).startswith("/memfd:spotkeeper") and link.stat().st_size > SEAL:
                with link.open("rb") as stream:
                    stream.seek(-SEAL, os.SEEK_END)
                    digest, length = stream.read(32), int.from_bytes(stream.read(8), "little")
                    text = stream.read(length) if length < SEAL else b""
                if hashlib.sha256(text).digest() == digest:
                    commit = json.loads(json.loads(text)["manifest"])["body"]["commit"]
                    found.append(Found(commit["gen"], commit["step"], ""))
    return found


def debris(folder: Path) -> list[str]:
    """What no checkpoint needs: must be gone once a saver has started and saved."""
    known = {"latest", "quarantine", "lock"} | {each.name for each in look(folder)}
    left = [path.name for path in folder.iterdir() if path.name not in known]
    return left + [str(path) for path in folder.rglob("*.tmp") if "quarantine" not in path.parts]


def _lack(home: Path) -> str:
    try:
        commit = json.loads((home / "COMMIT").read_bytes())
    except OSError:
        return "no COMMIT"
    except ValueError:
        return "COMMIT"
    body = commit["body"]
    if hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() != commit["sha256"]:
        return "COMMIT"
    if f"{body['commit']['gen']}-{body['commit']['step']}" != home.name:
        return "COMMIT"
    for file in body["files"]:
        path = home / file["name"]
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != file["sha256"]:
            return file["name"]
    return ""
