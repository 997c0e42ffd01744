"""A checkpoint's manifest: the content of ``COMMIT`` and ``PART``, with every field checked. Standard library only."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from spotkeeper.train.agent_link.control import Commit

FORMAT = 1
SAVE = "save"  # key in a manifest's versions; its value is a name that all parts of one sharded save share
IMAGE = "image"  # key in a manifest's versions: an image that the saver wrote after its trainer's end, not a save


@dataclass(frozen=True)
class FileSum:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class RankPlace:
    """The place where one rank of the gang ran."""

    rank: int
    node: int  # torchrun's node_rank
    slot: int  # that node's number in the job, which may differ from its node_rank
    writes: bool  # whether that node wrote a copy of this checkpoint


SaveKey = tuple[Commit, str]  # a checkpoint and the name of its sharded save: an image of the same step has another


@dataclass(frozen=True)
class Manifest:
    """Content of ``COMMIT``."""

    commit: Commit
    world: int
    gang: tuple[RankPlace, ...]
    files: tuple[FileSum, ...]
    versions: dict[str, str]
    saved_at: float  # real unix seconds
    others: tuple[FileSum, ...] = ()  # with sharded state: files of the other nodes

    @property
    def key(self) -> SaveKey:
        return self.commit, self.versions.get(SAVE, "")

    def to_bytes(self) -> bytes:
        body = asdict(self) | {"format": FORMAT}
        return json.dumps({"sha256": _digest(body), "body": body}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse and check a manifest. Raises ValueError with the reason."""
        try:
            outer = json.loads(data)
            body = outer["body"]
            if outer["sha256"] != _digest(body):
                raise ValueError("COMMIT does not match its own hash")
            if body["format"] != FORMAT:
                raise ValueError(f"COMMIT has format {body['format']}, this library reads {FORMAT}")
            return cls(
                commit=Commit(count(body["commit"]["gen"]), count(body["commit"]["step"])),
                world=count(body["world"]),
                gang=tuple(_place(place) for place in body["gang"]),
                files=tuple(_file(file) for file in body["files"]),
                versions={str(name): str(version) for name, version in body["versions"].items()},
                saved_at=_time(body["saved_at"]),
                others=tuple(_file(file) for file in body.get("others", ())),
            )
        except (TypeError, KeyError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"COMMIT is not readable: {error!r:.200}") from None


def count(value: Any, where: str = "COMMIT") -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{where}: {value!r:.40} is not a whole number from 0")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"COMMIT: {value!r:.40} is not a time")
    return float(value)


def _place(fields: Any) -> RankPlace:
    if type(fields["writes"]) is not bool:
        raise ValueError(f"COMMIT: `writes` is {fields['writes']!r:.40}, neither true nor false")
    return RankPlace(count(fields["rank"]), count(fields["node"]), count(fields["slot"]), fields["writes"])


def _file(fields: Any) -> FileSum:
    """Parse a file entry. Refuse names with a ``/``, which could lead a reader out of the checkpoint's folder."""
    name, sha256 = fields["name"], fields["sha256"]
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"COMMIT: {name!r:.80} is not a file name")
    if not isinstance(sha256, str):
        raise ValueError(f"COMMIT: {sha256!r:.80} is not a hash")
    return FileSum(name, count(fields["bytes"]), sha256)


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
