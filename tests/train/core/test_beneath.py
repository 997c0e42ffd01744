"""Below a folder that others can write nothing leads out, holds up or fills the reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spotkeeper.train.core import beneath


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder of the attacker's, and beside it what is none of his."""
    (tmp_path / "theirs/sub").mkdir(parents=True)
    (tmp_path / "ours/sub").mkdir(parents=True)
    (tmp_path / "ours/file").write_text("secret")
    (tmp_path / "ours/sub/file").write_text("secret")
    return tmp_path / "theirs"


@pytest.mark.parametrize(
    "use",
    [
        lambda base, name: beneath.read(base, name, 100),
        lambda base, name: beneath.tail(base, name, 100),
        beneath.size,
        lambda base, name: beneath.append(base, name, "x"),
    ],
)
@pytest.mark.parametrize("trap", ["file link", "folder link", "pipe", "socketless device"])
def test_no_link_pipe_or_device_is_read_or_written(base: Path, trap: str, use: Callable[[Path, str], object]) -> None:
    name = "file"
    if trap == "file link":
        (base / "file").symlink_to(base.parent / "ours/file")
    elif trap == "folder link":
        name = "away/file"
        (base / "away").symlink_to(base.parent / "ours/sub")
    elif trap == "pipe":
        os.mkfifo(base / "file")  # a plain open waits for the other end for ever
    else:
        (base / "file").symlink_to("/dev/zero")
    with pytest.raises(OSError):
        use(base, name)
    assert (base.parent / "ours/file").read_text() == (base.parent / "ours/sub/file").read_text() == "secret"


@pytest.mark.parametrize("name", ["../ours/file", "sub/../../ours/file", "/etc/passwd", "", "a//b", "a\0b"])
def test_no_name_leads_outside(base: Path, name: str) -> None:
    for use in (lambda: beneath.read(base, name, 9), lambda: beneath.remove(base, name)):
        with pytest.raises(ValueError, match=r"outside|the name is empty"):
            use()


def test_a_read_is_bounded(base: Path) -> None:
    (base / "file").write_bytes(b"x" * 100)
    assert beneath.read(base, "file", 100) == b"x" * 100
    with pytest.raises(OSError, match="has more than 99 bytes"):
        beneath.read(base, "file", 99)
    assert beneath.tail(base, "file", 10) == (b"x" * 10, 90)


def test_replacing_a_link_leaves_its_target(base: Path) -> None:
    (base / "file").symlink_to(base.parent / "ours/file")
    beneath.replace(base, "file", b"new", 0o600)
    assert (base / "file").read_bytes() == b"new" and not (base / "file").is_symlink()
    assert (base.parent / "ours/file").read_text() == "secret"
    assert [path.name for path in base.iterdir() if path.is_file()] == ["file"], "nothing temporary is left"
    (base / "away").symlink_to(base.parent / "ours/sub")
    with pytest.raises(OSError):
        beneath.replace(base, "away/file", b"new")
    with pytest.raises(OSError):
        beneath.rename(base, "file", "away/file")


def test_deleting_a_tree_follows_no_link(base: Path) -> None:
    (base / "sub/away").symlink_to(base.parent / "ours")
    (base / "away").symlink_to(base.parent / "ours")
    assert beneath.remove(base, "sub") and beneath.remove(base, "away") and beneath.remove(base, "never-there")
    assert list(base.iterdir()) == []
    (base / "away").symlink_to(base.parent / "ours")
    assert not beneath.remove(base, "away/sub")
    assert (base.parent / "ours/sub/file").read_text() == "secret"


def test_a_tree_deeper_than_the_recursion_limit_is_deleted(base: Path) -> None:
    """It ended the agent with a RecursionError, again and again."""
    fd = os.open(base, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    (base / "file").touch()
    assert [name for name, _ in beneath.walk(base)] == ["file"]
    assert beneath.remove(base, "d")
    assert not (base / "d").exists()


def test_a_walk_follows_no_link_and_is_bounded(base: Path) -> None:
    (base / "sub/away").symlink_to(base.parent / "ours")
    for number in range(30):
        (base / f"sub/{number:02}").touch()
    names = [name for name, _ in beneath.walk(base)]
    assert names == [f"sub/{number:02}" for number in range(30)] + ["sub/away"]
    assert len(list(beneath.walk(base, "sub", most=7))) == 7
    assert len(beneath.names(base, "sub", most=7)) == 7
    with pytest.raises(OSError):
        list(beneath.walk(base, "sub/away"))
