"""The list of what a rank's job left in ``SPOTKEEPER_OUTPUT``: written last by its agent, read by ``download``.

A list that is there is whole, and so is every file it names: who reads it never meets half an upload, nor files of
two generations beside each other. Holds no reading and no writing.
"""

from __future__ import annotations

from msgspec import Struct


class OutputFile(Struct, frozen=True, forbid_unknown_fields=True):
    """``path``: as the job wrote it, below its folder, with ``/``. ``name``: below ``out/<rank>/`` in the bucket.

    ``md5``: in hex, as both clouds check it too; against damage, not against an enemy.
    """

    path: str
    name: str
    size: int
    md5: str


class Output(Struct, frozen=True, forbid_unknown_fields=True):
    """``jobs/<job>/out/<rank>.json``. ``left_out``: what is not there, and why, for people."""

    gen: int
    files: tuple[OutputFile, ...]
    left_out: tuple[str, ...] = ()

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)
