"""The protocol between trainers and saver: requests, the strict parser of requests, and the unix socket.

Each packet of a SEQPACKET socket is one JSON message; ``saver.py`` has the table of messages. The saver checks a whole
packet before it acts on any of it. Standard library only.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint.manifest import Manifest, count
from spotkeeper.train.checkpoint.store import SkippedCheckpoint
from spotkeeper.train.core import beneath

MESSAGE = 1 << 20  # largest message, bytes
IMAGES = 3  # image memories: one is being written, one has the newest complete image, one is being filled
PART_IMAGES = 2  # memories for images of sharded state, of each of two machines: this one and a neighbour
LEFT_PARTS = 2 * PART_IMAGES  # number of the first such memory that a trainer left which is still connected
Answer = dict[str, Any]  # a message of the saver, as JSON; ``saver.py`` has the table


@dataclass(frozen=True)
class Stretch:
    """Bytes of the memory file that become one file. ``offset`` is a multiple of the page size."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class HelloRequest:
    folder: Path
    gen: int
    keep: int


@dataclass(frozen=True)
class ReserveRequest:
    bytes: int


@dataclass(frozen=True)
class ImageRequest:
    number: int
    bytes: int
    part: bool  # whether it is for a part of sharded state


@dataclass(frozen=True)
class StageRequest:
    pass


@dataclass(frozen=True)
class SaveRequest:
    manifest: Manifest
    stretches: tuple[Stretch, ...]
    part: bool
    image: int | None = None  # number of the image memory that has the bytes; None: staging memory


@dataclass(frozen=True)
class PublishRequest:
    manifest: Manifest


Request = HelloRequest | ReserveRequest | ImageRequest | StageRequest | SaveRequest | PublishRequest


class SaverError(Exception):
    """The saver refused a request or is gone; ``fault`` says which."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault


class SaverSilentError(SaverError):
    """The saver exists but has made no progress for too long."""


@dataclass(frozen=True)
class SaveDurable:
    """A checkpoint is on disk. ``seconds``: time that the saver took."""

    commit: Commit
    seconds: float
    kept: bool = False  # the saver has written an image that an earlier connection left


@dataclass(frozen=True)
class PartWritten:
    """This node's part of a checkpoint is on disk; ``manifest`` lists the part's files."""

    commit: Commit
    manifest: Manifest
    seconds: float


@dataclass(frozen=True)
class SaveFailed:
    """A save failed."""

    commit: Commit
    fault: Fault
    why: str
    kept: bool = False  # as above


@dataclass(frozen=True)
class OfferedImage:
    """An image that an earlier trainer has left in the saver's memory (``handover.py``)."""

    memory: memoryview  # of a CopyOnWrite: what is written there stays in this process
    shared: bool  # the earlier trainer may still change the memory
    writing: bool  # the saver writes the image to disk, and then tells the result as that of a save
    ownable: bool  # this process can keep parts of the memory without a copy now


@dataclass(frozen=True)
class SaverState:
    """State of the saver at the start of a generation."""

    staged: Manifest | None  # the checkpoint in staging memory, if it is also on disk
    stretches: tuple[Stretch, ...]
    quarantined: tuple[SkippedCheckpoint, ...]
    image: OfferedImage | None = None


Event = SaveDurable | PartWritten | SaveFailed


class RequestError(ValueError):
    """A packet is not a valid request."""


def parse(data: bytes) -> Request:
    """Parse one request.

    Raises:
        RequestError: the data is invalid; the message says why.
    """
    try:
        fields = json.loads(data)
        op = fields["op"]
        if op == "hello":
            return HelloRequest(Path(_text(fields["folder"])), count(fields["gen"]), count(fields["keep"]))
        if op == "reserve":
            return ReserveRequest(count(fields["bytes"]))
        if op in ("image", "part_image"):
            return _image_request(fields["number"], count(fields["bytes"]), op == "part_image")
        if op == "stage":
            return StageRequest()
        if op == "save":
            stretches = tuple(_stretch(part) for part in fields["stretches"])
            image = None if fields.get("image") is None else _image(fields["image"])
            return SaveRequest(_manifest(fields["manifest"]), stretches, _flag(fields.get("part", False)), image)
        if op == "publish":
            return PublishRequest(_manifest(fields["manifest"]))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RequestError(f"{type(error).__name__}: {error}") from None
    raise RequestError(f"unknown op {op!r}")


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is not a flag")
    return value


def _image_request(number: Any, size: int, part: bool) -> ImageRequest:
    parts = LEFT_PARTS if size else 2 * LEFT_PARTS
    return ImageRequest(_image(number, parts if part else IMAGES), size, part)


def _image(value: Any, most: int = IMAGES) -> int:
    if (number := count(value)) >= most:
        raise ValueError(f"{number} is not the number of an image memory")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{value!r} is not text")
    os.fsencode(value)  # fails for a half of a surrogate pair, which no file name can contain
    return value


def _manifest(value: Any) -> Manifest:
    return Manifest.from_bytes(_text(value).encode())


def _stretch(part: Any) -> Stretch:
    name = _text(part["name"])
    if name in ("", "..") or name != Path(name).name:
        raise ValueError(f"{name!r} is not a file name")
    return Stretch(name, count(part["offset"]), count(part["bytes"]))


@dataclass
class Peer:
    """A trainer's connection, on the saver's side."""

    sock: socket.socket
    gen: int = -1
    folder: Path | None = None
    keep: int = 2

    def tell(self, message: Answer, fd: int | None = None) -> None:
        """Send an answer. Ignore a failure if the trainer is gone, because it then needs no answer.

        After any other failure, end the connection, because the trainer would otherwise wait for the answer forever.
        """
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self.sock.sendmsg([json.dumps(message).encode()], rights)
        except ConnectionError:
            pass
        except OSError as error:
            print(f"saver: closing a connection because an answer cannot be sent: {error}", file=sys.stderr)
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)  # requests already sent are still read

    def fail(self, fault: Fault, why: str, commit: Commit | None = None, *, kept: bool = False) -> None:
        """Report a failed request. ``commit``: the checkpoint, if the request was a save, or ``kept`` an image."""
        of = {} if commit is None else {"gen": commit.gen, "step": commit.step, "kept": kept}
        self.tell({**of, "event": "failed", "fault": int(fault), "why": why})


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """Yield another name of the file ``path``, short enough for the 108 bytes of a unix socket's address."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """Listen at ``path``, replacing any file that a dead saver or a job left there.

    Raises:
        FileExistsError: a saver answers at ``path``.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with address(path) as name:
        if _answers(name):
            sock.close()
            raise FileExistsError(errno.EEXIST, "a saver answers at this socket already", str(path))
        beneath.make_way(path.parent, path.name)
        old = os.umask(0o117)
        try:
            sock.bind(name)
        finally:
            os.umask(old)
    sock.listen()
    return sock


def _answers(name: str) -> bool:
    """Whether a saver answers at this socket. False for a link, which may lead to another job's socket."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.connect(name)
        return not Path(name).is_symlink()
    return False
