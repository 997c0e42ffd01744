"""The staging memory that ranks of one machine share through /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotkeeper.train.checkpoint.durable import PAGE, MemoryHandle, NeighbourMemory


@pytest.fixture
def memory() -> Iterator[MemoryHandle]:
    """Two pages, as the saver makes them."""
    fd = os.memfd_create("staging")
    os.truncate(fd, 2 * PAGE)
    yield MemoryHandle(os.getpid(), fd, 2 * PAGE)
    os.close(fd)


def test_what_a_rank_stages_is_in_the_savers_memory(memory: MemoryHandle) -> None:
    view = NeighbourMemory().open(MemoryHandle.from_bytes(memory.to_bytes()))
    assert len(view) == 2 * PAGE
    view[PAGE - 1 : PAGE + 2] = b"abc"
    assert os.pread(memory.fd, 5, PAGE - 2) == b"\0abc\0"


def staging_files() -> int:
    """Descriptors of this process for such memories; other tests' garbage closes its own at any time."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("memfd:staging" in str(link) for link in links)


def test_all_saves_use_one_mapping_until_the_memory_changes(memory: MemoryHandle) -> None:
    neighbour = NeighbourMemory()
    first = neighbour.open(memory)
    opened = staging_files()
    assert neighbour.open(memory).obj is first.obj
    assert staging_files() == opened
    os.truncate(memory.fd, 3 * PAGE)
    larger = replace(memory, size=3 * PAGE)
    assert len(neighbour.open(larger)) == 3 * PAGE
    next_saver = os.memfd_create("staging")
    os.pwrite(next_saver, b"new", 3 * PAGE - 3)
    os.dup2(next_saver, memory.fd)
    os.close(next_saver)
    assert bytes(neighbour.open(larger)[-3:]) == b"new"


def test_memory_that_is_gone_is_an_error_of_the_system(memory: MemoryHandle) -> None:
    with pytest.raises(FileNotFoundError):
        NeighbourMemory().open(replace(memory, fd=10**6))
